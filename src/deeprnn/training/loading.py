"""What a recipe names, on this machine: its data, a device, paths that hold from any folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from deeprnn import data as data_sets
from deeprnn.cells import lookup
from deeprnn.data.music import Grid
from deeprnn.errors import UserError
from deeprnn.training.evaluate import Data, scorable
from deeprnn.training.recipe import DataPart, Recipe, override

READ_BY = (
    "name",
    "level",
    "steps_per_beat",
    "low",
    "high",
    "drums",
    "transpose",
    "random_transpose",
    "minimum",
)
"""fields of a recipe's data that decide what is read, or whether; the others say how it is trained on"""
_LOADING = Lock()


def load_data(part: DataPart) -> Data:
    """The data that a recipe names."""
    options: dict[str, Any] = {}
    is_file = part.name not in data_sets.names()
    _check_reading(part, is_file)
    if is_file or part.name == "bach":
        grid = Grid(part.steps_per_beat or Grid().steps_per_beat, part.low, part.high)
        if part.steps_per_beat or grid != Grid():
            options["grid"] = grid
        if part.transpose:
            options["transpose"] = True
    if is_file and part.drums:
        options["drums"] = True
    if is_file and part.level in ("char", "word"):
        options["kind"] = part.level
    if is_file and part.minimum > 1:
        options["minimum"] = part.minimum
    data = data_sets.load(part.name, **options)
    if part.random_transpose and data.kind != "music":
        raise UserError(f"data.random_transpose={part.random_transpose} is for music: {part.name} is text")
    for split in ("train", "valid"):
        if not scorable(data, split):
            count, unit = data.sizes.get(split, 0), "frame" if data.kind == "music" else "symbol"
            raise UserError(
                f"{part.name} holds too little data: {count} {unit}{'s' if count != 1 else ''} in its {split} part, "
                "which is too few to score"
            )
    return data


def load_data_once(part: DataPart) -> Data:
    """The data that a recipe names, read once by this process, however many threads ask for it."""
    with _LOADING:  # threads that want the same data wait for the one that reads it
        return _load(DataPart(**{name: getattr(part, name) for name in READ_BY}))


@lru_cache(maxsize=8)
def _load(part: DataPart) -> Data:
    return load_data(part)


def forget_data() -> None:
    """Read data anew the next time: files may have changed since."""
    _load.cache_clear()


def _check_reading(part: DataPart, is_file: bool) -> None:
    """Refuse settings of reading for data that is read as it was published, whatever they say."""
    of_bach = ("steps_per_beat", "low", "high", "transpose")
    for name in (*of_bach, "drums", "minimum"):
        value = getattr(part, name)
        applies = is_file or (part.name == "bach" and name in of_bach)
        if not applies and value != getattr(DataPart(), name):
            kinds = "people's own files and bach" if name in of_bach else "people's own files"
            raise UserError(f"data.{name}={value} is for {kinds}: {part.name} is read as it was published")


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
    if recipe.model.cell:
        changes["model.cell"] = lookup.rooted(recipe.model.cell)
    if recipe.pretrain.run:
        changes["pretrain.run"] = str(Path(recipe.pretrain.run).expanduser().absolute())
    if Path(recipe.pretrain.recipe).is_file():  # a packaged one is known by name everywhere
        changes["pretrain.recipe"] = str(Path(recipe.pretrain.recipe).absolute())
    return override(recipe, changes)
