"""A run from beginning to end, or from where it was cut off: both stages, one lock, one way to stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deeprnn import __version__, launcher
from deeprnn.cells.library import LIBRARY
from deeprnn.errors import UserError
from deeprnn.files import CannotWrite
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import Run, load_run, population
from deeprnn.runs.locking import lock
from deeprnn.runs.provenance import environment
from deeprnn.runs.run_files import change_run
from deeprnn.training import commutative, memory, mending, run_folders, saving, threads
from deeprnn.training.cuda_graph import SETUP
from deeprnn.training.engine import Engine, engine_for
from deeprnn.training.evaluate import Data, visible
from deeprnn.training.loading import load_data
from deeprnn.training.loop import NonFinite, Trainer, Watcher
from deeprnn.training.members import MemberName, members_of
from deeprnn.training.pretrain import first_stage
from deeprnn.training.progress import Progress
from deeprnn.training.ranks import Ranks
from deeprnn.training.recipe import Recipe, load_recipe, override
from deeprnn.training.transfer import Source, check_transfer
from deeprnn.training.updater import Updater

logger = logging.getLogger("deeprnn")

Watch = Callable[[Trainer, Path], Sequence[Watcher]]
"""makes the watchers of a stage: live view, TensorBoard"""
Start = Callable[[MemberName], Source]
"""where a member's first parameters come from"""
FIRST_STAGE = "pretrain"
"""the folder of a first stage, in that of its run"""


def run_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    data: Data | None = None,
    device: torch.device | str = "cpu",
    watch: Watch = lambda trainer, folder: (),
    new: bool = False,
    choose_threads: bool = False,
    start: Start | None = None,
    engine: Callable[[Updater], Engine] = engine_for,
    save_every_epoch: bool = True,
    received: Sequence[int] | None = None,
    ranks: Ranks | None = None,
) -> list[dict[str, Any] | None]:
    """Train a recipe in a folder, taking up whatever stands there already; the members' results.

    A member that diverged before its first epoch ended has None. `new` refuses a folder that holds a run.
    `choose_threads` sets the number of CPU threads: the fastest for a new run, the same as before for an older one.
    `start` gives each member's first parameters in place of the first stage that the recipe names. Without
    `save_every_epoch` the state is saved when the recipe's `save.seconds` have passed. `received` holds the number of
    a signal once the run shall stop; None listens to this process's own. `ranks` are the processes that call this
    together, each with the same arguments; the lead's folder is the one that counts.
    Raises `saving.Interrupted` after a signal, when the state has been saved.
    """
    folder, device, ranks = Path(folder), torch.device(device), ranks or Ranks()
    if len(members_of(recipe)) == 1:
        recipe = run_folders.member_recipe(recipe, members_of(recipe)[0])
    with contextlib.ExitStack() as stack:
        if ranks.lead:
            stack.enter_context(_locked(folder))
        received = stack.enter_context(saving.catch_signals()) if received is None else received
        if new and ranks.lead and (folder / "recipe.toml").exists():
            raise UserError(
                f"{folder} exists: go on with `deeprnn resume {folder}`, or choose another --name"
            )
        data = visible(data or load_data(recipe.data), recipe.evaluation)
        if recipe.transpositions and data.kind != "music":
            raise UserError(
                f"transpositions={list(recipe.transpositions)} are for music: {data.name} is text"
            )
        memory.check(recipe, data, device)
        commutative.check(recipe, data)
        _try_cell(recipe, data)
        ranks.check_lanes(recipe.data.lanes)
        if not ranks.alone:
            ranks.check_same("the recipe or the version", [__version__, _without_paths(recipe)])
            ranks.check_same(f"the data {data.name}", run_folders.fingerprint(data))
        if ranks.lead and recipe.pretrain.run and not (folder / "recipe.toml").exists():
            for source in _sources(recipe):  # before there is anything in the folder
                check_transfer(recipe, data, source)
        most_threads = torch.get_num_threads() if choose_threads else 0
        stages = _Stages(data, device, watch, received, most_threads, start, engine, save_every_epoch, ranks)
        return stages.run(recipe, folder)


def _try_cell(recipe: Recipe, data: Data) -> None:
    """One step of a user's cell, before there is a folder: a mistake in it then leaves no run behind."""
    if not recipe.model.cell or recipe.model.cell in LIBRARY:
        return
    spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    symbols = torch.zeros(1, 1, dtype=torch.long)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        SequenceModel(spec)(symbols if data.kind != "music" else torch.zeros(1, 1, data.size))


