"""Saving a run: what is written when, so that it survives a kill at any moment.

An epoch's end appends a line to metrics.jsonl, then saves the state, which holds the file's length. A run
that is cut off in between is taken up from the saved state with metrics.jsonl cut to that length, and does
again, bit for bit, what was lost.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deeprnn.errors import UserError
from deeprnn.files import cannot_write
from deeprnn.runs import checkpoint
from deeprnn.runs.reading import regular
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import Recipe
from deeprnn.training.recipe.continuing import check_goes_on
from deeprnn.training.run_folders import fingerprint, member_folders

logger = logging.getLogger("deeprnn")


class Interrupted(Exception):
    """A signal asked the run to stop; its state has been saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one acts at once.

    Python delivers signals to the main thread only: elsewhere this listens to nothing.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunSaver:
    """Watches a trainer and writes its run folder; a population has a folder for each member below `folder`.

    Of several ranks the lead alone touches files; the others hand it their lanes' states, and stop when it does.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        received: Sequence[int] = (),
        every_epoch: bool = True,
        homes: Sequence[Path] | None = None,
    ) -> None:
        self.trainer, self.folder, self.received, self.every_epoch = trainer, folder, received, every_epoch
        self.homes = list(member_folders(trainer.recipe, folder) if homes is None else homes)
        self.lengths = [0] * len(self.homes)
        self.saved_at = trainer.seconds
        self.saved_best = [0] * len(self.homes)
        self.fingerprint = fingerprint(trainer.data)
        self.threads = 0
        """CPU threads that the saved state was trained with by as many processes; 0: not known"""

    # ---- watching

    def updated(self, trainer: Trainer) -> None:
        """Save in mid-epoch where the recipe asks for it, or a signal does."""
        part, signal = trainer.recipe.save, self._signal() if trainer.met else 0
        if (part.seconds and self._due) or (part.updates and trainer.index % part.updates == 0) or signal:
            trainer.check_finite(saving=True)
            self.save()
        if signal:
            raise Interrupted(signal)

    def scored(self, trainer: Trainer, split: str, done: int, total: int) -> None:
        """Stop in the middle of scoring where a signal asks for it; it begins again when the run goes on."""
        if signal := self._signal():
            if not trainer.schedule.done:  # within an epoch's end, which nothing has been saved of
                trainer.check_finite(saving=True)
                self.save()
            raise Interrupted(signal)

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """Write the epoch's lines, then the state: where the run ends here, when it is time, or always."""
        for p, row in enumerate(rows):
            if row is not None:
                self._append(p, row)
        signal = self._signal()
        if self.every_epoch or self._due or signal or trainer.schedule.done:
            self.save()
        if signal and not trainer.schedule.done:
            raise Interrupted(signal)

    def _signal(self) -> int:
        """The signal that some rank has received, 0 without one; all ranks ask at the same time."""
        return int(self.trainer.ranks.most(self.received[0] if self.received else 0))

    @property
    def _due(self) -> bool:
        # By the trainer's clock, which is the same on all ranks.
        return self.trainer.seconds - self.saved_at >= self.trainer.recipe.save.seconds

    def _append(self, member: int, row: Mapping[str, Any]) -> None:
        if not self.trainer.ranks.lead:
            return
        line = (json.dumps(row) + "\n").encode()
        path = self.homes[member] / "metrics.jsonl"
        try:
            with open(path, "ab") as file:
                file.truncate(self.lengths[member])
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(path, error) from error
        self.lengths[member] += len(line)

    # ---- saving

    def save(self) -> None:
        """The whole training state, and the best parameters where they are new."""
        t = self.trainer
        tensors = t.updater.whole_tensors()
        self.saved_at = t.seconds
        if not t.ranks.lead:
            return
        for p, m in enumerate(t.schedule.members):
            if m.best_epoch > self.saved_best[p]:
                checkpoint.save_best(
                    self.homes[p], t.parameters(p), {"epoch": m.best_epoch, "valid_nats": m.best}
                )
                self.saved_best[p] = m.best_epoch
        meta = {
            "epoch": t.epoch,
            "index": t.index,
            "seconds": t.seconds,
            "epoch_seconds": t.epoch_seconds,
            "members": t.schedule.state(),
            "metrics_bytes": self.lengths,
            "parameters": list(t.layout.names),
            "recipe": t.recipe.to_dict(),
            "fingerprint": self.fingerprint,
            "threads": torch.get_num_threads(),
            "processes": t.ranks.count,
        }
        checkpoint.save_state(self.folder, {**tensors, "best": t.best}, meta)

    @torch.no_grad()
    def restore(self) -> bool:
        """Take up the newest whole state; False if none was saved yet."""
        t, ranks = self.trainer, self.trainer.ranks
        state = checkpoint.load_state(self.folder) if ranks.lead else None
        if ranks.same(state is None):
            self._cut([0] * len(self.homes))
            return False
        state = state or checkpoint.Checkpoint({}, {}, self.folder)
        meta = ranks.same(state.meta)
        check_goes_on(meta.get("recipe", {}), t.recipe, self.folder / "recipe.toml")
        if meta["parameters"] != list(t.layout.names):
            raise UserError(
                f"{state.path} belongs to another model than {self.folder / 'recipe.toml'} describes"
            )
        # A state without Adam's own count, by an earlier version, has seen every update.
        tensors = ranks.same_tensors(state.tensors)
        saved = {"optimiser.seen": tensors["tau"], **tensors}
        for name, tensor in {**t.updater.tensors(), "best": t.best}.items():
            if name not in saved:
                raise UserError(
                    f"{state.path} has no {name!r}: it was saved with other settings or by another version"
                )
            tensor.copy_(t.updater.own(name, saved[name]))
        t.epoch, t.index = meta["epoch"], meta["index"]
        t.seconds, t.epoch_seconds = meta["seconds"], meta["epoch_seconds"]
        t.schedule.load(meta["members"])
        self.saved_best = [0] * len(self.homes)  # so that best.* is written again, whatever befell it
        self.saved_at = t.seconds
        if meta.get("processes", 1) == ranks.count:
            self.threads = meta.get("threads", 0)
        self._cut(meta["metrics_bytes"])
        return True

    def reopen(self) -> None:
        """Go on with members that the recipe's present limits would not have stopped; an error if there are none."""
        t = self.trainer
        t.reopen()
        if t.schedule.done:
            reasons = "; ".join(dict.fromkeys(m.finished for m in t.schedule.members))
            raise UserError(
                f"{self.folder} has trained {t.epoch - 1} epochs in {t.seconds / 60:.1f} minutes and cannot go on "
                f"({reasons}): limits count from the run's beginning, so give larger ones, as in "
                f"--stop.epochs {2 * (t.epoch - 1)} or --stop.minutes {2 * t.seconds / 60:.2g}, or 0 for none"
            )

    def _cut(self, lengths: Sequence[int]) -> None:
        """Put metrics.jsonl back to what the state knows of; lines that were lost since stay lost."""
        self.lengths = list(lengths)
        if not self.trainer.ranks.lead:
            return
        for p, (home, length) in enumerate(zip(self.homes, lengths, strict=True)):
            path = home / "metrics.jsonl"
            if os.path.lexists(path) and not regular(path):
                path.unlink()  # a pipe or a link in its place: nothing of ours
            lines = path.read_bytes()[:length] if path.exists() else b""
            if len(lines) < length:
                logger.warning("%s has lost lines: its learning curve begins anew", path)
                lines = b""
            self.lengths[p] = len(lines)
            if path.exists():
                os.truncate(path, len(lines))


def has_other_limits(recipe: Recipe, folder: Path) -> bool:
    """Whether a recipe says otherwise than the newest checkpoint's when to stop."""
    saved = (checkpoint.read_meta(folder) or {}).get("recipe", {})
    return any(getattr(recipe.stop, name) != value for name, value in saved.get("stop", {}).items())
