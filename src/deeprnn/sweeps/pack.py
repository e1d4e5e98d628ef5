"""A pack: trials of one shape that train in lockstep as one population, each in a folder of its own.

    pack = Pack(0, trials=(0, 1), recipes=(a, b))
    results = train_pack(pack, Path("sweeps/s"), "cpu", report=tell)

Nothing here knows how trials are chosen. The state of the whole pack is saved now and then, so that a pack that was cut
off goes on where it stood. No split but the training and the validation part is ever scored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deeprnn.cells import lookup
from deeprnn.errors import UserError
from deeprnn.files import write_json
from deeprnn.runs.checkpoint import NoWholeCheckpoint, remove_state
from deeprnn.runs.folder import Run, load_run
from deeprnn.runs.locking import InUse, lock, lock_of_the_dead
from deeprnn.runs.reading import read_json
from deeprnn.sweeps.storage import Store
from deeprnn.training import memory, run_folders, saving, session
from deeprnn.training.cuda_graph import SETUP, on_own_stream
from deeprnn.training.evaluate import Data
from deeprnn.training.loading import load_data
from deeprnn.training.lockstep import shared_recipe
from deeprnn.training.loop import NonFinite, Trainer
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import Recipe, override
from deeprnn.training.transfer import Source, check_transfer

logger = logging.getLogger("deeprnn")

Row = Mapping[str, Any]
Report = Callable[[Sequence[Row | None]], Sequence[int]]
"""told an epoch's line of every member, None for those that had finished; answers with the members that shall stop"""
DIVERGED = "diverged"
"""what the reason of a failed member begins with"""
PRUNED = "pruned"
MOST_JSON = 2**24
"""bytes of a pack.json"""


@dataclass(frozen=True)
class Pack:
    """Members that train together: of each its trial and its own recipe, which has one seed."""

    number: int
    trials: tuple[int, ...]
    recipes: tuple[Recipe, ...]

    @property
    def folder(self) -> str:
        """Where its state is kept, below the sweep's folder."""
        return f"packs/{self.number:05d}"

    @property
    def members(self) -> dict[int, list[int]]:
        """Of each trial its members: one for each of its seeds."""
        return {trial: [m for m, t in enumerate(self.trials) if t == trial] for trial in self.trials}

    def write(self, root: Path) -> None:
        """Write pack.json into its folder, from which another process takes it up."""
        folder = root / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        recipes = [recipe.to_dict() for recipe in self.recipes]
        write_json(folder / "pack.json", {"trials": self.trials, "recipes": recipes})

    @property
    def homes(self) -> list[str]:
        """Each member's own folder, below the sweep's."""
        return [
            trial_folder(trial, recipe.seeds[0], self.trials.count(trial) > 1)
            for trial, recipe in zip(self.trials, self.recipes, strict=True)
        ]


def read_pack(path: Path) -> Pack | None:
    """The pack of a pack.json; None where that was cut off while it was written."""
    with suppress(UserError, OSError, KeyError, TypeError, ValueError):
        plain = read_json(path, MOST_JSON)
        recipes = tuple(Recipe.from_dict(r) for r in plain["recipes"])
        if len(recipes) == len(plain["trials"]) > 0:
            return Pack(int(path.parent.name), tuple(int(t) for t in plain["trials"]), recipes)
    return None


def trial_folder(trial: int, seed: int = 0, per_seed: bool = False) -> str:
    """The folder of a trial, or of one of its seeds."""
    return f"trials/{trial:05d}" + (f"/seed-{seed}" if per_seed else "")


@dataclass(frozen=True)
class Result:
    """How a member ended."""

    valid: float | None
    """the best validation score, None where there is none"""
    epoch: int
    """of the best score"""
    epochs: int
    reason: str
    failed: bool
    """whether its numbers came to an end"""


def train_pack(
    pack: Pack,
    root: Path,
    device: str = "cpu",
    *,
    data: Data | None = None,
    report: Report = lambda rows: (),
    received: Sequence[int] = (),
    stopped: Sequence[int] = (),
    store: Store | None = None,
) -> list[Result]:
    """Train to the end, going on where an earlier attempt stopped; the members' results.

    `stopped` members are not trained any further. `store` keeps what this machine may lose. Raises
    `saving.Interrupted` when `received` holds a signal, after the state has been saved.
    """
    folder, homes = root / pack.folder, [root / home for home in pack.homes]
    for recipe in pack.recipes:
        if recipe.model.cell:
            lookup.load(recipe.model.cell)
    with lock_of_the_dead(folder, received), on_own_stream(device):
        if store is not None:
            for name in (*pack.homes, pack.folder):
                store.download(name, root / name)
        for home in homes:
            home.mkdir(parents=True, exist_ok=True)
        shared = without_test(shared_recipe(pack.recipes))
        data = data or load_data(shared.data)
        memory.check(replace(shared, seeds=tuple(range(len(pack.recipes)))), data, device)
        start = _starts(pack.recipes, root, data, device, received)
        with SETUP:
            trainer = Trainer(shared, data, device=device, pretrained=start, variants=pack.recipes)
        saver = _Saver(trainer, pack, root, received, store)
        saver.restore()
        for member in stopped:
            end(trainer, member, PRUNED)
        reporter = _Reporter(pack.recipes, report)
        reporter.replay(trainer, [Run(home).metrics() for home in homes])
        try:
            trainer.train([reporter, saver])
        except NonFinite:  # nobody is left
            for member in range(len(pack.recipes)):
                end(trainer, member, f"{DIVERGED} in epoch {trainer.epoch}")
        if store is not None:
            saver.upload()
        return [_result(trainer, p, home) for p, home in enumerate(homes)]


