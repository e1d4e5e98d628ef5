"""A run from beginning to end, or from where it was cut off: both stages, one lock, one way to stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deeprnn import data as data_sets
from deeprnn.data.music import Grid
from deeprnn.errors import UserError
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import Run, change_run, load_run, population
from deeprnn.training import keeping
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import NonFinite, Trainer, Watcher
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import DataPart, Recipe, load_recipe, override

logger = logging.getLogger("deeprnn")

Watch = Callable[[Trainer, Path], Sequence[Watcher]]
"""makes the watchers of a stage: live view, TensorBoard"""


def load_data(part: DataPart) -> Data:
    """The data that a recipe names."""
    options: dict[str, Any] = {}
    own = part.name not in data_sets.names()
    if own or part.name == "bach":
        if part.steps_per_beat:
            options["grid"] = Grid(steps_per_beat=part.steps_per_beat)
        if part.transpose:
            options["transpose"] = True
    if own and part.level in ("char", "word"):
        options["kind"] = part.level
    if own and part.minimum > 1:
        options["minimum"] = part.minimum
    data = data_sets.load(part.name, **options)
    for split in ("train", "valid"):
        if split not in data.splits or not len(data.splits[split]):
            raise UserError(f"{part.name}: the {split} part is empty, but training needs one")
    return data


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: torch sees no GPU here. Use --device cpu, or `deeprnn doctor` to see why"
        )
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: no such device; use auto, cpu or cuda") from None


def rooted(recipe: Recipe) -> Recipe:
    """The recipe with its paths made absolute, so that the run can be resumed from any folder."""
    changes: dict[str, str] = {}
    if recipe.data.name not in data_sets.names():
        changes["data.name"] = str(Path(recipe.data.name).expanduser().absolute())
    if recipe.pretrain.run:
        changes["pretrain.run"] = str(Path(recipe.pretrain.run).expanduser().absolute())
    if Path(recipe.pretrain.recipe).is_file():  # a packaged one is known by name everywhere
        changes["pretrain.recipe"] = str(Path(recipe.pretrain.recipe).absolute())
    return override(recipe, changes)


def run_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    data: Data | None = None,
    device: torch.device | str = "cpu",
    watch: Watch = lambda trainer, folder: (),
) -> list[dict[str, Any]]:
    """Train a recipe in a folder, taking up whatever stands there already; the members' results.

    Raises `keeping.Interrupted` after a signal, when the state has been saved.
    """
    folder = Path(folder)
    with checkpoint.lock(folder), keeping.listening() as heard:
        data = data or load_data(recipe.data)
        if not _laid_out(recipe, folder):
            keeping.lay_out(recipe, data, folder, device)
        keeping.check_data(recipe, data, folder)
        keeping.mend_side_files(recipe, data, folder)
        return _stages(recipe, folder, data, torch.device(device), watch, heard)


def resume(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Go on with the run in a folder, from its own recipe."""
    return run_recipe(recipe_of(folder), folder, **settings)


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run folder, or of a population's."""
    if folder.parent.joinpath("population.json").exists():
        raise UserError(f"{folder} is a member of a population, which trains as one: resume {folder.parent}")
    if not (folder / "recipe.toml").exists():
        raise UserError(
            f"{folder} holds no recipe.toml: it is not a run folder. `deeprnn runs` lists the runs"
        )
    return load_recipe(folder / "recipe.toml")


def _laid_out(recipe: Recipe, folder: Path) -> bool:
    """Whether every run.json is there; one that cannot be read is written anew."""
    for home in keeping.homes(recipe, folder):
        if not (home / "run.json").exists():
            return False
        try:
            _ = Run(home).info["result"]
        except (UserError, KeyError, TypeError) as error:
            logger.warning("%s is written anew (%s)", home / "run.json", error)
            return False
    return True


def _stages(
    recipe: Recipe, folder: Path, data: Data, device: torch.device, watch: Watch, heard: Sequence[int]
) -> list[dict[str, Any]]:
    """The first stage where there is one, then the run itself."""
    places = keeping.homes(recipe, folder)
    done = [Run(home).info["result"] for home in places]
    if all(result is not None for result in done):
        _mend_best(recipe, folder, data, device)
        return done
    try:
        for home in places:
            change_run(home, status="running")
        pretrained = _first_stage(recipe, folder, data, device, watch, heard)
        trainer = Trainer(recipe, data, device=device, pretrained=pretrained)
        keeper = keeping.Keeper(trainer, folder, heard)
        keeper.restore()
        trainer.train([keeper, *watch(trainer, folder)])
        return keeping.conclude(trainer, folder)
    except (keeping.Interrupted, KeyboardInterrupt):
        _mark(places, "stopped")
        raise
    except (NonFinite, checkpoint.DiskFull):
        _mark(places, "failed")
        raise


def _mend_best(recipe: Recipe, folder: Path, data: Data, device: torch.device) -> None:
    """Write a finished run's best parameters again where they were lost or damaged: the last state holds them."""
    try:
        for home in keeping.homes(recipe, folder):
            checkpoint.load_best(home)
    except UserError as damage:
        keeper = keeping.Keeper(Trainer(recipe, data, device=device), folder)
        if not keeper.restore():
            raise
        logger.warning("%s; written again from %s", str(damage).partition(":")[0], folder / "last.json")
        keeper.save()


def _mark(places: Sequence[Path], status: str) -> None:
    with contextlib.suppress(checkpoint.DiskFull):  # the error that matters is already on its way
        for home in places:
            change_run(home, status=status)


def _first_stage(
    recipe: Recipe, folder: Path, data: Data, device: torch.device, watch: Watch, heard: Sequence[int]
) -> list[Mapping[str, Tensor]] | None:
    """The parameters each member starts from: trained now, taken up, or those of a finished run."""
    if recipe.pretrain.run:
        return _from_run(recipe, folder)
    if not recipe.pretrain.recipe:
        return None
    below = folder / "pretrain"
    # Once begun, the first stage goes on by the recipe in its folder, whatever became of the named one.
    begun = (below / "recipe.toml").exists()
    stage = load_recipe(below / "recipe.toml") if begun else first_stage(recipe)
    assert stage is not None
    if not _laid_out(stage, below):
        keeping.lay_out(stage, data, below, device)
    _stages(stage, below, data, device, watch, heard)
    return [checkpoint.load_best(home).tensors for home in keeping.homes(stage, below)]


def _from_run(recipe: Recipe, folder: Path) -> list[Mapping[str, Tensor]]:
    """The best parameters of the run that `pretrain.run` names, kept here: it may move or change later."""
    places = [home / "start" for home in keeping.homes(recipe, folder)]
    if not all((place / "best.json").exists() for place in places):
        source = Path(recipe.pretrain.run)
        found = population(source) if (source / "population.json").exists() else [load_run(source)]
        if len(found) not in (1, len(places)):
            raise UserError(
                f"{source} has {len(found)} members but this run has {len(places)}: give one or as many"
            )
        for place, run in zip(places, found * len(places) if len(found) == 1 else found, strict=True):
            if run.info["result"] is None:
                logger.warning("%s has not finished: starting from its best parameters so far", run.path)
            best = checkpoint.load_best(run.path)
            place.mkdir(exist_ok=True)
            checkpoint.save_best(place, best.tensors, {**best.meta, "run": str(run.path)})
    return [checkpoint.load_best(place).tensors for place in places]
