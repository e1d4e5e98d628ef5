"""Recipes: everything that decides a training run, as frozen dataclasses read from TOML.

    recipe = load_recipe("paper/jsb/dots")              # packaged; or a path to a .toml file
    recipe = override(recipe, {"optimiser.rate": 0.5})  # what the command line does

Reading and overriding share one checker: an unknown or ill-typed field is an error that lists the known
ones and the nearest name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError, did_you_mean
from deeprnn.model.init import InitSpec
from deeprnn.training.recipe import ranges
from deeprnn.training.recipe.fields import read, unknown
from deeprnn.training.recipe.parts import (
    DataPart,
    EvaluationPart,
    ModelPart,
    OptimiserPart,
    PretrainPart,
    RegulariserPart,
    SavePart,
    SchedulePart,
    StopPart,
)
from deeprnn.training.recipe.toml import parse_value, read_toml, write_toml

__all__ = [
    "DataPart",
    "EvaluationPart",
    "ModelPart",
    "OptimiserPart",
    "PretrainPart",
    "Recipe",
    "RegulariserPart",
    "SavePart",
    "SchedulePart",
    "StopPart",
    "field_names",
    "load_recipe",
    "override",
    "packaged",
    "parse_value",
    "to_toml",
]


@dataclass(frozen=True)
class Recipe:
    """A training run, whole."""

    data: DataPart = field(default_factory=DataPart)
    model: ModelPart = field(default_factory=ModelPart)
    init: InitSpec = field(default_factory=InitSpec)
    optimiser: OptimiserPart = field(default_factory=OptimiserPart)
    schedule: SchedulePart = field(default_factory=SchedulePart)
    regulariser: RegulariserPart = field(default_factory=RegulariserPart)
    stop: StopPart = field(default_factory=StopPart)
    pretrain: PretrainPart = field(default_factory=PretrainPart)
    save: SavePart = field(default_factory=SavePart)
    evaluation: EvaluationPart = field(default_factory=EvaluationPart)
    seeds: tuple[int, ...] = (1,)
    """one model per seed, trained in lockstep"""
    rates: tuple[float, ...] = ()
    """a grid: every seed at every one of these rates, in place of optimiser.rate"""
    transpositions: tuple[int, ...] = ()
    """music, a grid: every seed with each of these in place of data.random_transpose, for validation to decide"""

    def __post_init__(self) -> None:
        ranges.check(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for TOML or JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Read plain data; unknown and ill-typed fields are errors."""
        return read(cls, _with_output(data))


OUTPUT = {"kind": "output", "nade_size": "nade_size"}
"""the section [output] of a recipe, which may stand for these fields of [model]"""


def _with_output(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Plain data of a recipe, with its section [output], if any, written into [model]."""
    if not isinstance(data, Mapping) or not isinstance(data.get("output"), Mapping):
        return data
    rest = {name: part for name, part in data.items() if name != "output"}
    model = dict(rest.get("model") or {})
    for name, value in data["output"].items():
        if name not in OUTPUT:
            raise UserError(unknown(f"output.{name}", [f"output.{known}" for known in OUTPUT]))
        model[OUTPUT[name]] = value
    return {**rest, "model": model}


# ---- changing


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted fields replaced: {"optimiser.rate": 0.5}."""
    data = recipe.to_dict()
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        if section == "output" and key in OUTPUT:
            section, key = "model", OUTPUT[key]
        table = data.get(section) if section else data
        if not isinstance(table, dict) or key not in table or isinstance(table[key], dict):
            near = [f"{section}.{k}" for k in table] if section and isinstance(table, dict) else field_names()
            raise UserError(unknown(name, near))
        table[key] = value
    return Recipe.from_dict(data)


def field_names() -> list[str]:
    """Every field by its dotted name."""
    out = []
    for name, value in Recipe().to_dict().items():
        out += [f"{name}.{key}" for key in value] if isinstance(value, dict) else [name]
    return out


# ---- files


def packaged() -> dict[str, Path]:
    """The recipes that come with the package, by short name: `paper/jsb/dots`."""
    root = Path(str(resources.files("deeprnn") / "recipes"))
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in sorted(root.rglob("*.toml"))}


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A packaged recipe by its short name, or a TOML file."""
    text = str(name_or_path)
    path = Path(text)
    if not path.is_file():
        known = packaged()
        short = text.removesuffix(".toml").removeprefix("./").removeprefix("recipes/")
        if short not in known:
            hint = did_you_mean(short, known, cutoff=0.4)
            raise UserError(
                f"no recipe {text!r}{hint}: give a .toml file, or a packaged one by name, such as paper/jsb/dots"
            )
        path = known[short]
    data = read_toml(path)
    try:
        return Recipe.from_dict(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every field written out."""
    return write_toml(recipe.to_dict())
