"""One job of the plan: train a population in its run folder, going on where it stopped, and record it in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.reproduction.entries import record
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.plan import find_member
from deeprnn.runs import ledger
from deeprnn.runs.folder import Run
from deeprnn.runs.summary import summary
from deeprnn.training import run_folders, saving, session
from deeprnn.training.cuda_graph import on_own_stream
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import Trainer, Watcher
from deeprnn.training.members import MemberName
from deeprnn.training.recipe import Recipe
from deeprnn.training.transfer import Source

Say = Callable[[str], None]

LINE_SECONDS = 15.0
"""between two lines about a job"""


@dataclass(frozen=True)
class Place:
    """Where things go, and when to stop."""

    root: Path
    """run folders"""
    ledger: Path
    """entries"""
    device: str
    received: Sequence[int]
    """holds a signal's number once everybody shall stop"""
    why_stopped: Callable[[], str] = lambda: ""
    """the budget's words where it was the budget; empty for a signal"""


def run_job(
    name: str, recipe: Recipe, stage: Recipe | None, folder: Path, data: Data, place: Place, say: Say
) -> bool:
    """Train to the end, or until everybody shall stop; whether it is finished."""
    lines = Lines(name, say)
    start = None if stage is None else lambda member: _first_parameters(stage, member, place)
    homes = run_folders.member_folders(recipe, folder)
    with on_own_stream(place.device):
        try:
            session.run_recipe(
                recipe,
                folder,
                data=data,
                device=place.device,
                watch=lines.watch,
                start=start,
                save_every_epoch=False,  # an epoch of a small set takes less time than saving it
                received=place.received,
            )
        except saving.Interrupted:
            _record_unfinished(lines, homes, place)
            return False
    finished = [run for run in map(Run, homes) if run.info["result"] is not None]
    for run in finished:
        record(ledger.entry(run), place.ledger)
    say(f"{name}: finished, {_results(finished)}")
    return True


def _first_parameters(stage: Recipe, member: MemberName, place: Place) -> Source:
    """Where a member starts from; a kill may have kept that from being entered, and no job would do it any more."""
    home = find_member(place.root, identity(stage), member.seed)
    if home is None:
        raise UserError(
            f"the first stage {stage.data.name}/{stage.model.kind} has no finished seed {member.seed} in {place.root}"
        )
    run = Run(home)
    record(ledger.entry(run), place.ledger)
    return Source.of(run)


class Lines:
    """A plain line about a job now and then."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self.say = name, say
        self.said = time.monotonic()
        self.epochs = 0
        self.trainer: Trainer | None = None

    def watch(self, trainer: Trainer, folder: Path) -> list[Watcher]:
        """Watch this trainer, which may go on with what was saved."""
        self.trainer = trainer
        if trainer.epoch > 1 or trainer.index:
            self.say(f"{self.name}: goes on in epoch {trainer.epoch}")
        return [self]

    def updated(self, trainer: Trainer) -> None:
        """Nothing: lines are for epochs."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """One line for all members, if the last one is some time ago."""
        self.epochs += 1
        now = time.monotonic()
        live = [row for row in rows if row is not None]
        if now - self.said < LINE_SECONDS or not live:
            return
        valid = " ".join(f"{row['valid']:.3f}" for row in live)
        pace = (now - self.said) / self.epochs
        self.say(f"{self.name}: epoch {live[0]['epoch']}, valid {valid}, rate {live[0]['rate']:.3g}, "
                 f"{pace:.2f} s an epoch")  # fmt: skip
        self.said, self.epochs = now, 0


# ---- the ledger


def _record_unfinished(lines: Lines, homes: Sequence[Path], place: Place) -> None:
    """Score what the time allowed and record it as cut off; it stays beside the finished run of later."""
    trainer, reason = lines.trainer, place.why_stopped()
    assert trainer is not None, "a run is interrupted while it trains"
    if not reason or not all(m.best_epoch for m in trainer.schedule.members):
        lines.say(f"{lines.name}: stopped in epoch {trainer.epoch}, saved")
        return
    members = zip(homes, trainer.schedule.members, trainer.results(), strict=True)
    for home, member, result in members:
        changes = {
            "result": result,
            "reason": member.finished or reason,
            "seconds": round(trainer.seconds, 1),
        }
        run = Run(home)
        record(ledger.entry(run, {**run.info, **changes}), place.ledger)
    lines.say(f"{lines.name}: {reason}; saved in epoch {trainer.epoch}, recorded as it stands")


def _results(runs: Sequence[Run]) -> str:
    if not runs:
        return "but every member diverged"
    split = "test" if "test" in runs[0].info["result"] else "valid"
    values = " ".join(f"{summary(run)[split]:.3f}" for run in runs)
    info = runs[0].info
    paper = "" if info["paper"] is None or split != "test" else f" (paper {info['paper']:g})"
    return f"{split} {values}{paper} in {info.get('seconds', 0.0):.0f} s"
