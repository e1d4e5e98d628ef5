"""Keeping a run: what is written when, so that it survives a kill at any moment.

An epoch's end appends a line to metrics.jsonl, then saves the state, which holds the file's length. A run
that is cut off in between is taken up from the saved state with metrics.jsonl cut to that length, and does
again, bit for bit, what was lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deeprnn import __version__
from deeprnn.data.music import MusicData, Songs
from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.model.models import SequenceModel
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import Run, change_run, commit, environment, start_population, start_run
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import Trainer, members_of
from deeprnn.training.recipe import Recipe, override, to_toml

logger = logging.getLogger("deeprnn")

METRICS = {"music": "nats/frame", "char": "bpc", "word": "perplexity"}


class Interrupted(Exception):
    """A signal asked the run to stop; its state has been saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def listening() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one acts at once.

    Python delivers signals to the main thread only: elsewhere this listens to nothing.
    """
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return

    def handle(number: int, frame: Any) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Keeper:
    """Watches a trainer and keeps its run folder; a population has a folder for each member below `folder`."""

    def __init__(self, trainer: Trainer, folder: Path, heard: Sequence[int] = ()) -> None:
        self.trainer, self.folder, self.heard = trainer, folder, heard
        self.homes = homes(trainer.recipe, folder)
        self.lengths = [0] * len(self.homes)
        self.saved_at = time.monotonic()
        self.saved_best = [0] * len(self.homes)

    # ---- watching

    def updated(self, trainer: Trainer) -> None:
        """Save in mid-epoch where the recipe asks for it, or a signal does."""
        part = trainer.recipe.save
        due = part.seconds and time.monotonic() - self.saved_at >= part.seconds
        if due or (part.updates and trainer.index % part.updates == 0) or self.heard:
            trainer.check_finite()
            self.save()
        if self.heard:
            raise Interrupted(self.heard[0])

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """Write the epoch's lines, then the state."""
        for p, row in enumerate(rows):
            if row is not None:
                self._append(p, row)
        self.save()
        if self.heard and not trainer.schedule.done:
            raise Interrupted(self.heard[0])

    def _append(self, member: int, row: Mapping[str, Any]) -> None:
        line = (json.dumps(row) + "\n").encode()
        path = self.homes[member] / "metrics.jsonl"
        try:
            with open(path, "ab") as file:
                file.truncate(self.lengths[member])
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise checkpoint.DiskFull(
                f"cannot write {path} ({error.strerror}); the last checkpoint is intact"
            ) from error
        self.lengths[member] += len(line)

    # ---- saving

    def save(self) -> None:
        """The whole training state, and the best parameters where they are new."""
        t = self.trainer
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
        }
        checkpoint.save_state(self.folder, {**t.updater.tensors(), "best": t.best}, meta)
        self.saved_at = time.monotonic()

    @torch.no_grad()
    def restore(self) -> bool:
        """Take up the newest whole state; False if none was saved yet."""
        found = checkpoint.load_state(self.folder)
        if found is None:
            self._cut([0] * len(self.homes))
            return False
        t, meta = self.trainer, found.meta
        if meta["parameters"] != list(t.layout.names):
            raise UserError(
                f"{found.path} belongs to another model than {self.folder / 'recipe.toml'} describes"
            )
        # Adam's count was not kept apart from the updates at first: such a state has seen all of them.
        saved = {"optimiser.seen": found.tensors["tau"], **found.tensors}
        for name, tensor in {**t.updater.tensors(), "best": t.best}.items():
            if name not in saved:
                raise UserError(
                    f"{found.path} has no {name!r}: it was saved with other settings or by another version"
                )
            tensor.copy_(saved[name])
        t.epoch, t.index = meta["epoch"], meta["index"]
        t.seconds, t.epoch_seconds = meta["seconds"], meta["epoch_seconds"]
        t.schedule.load(meta["members"])
        self.saved_best = [0] * len(self.homes)  # so that best.* is written again, whatever befell it
        self._cut(meta["metrics_bytes"])
        return True

    def _cut(self, lengths: Sequence[int]) -> None:
        """Put metrics.jsonl back to what the state knows of; lines that were lost since stay lost."""
        self.lengths = list(lengths)
        for p, (home, length) in enumerate(zip(self.homes, lengths, strict=True)):
            path = home / "metrics.jsonl"
            kept = path.read_bytes()[:length] if path.exists() else b""
            if len(kept) < length:
                logger.warning("%s has lost lines: its learning curve begins anew", path)
                kept = b""
            self.lengths[p] = len(kept)
            if path.exists():
                os.truncate(path, len(kept))