def without_test(recipe: Recipe) -> Recipe:
    """The recipe as a search trains it: the test part stays unread."""
    return override(recipe, {"evaluation.test": False})


def end(trainer: Trainer, member: int, reason: str) -> None:
    """Let a member go no further; what it has learnt stays."""
    if not trainer.schedule.members[member].finished:
        trainer.schedule.members[member].end(reason)
        trainer.schedule.push()


class _Saver(saving.RunSaver):
    """Saves the pack's state, each member's best parameters and lines, and a copy where the store is."""

    def __init__(
        self, trainer: Trainer, pack: Pack, root: Path, received: Sequence[int], store: Store | None
    ) -> None:
        homes = [root / home for home in pack.homes]
        super().__init__(trainer, root / pack.folder, received, every_epoch=False, homes=homes)
        self.pack, self.root, self.store = pack, root, store

    def restore(self) -> bool:
        """Take up the pack's state; one that was damaged is no trial's fault, and the pack begins anew."""
        try:
            return super().restore()
        except NoWholeCheckpoint:
            _discard_state(self.folder)
            return super().restore()

    def save(self) -> None:
        """Here, and then in the store."""
        super().save()
        self.upload()

    def upload(self) -> None:
        """The members' files first: a state that can be read is one whose files are all there."""
        if self.store is not None:
            for name in (*self.pack.homes, self.pack.folder):
                self.store.upload(self.root / name, name)


def _discard_state(folder: Path) -> None:
    logger.warning("no checkpoint in %s is whole any more: what trains there begins anew", folder)
    remove_state(folder)


class _Reporter:
    """Tells how an epoch went, ends members that shall stop, and those that met a NaN and were to stop of it."""

    def __init__(self, recipes: Sequence[Recipe], report: Report) -> None:
        self.recipes, self.report = recipes, report

    def updated(self, trainer: Trainer) -> None:
        """Nothing: pruners look at epochs."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Row | None]) -> None:
        """One line a member."""
        for member, step in enumerate(trainer.updater.bad.tolist()):
            if step >= 0 and self.recipes[member].optimiser.nonfinite == "stop":
                end(trainer, member, f"{DIVERGED}: the loss or gradient of update {step} was NaN or infinite")
        self._report_epoch(trainer, rows)

    def replay(self, trainer: Trainer, curves: Sequence[Sequence[Row]]) -> None:
        """The epochs of an earlier attempt: whoever heard of them may have died before writing them down."""
        by_epoch = [{row["epoch"]: row for row in curve} for curve in curves]
        for epoch in sorted(set().union(*by_epoch)):
            self._report_epoch(trainer, [rows.get(epoch) for rows in by_epoch])

    def _report_epoch(self, trainer: Trainer, rows: Sequence[Row | None]) -> None:
        for member in self.report(rows):
            end(trainer, member, PRUNED)


def _result(trainer: Trainer, member: int, home: Path) -> Result:
    m = trainer.schedule.members[member]
    rows = Run(home).metrics()
    best = min((row for row in rows if row["epoch"] <= m.best_epoch), key=lambda r: r["valid"], default=None)
    failed = DIVERGED in m.finished or best is None
    reason = m.finished or "no epoch was finished"
    valid = None if best is None else float(best["valid"])
    return Result(valid, m.best_epoch, len(rows), reason, failed and m.finished != PRUNED)


# ---- first stages


def _starts(
    recipes: Sequence[Recipe], root: Path, data: Data, device: str, received: Sequence[int]
) -> Sequence[Source | None] | None:
    """The parameters each member starts from, where its recipe names a first stage or a run."""
    first = recipes[0]
    if first.pretrain.run:
        source = Source.of(load_run(Path(first.pretrain.run)))
        check_transfer(first, data, source)
        return [source] * len(recipes)
    stage = first_stage(replace(first, seeds=tuple(sorted({r.seeds[0] for r in recipes})), rates=()))
    if stage is None:
        return None
    stage = without_test(stage)
    text = json.dumps(stage.to_dict(), sort_keys=True)
    folder = root / "first-stages" / hashlib.sha256(text.encode()).hexdigest()[:16]
    while True:
        try:
            results = session.run_recipe(
                stage, folder, data=data, device=device, received=received, save_every_epoch=False
            )
            break
        except InUse:  # another pack of this shape trains it
            if received:
                raise
        except NoWholeCheckpoint:
            with suppress(InUse), lock(folder):
                _discard_state(folder)
    homes = run_folders.member_folders(stage, folder)
    sources = {
        seed: None if result is None else Source.of(Run(home))
        for seed, home, result in zip(stage.seeds, homes, results, strict=True)
    }
    return [sources[recipe.seeds[0]] for recipe in recipes]
