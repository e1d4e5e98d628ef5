"""One job of the plan: train a population in its run folder, going on where it stopped, and enter it in the ledger."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.reproduction.entries import identity, read_entry
from deeprnn.reproduction.plan import find_member
from deeprnn.runs import checkpoint, ledger
from deeprnn.runs.folder import Run, change_run
from deeprnn.training import keeping
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import Trainer, members_of
from deeprnn.training.recipe import Recipe

Say = Callable[[str], None]
SETUP = threading.Lock()
"""held while a job allocates, warms up and captures: nothing of another job may be half captured then"""


@dataclass(frozen=True)
class Place:
    """Where things go, and when to stop."""

    root: Path
    """run folders"""
    ledger: Path
    """entries"""
    device: str
    heard: Sequence[int]
    """holds a signal's number once everybody shall stop"""
    why_stopped: Callable[[], str] = lambda: ""
    """the budget's words where it was the budget; empty for a signal"""


def run_job(
    name: str, recipe: Recipe, stage: Recipe | None, folder: Path, data: Data, place: Place, say: Say
) -> bool:
    """Train to the end, or until everybody shall stop; whether it is finished."""
    with checkpoint.lock(folder), _on_own_stream(place.device):
        homes = keeping.homes(recipe, folder)
        if not all((home / "run.json").exists() for home in homes):
            keeping.lay_out(recipe, data, folder, place.device)
        if any(Run(home).info["result"] is None for home in homes):
            trainer = _trainer(recipe, stage, data, place)
            keeper = Keeper(trainer, folder, place.heard)
            if keeper.restore():
                say(f"{name}: goes on in epoch {trainer.epoch}")
            for home in homes:
                change_run(home, status="running")
            try:
                trainer.train([keeper, Progress(name, say)])
            except keeping.Interrupted:
                for home in homes:
                    change_run(home, status="stopped")
                _enter_unfinished(trainer, homes, stage, place, say, name)
                return False
            keeping.conclude(trainer, folder)
        for home in homes:
            enter(_entry(Run(home), stage), place.ledger)
        say(f"{name}: finished, {_results(homes)}")
        return True


def _trainer(recipe: Recipe, stage: Recipe | None, data: Data, place: Place) -> Trainer:
    pretrained = None
    if stage is not None:
        pretrained = [_first_parameters(stage, member.seed, place.root) for member in members_of(recipe)]
    with SETUP:
        trainer = Trainer(recipe, data, device=place.device, pretrained=pretrained)
    if trainer.device.type == "cuda":
        from deeprnn.reproduction.streams import ConcurrentEngine

        trainer._graphs = ConcurrentEngine(trainer.updater, SETUP)
    return trainer


def _first_parameters(stage: Recipe, seed: int, root: Path) -> Mapping[str, Tensor]:
    home = find_member(root, identity(stage), seed)
    if home is None:
        raise UserError(
            f"the first stage {stage.data.name}/{stage.model.kind} has no finished seed {seed} in {root}"
        )
    return checkpoint.load_best(home).tensors


@contextlib.contextmanager
def _on_own_stream(device: str):
    """Work of one thread on its own CUDA stream, so that small populations share the card."""
    if not device.startswith("cuda"):
        yield
        return
    from deeprnn.reproduction.streams import own_stream

    torch.cuda.set_device(torch.device(device).index or 0)
    with own_stream() as stream, torch.cuda.stream(stream):
        yield


class Keeper(keeping.Keeper):
    """Saves less often than every epoch: an epoch of a small set takes less time than saving it."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """Write the epoch's lines; save the state when it is time, or the run ends here."""
        for p, row in enumerate(rows):
            if row is not None:
                self._append(p, row)
        due = time.monotonic() - self.saved_at >= (trainer.recipe.save.seconds or 0.0)
        if due or self.heard or trainer.schedule.done:
            self.save()
        if self.heard and not trainer.schedule.done:
            raise keeping.Interrupted(self.heard[0])


class Progress:
    """A plain line about a job now and then."""

    def __init__(self, name: str, say: Say, every: float = 15.0) -> None:
        self.name, self.say, self.every = name, say, every
        self.said = time.monotonic()
        self.epochs = 0

    def updated(self, trainer: Trainer) -> None:
        """Nothing: lines are for epochs."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """One line for all members, if the last one is some time ago."""
        self.epochs += 1
        now = time.monotonic()
        live = [row for row in rows if row is not None]
        if now - self.said < self.every or not live:
            return
        valid = " ".join(f"{row['valid']:.3f}" for row in live)
        pace = (now - self.said) / self.epochs
        self.say(f"{self.name}: epoch {live[0]['epoch']}, valid {valid}, rate {live[0]['rate']:.3g}, "
                 f"{pace:.2f} s an epoch")  # fmt: skip
        self.said, self.epochs = now, 0


# ---- the ledger


def _entry(run: Run, stage: Recipe | None) -> dict[str, Any]:
    """A run's entry, with the recipe of the first stage it started from."""
    return {**ledger.entry(run), "first_stage": None if stage is None else stage.to_dict()}


def entry_path(entry: Mapping[str, Any], folder: Path) -> Path:
    """Where a run's entry goes: by data, model, recipe and seed; where the ledger has that run, its own place."""
    own, stem = identity(Recipe.from_dict(entry["recipe"])), f"{entry['data']['name']}-{entry['model']}"
    for path in folder.glob(f"{stem}-*.json"):
        found = read_entry(path)
        if (found.identity, found.seed) == (own, entry["seed"]):
            return path
    return folder / f"{stem}-{own}-seed-{entry['seed']}.json"


def enter(entry: Mapping[str, Any], folder: Path) -> Path:
    """Write an entry, unless a finished run's stands there already."""
    path = entry_path(entry, folder)
    if path.exists() and not read_entry(path).cut_off:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(path, entry)
    return path


def _enter_unfinished(
    trainer: Trainer, homes: Sequence[Path], stage: Recipe | None, place: Place, say: Say, name: str
) -> None:
    """Score what the time allowed and enter it as cut off; a later run takes its place."""
    reason = place.why_stopped()
    if not reason or not all(m.best_epoch for m in trainer.schedule.members):
        say(f"{name}: stopped in epoch {trainer.epoch}, saved")
        return
    for p, (home, result) in enumerate(zip(homes, trainer.results(), strict=True)):
        done = trainer.schedule.members[p].finished
        run = Run(home)
        run.__dict__["info"] = {**run.info, "result": result, "reason": done or reason,
                                "seconds": round(trainer.seconds, 1)}  # fmt: skip
        enter(_entry(run, stage), place.ledger)
    say(f"{name}: {reason}; saved in epoch {trainer.epoch}, entered as it stands")


def _results(homes: Sequence[Path]) -> str:
    info = [Run(home).info for home in homes]
    key = {"nats/frame": "nats_per_frame"}.get(info[0]["metric"], info[0]["metric"])
    values = " ".join(f"{i['result']['test'][key]:.3f}" for i in info)
    paper = "" if info[0]["paper"] is None else f" (paper {info[0]['paper']:g})"
    return f"test {values}{paper} in {info[0].get('seconds', 0.0):.0f} s"