def homes(recipe: Recipe, folder: Path) -> list[Path]:
    """Each member's own folder: the run's, or one below it."""
    members = members_of(recipe)
    return [folder] if len(members) == 1 else [folder / member.name for member in members]


def lay_out(recipe: Recipe, data: Data, folder: Path, device: torch.device | str) -> None:
    """Create the folder (and the members') with everything known before the first update."""
    members = members_of(recipe)
    spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    if len(members) > 1:
        start_population(folder, [m.name for m in members], to_toml(recipe))
    shared = {
        "status": "running",
        "data": {
            "name": data.name,
            "kind": data.kind,
            "path": own_path(recipe),
            "fingerprint": fingerprint(data),
        },
        "model": spec.to_dict(),
        "label": label(recipe),
        "parameters": sum(p.numel() for p in SequenceModel(spec, "meta", initialise=False).parameters()),
        "version": __version__,
        "commit": commit(),
        "environment": environment(str(device)),
        "paper": paper.result(data.name, recipe.model.kind) if is_paper(recipe) else None,
        "metric": METRICS[data.kind],
        "result": None,
    }
    for member, home in zip(members, homes(recipe, folder), strict=True):
        own = override(recipe, {"seeds": [member.seed], "rates": [], "optimiser.rate": member.rate})
        name = folder.name if home == folder else f"{folder.name}/{member.name}"
        start_run(home, {"name": name, **shared, "seed": member.seed}, to_toml(own), side_files(data))


def fingerprint(data: Data) -> str:
    """What the data is, in a few characters: another text or other songs have another."""
    digest = hashlib.sha256()
    for name, split in data.splits.items():
        digest.update(name.encode())
        arrays = (split.lengths, split.packed) if isinstance(split, Songs) else (np.asarray(split, np.int64),)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
    if not isinstance(data, MusicData):
        digest.update(json.dumps(data.vocabulary).encode())
    return digest.hexdigest()[:16]


def mend_side_files(recipe: Recipe, data: Data, folder: Path) -> None:
    """Write again what generation needs of the data, where it was lost or damaged."""
    for home in homes(recipe, folder):
        for name, content in side_files(data).items():
            try:
                whole = json.loads((home / name).read_bytes()) == content
            except (OSError, ValueError):
                whole = False
            if not whole:
                checkpoint.write_json(home / name, content)


def check_data(recipe: Recipe, data: Data, folder: Path) -> None:
    """Refuse to go on with other data than the run began with: that would be another run."""
    for home in homes(recipe, folder):
        begun = Run(home).info["data"].get("fingerprint")  # runs of earlier versions have none
        if begun is not None and begun != fingerprint(data):
            raise UserError(
                f"{recipe.data.name} has changed since {folder} began, which therefore cannot go on exactly: "
                "put the data back, or train a new run"
            )


def own_path(recipe: Recipe) -> str | None:
    """Where a person's own data lies, None for a named set."""
    from deeprnn.data import names

    return None if recipe.data.name in names() else recipe.data.name


def side_files(data: Data) -> dict[str, Any]:
    """What generation needs of the data: a music's grid, a text's vocabulary."""
    if isinstance(data, MusicData):
        return {} if data.grid is None else {"grid.json": data.grid.to_dict()}
    return {"vocabulary.json": data.vocabulary}


def label(recipe: Recipe) -> str:
    """The model's name as the paper prints it, else the recipe's own word."""
    return paper.LABELS.get(recipe.model.kind, recipe.model.kind)


def is_paper(recipe: Recipe) -> bool:
    """Whether the model has Table 1's size, so that the paper's number stands beside its own."""
    if recipe.model.kind == "dots-star":
        return True  # its sizes are not published
    try:
        spec = paper.spec(recipe.data.name, recipe.model.kind)
    except (KeyError, StopIteration):
        return False
    own = recipe.model.spec(spec.input_size, spec.output == "categorical", spec.dropout)
    return own == spec


def conclude(trainer: Trainer, folder: Path) -> list[dict[str, Any]]:
    """Score the best parameters, close the run folders and write each one's ledger entry."""
    from deeprnn.runs import ledger

    results = trainer.results()
    for p, (home, result) in enumerate(zip(homes(trainer.recipe, folder), results, strict=True)):
        reason = trainer.schedule.members[p].finished
        change_run(home, status="finished", result=result, reason=reason, seconds=round(trainer.seconds, 1))
        checkpoint.write_json(home / "ledger.json", ledger.entry(Run(home)))
    return results