def _without_paths(recipe: Recipe) -> dict[str, Any]:
    """The recipe without paths, which may differ from machine to machine."""
    paths = {"data.name": "", "pretrain.run": "", "pretrain.recipe": ""}
    return override(recipe, paths).to_dict()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder; for a first stage that of the whole run too, which trains it otherwise."""
    run_folder = folder.absolute().parent
    with contextlib.ExitStack() as stack:
        if folder.absolute().name == FIRST_STAGE and (run_folder / "recipe.toml").exists():
            stack.enter_context(lock(run_folder))
        stack.enter_context(lock(folder))
        yield


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run folder, or of a population's."""
    parent = folder.absolute().parent
    if (parent / "population.json").exists() or _is_member(folder):
        raise UserError(f"{folder} is a member of a population, which trains as one: resume {parent}")
    if not (folder / "recipe.toml").exists() and checkpoint.read_meta(folder) is None:
        raise UserError(
            f"{folder} holds no recipe.toml: it is not a run folder. `deeprnn runs` lists the runs"
        )
    return mending.whole_recipe(folder)


def _is_member(folder: Path) -> bool:
    """Whether a folder belongs to the population above it, also where that lost its population.json."""
    parent = folder.absolute().parent
    try:
        recipe = load_recipe(parent / "recipe.toml") if (parent / "recipe.toml").is_file() else None
    except UserError:
        return False
    return recipe is not None and folder.absolute() in run_folders.member_folders(recipe, parent)


@dataclass(frozen=True)
class _Stages:
    """One or both stages of a run, in folders that this process holds."""

    data: Data
    device: torch.device
    watch: Watch
    received: Sequence[int]
    most_threads: int
    """CPU threads to choose from; 0: the number stays as it is"""
    start: Start | None
    engine: Callable[[Updater], Engine]
    save_every_epoch: bool
    ranks: Ranks

    def run(self, recipe: Recipe, folder: Path) -> list[dict[str, Any] | None]:
        """The first stage where there is one, then the run itself."""
        homes = run_folders.member_folders(recipe, folder) if self.ranks.lead else []  # to be written
        longer, results = self.ranks.on_lead(lambda: self._prepare(recipe, folder))
        if results is not None:
            return results
        try:
            sources = self._first_stage(recipe, folder)
            _note_origins(homes, sources or ())
            trainer = self._trainer(recipe, sources)
            saver = saving.RunSaver(trainer, folder, self.received, self.save_every_epoch)
            saver.restore()
            if longer:
                saver.reopen()
            if longer and self.ranks.lead:
                mending.mend_recipes(recipe, folder)
                _mark(homes, "running", result=None, reason=None)
            self._set_threads(trainer, saver)
            self._note_environment(homes)
            watchers: list[Watcher] = [saver]
            if self.ranks.lead:
                watchers += [Progress(saver.homes), *self.watch(trainer, folder)]
            trainer.train(watchers)
            return run_folders.finish(trainer, folder, watchers)
        except (saving.Interrupted, KeyboardInterrupt):
            _mark_at_last(homes, "stopped")
            raise
        except (NonFinite, CannotWrite):
            _mark_at_last(homes, "failed")
            raise

    def _prepare(self, recipe: Recipe, folder: Path) -> tuple[bool, list[dict[str, Any] | None] | None]:
        """Make or mend the folder; whether a run in it goes on by other limits, and the results of one that ended."""
        mending.sweep(recipe, folder)
        mending.check_data(recipe, self.data, folder)
        if not mending.folders_are_whole(recipe, folder):
            run_folders.create_folders(recipe, self.data, folder, self.device)
        mending.mend_side_files(recipe, self.data, folder)
        if saving.has_other_limits(recipe, folder):
            return True, None
        mending.mend_recipes(recipe, folder)
        homes = run_folders.member_folders(recipe, folder)
        if not all(Run(home).concluded for home in homes):
            _mark(homes, "running")
            return False, None
        mending.mend_finished(recipe, folder, self.data, self.device)
        return False, [Run(home).info["result"] for home in homes]

    def _trainer(self, recipe: Recipe, pretrained: Sequence[Source | None] | None) -> Trainer:
        with SETUP:  # it allocates, which another thread's capture would not survive
            return Trainer(
                recipe,
                self.data,
                device=self.device,
                pretrained=pretrained,
                engine=self.engine,
                ranks=self.ranks,
            )

    def _set_threads(self, trainer: Trainer, saver: saving.RunSaver) -> None:
        if not self.most_threads or self.device.type != "cpu":
            return
        if saver.threads:
            threads.limit(saver.threads)  # results can differ in their last digits with another number
        elif not self.ranks.alone:  # to try numbers takes updates, which ranks make together
            threads.limit(threads.of_several(self.most_threads, launcher.local_count()))
        else:
            threads.limit(threads.measure(trainer, self.most_threads))
            trainer.remarks.append(
                f"CPU threads: {torch.get_num_threads()}, the fastest now; --threads sets another number"
            )

    def _note_environment(self, homes: Sequence[Path]) -> None:
        """Threads and processes of now; a run may have begun with others."""
        if self.most_threads or not self.ranks.alone:
            processes = {} if self.ranks.alone else {"processes": self.ranks.count}
            for home in homes:
                change_run(home, environment={**environment(str(self.device)), **processes})

    def _first_stage(self, recipe: Recipe, folder: Path) -> Sequence[Source | None] | None:
        """The parameters each member starts from: trained now, taken up, or those of a finished run."""
        if self.start is not None:
            return [self.start(member) for member in members_of(recipe)]
        if recipe.pretrain.run:
            return self._share_sources(_from_run(recipe, folder) if self.ranks.lead else [])
        if not recipe.pretrain.recipe:
            return None
        stage_folder = folder / FIRST_STAGE

        def stage_recipe() -> dict[str, Any]:
            # Once begun, the first stage goes on by the recipe in its folder, whatever became of the named one.
            begun = (stage_folder / "recipe.toml").exists()
            stage = mending.whole_recipe(stage_folder) if begun else first_stage(recipe)
            assert stage is not None
            return stage.to_dict()

        stage = Recipe.from_dict(self.ranks.on_lead(stage_recipe))
        results = self.run(stage, stage_folder)
        if not self.ranks.lead:
            return self._share_sources([])
        homes = zip(run_folders.member_folders(stage, stage_folder), results, strict=True)
        return self._share_sources(
            [None if result is None else Source.of(Run(home)) for home, result in homes]
        )

    def _share_sources(self, sources: Sequence[Source | None]) -> Sequence[Source | None]:
        """The lead's sources on every rank."""
        if self.ranks.alone:
            return sources
        metas = self.ranks.same([None if source is None else source.meta() for source in sources])
        to_send = [*sources, *[None] * (len(metas) - len(sources))]  # the lead's alone are sent
        received = [self.ranks.same_tensors(source.tensors if source else {}) for source in to_send]
        pairs = zip(received, metas, strict=True)
        return [None if meta is None else Source.from_meta(tensors, meta) for tensors, meta in pairs]


def _note_origins(homes: Sequence[Path], sources: Sequence[Source | None]) -> None:
    """Write down what a run starts from: the first stage's folder may be gone when somebody asks."""
    for home, source in zip(homes, sources, strict=bool(sources)):
        if source is not None and source.origin is not None and "first_stage" not in Run(home).info:
            change_run(home, first_stage=source.origin)


def _mark(homes: Sequence[Path], status: str, **changes: Any) -> None:
    for home in homes:
        change_run(home, status=status, **changes)


def _mark_at_last(homes: Sequence[Path], status: str) -> None:
    with contextlib.suppress(CannotWrite):  # the error that matters is already on its way
        _mark(homes, status)


def _from_run(recipe: Recipe, folder: Path) -> list[Source]:
    """The best parameters of the run that `pretrain.run` names, copied here: it may move or change later."""
    copies = [home / "start" for home in run_folders.member_folders(recipe, folder)]
    if not all((copy / "best.json").exists() for copy in copies):
        sources = _sources(recipe, warned=True)
        sources = sources * len(copies) if len(sources) == 1 else sources
        for copy, source in zip(copies, sources, strict=True):
            copy.mkdir(exist_ok=True)
            checkpoint.save_best(copy, source.tensors, source.meta())
    saved = [checkpoint.load_best(copy) for copy in copies]
    return [Source.from_meta(best.tensors, best.meta) for best in saved]


def _sources(recipe: Recipe, warned: bool = False) -> list[Source]:
    """The run that `pretrain.run` names, or as many members of a population as this run has.

    `warned`: that one has not finished was said before.
    """
    folder, count = Path(recipe.pretrain.run), len(members_of(recipe))
    runs = population(folder) if (folder / "population.json").exists() else [load_run(folder)]
    if len(runs) not in (1, count):
        raise UserError(f"{folder} has {len(runs)} members but this run has {count}: give one or as many")
    for run in runs:
        if run.info["result"] is None and not warned:
            logger.warning("%s has not finished: starting from its best parameters so far", run.path)
    return [Source.of(run) for run in runs]
