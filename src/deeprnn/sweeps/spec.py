"""The sweep's file: which recipe, which fields over which values, how many trials and how they are chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from deeprnn.errors import UserError, did_you_mean
from deeprnn.sweeps.space import CHECKED, Space, check_recipe, read_space
from deeprnn.training.defaults import resolve
from deeprnn.training.recipe import Recipe, override, to_toml
from deeprnn.training.recipe.continuing import flat
from deeprnn.training.recipe.fields import shown
from deeprnn.training.recipe.toml import read_toml, write_toml

Sampler = Literal["grid", "random", "tpe"]
Pruner = Literal["median", "halving", "none"]
FIELDS = ("recipe", "trials", "sampler", "pruner", "seed", "space", "override")
MOST_TRIALS = 1_000_000
TRIALS = 20
"""unless a file says otherwise or a grid has its own number"""


@dataclass(frozen=True)
class Spec:
    """A sweep, checked: the recipe has its overrides already."""

    recipe: Recipe
    space: Space
    trials: int
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    seed: int = 0
    """of the random and TPE samplers; the models' seeds are the recipe's"""

    def recipe_at(self, point: Mapping[str, Any]) -> Recipe:
        """The recipe of a point of the space."""
        return override(self.recipe, point)

    def to_toml(self, recipe: str) -> str:
        """The sweep's file, whose recipe lies in the file of that name beside it."""
        plain = {"recipe": recipe, "trials": self.trials, "sampler": self.sampler,
                 "pruner": self.pruner, "seed": self.seed}  # fmt: skip
        space = {f'"{name}"': value for name, value in self.space.to_plain().items()}
        return write_toml({**plain, "space": space})

    def difference(self, other: Spec) -> str:
        """The first thing in which another sweep would search otherwise; more trials are no such thing."""
        fields, others = self._plain(), other._plain()
        return next((name for name in {**fields, **others} if fields.get(name) != others.get(name)), "")

    def _plain(self) -> dict[str, Any]:
        fields = {"sampler": self.sampler, "pruner": self.pruner, "seed": self.seed}
        recipe = {f"recipe's {name}": value for name, value in flat(self.recipe.to_dict()).items()}
        return {**fields, **{f"space.{k}": v for k, v in self.space.to_plain().items()}, **recipe}


def packaged() -> dict[str, Path]:
    """The sweeps that come with the package, by short name: `paper/jsb/rnn`."""
    root = Path(str(resources.files("deeprnn") / "sweeps"))
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in sorted(root.rglob("*.toml"))}


def load_spec(what: str | Path) -> Spec:
    """A sweep's file, a packaged one by its short name, or the folder of one that has begun."""
    path = Path(what).expanduser()
    if path.is_dir():
        path = path / "sweep.toml"
        if not path.is_file():
            raise UserError(f"{path.parent} holds no sweep.toml: it is no sweep's folder")
    if not path.is_file():
        known = packaged()
        if str(what).removesuffix(".toml") not in known:
            hint = did_you_mean(str(what), known)
            raise UserError(
                f"no sweep {str(what)!r}{hint}: give a .toml file, a sweep's folder or a packaged one, "
                "such as paper/jsb/rnn"
            )
        path = known[str(what).removesuffix(".toml")]
    try:
        return read_spec(read_toml(path), path.parent)
    except UserError as error:
        raise UserError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def read_spec(tables: Mapping[str, Any], folder: Path | None = None) -> Spec:
    """A sweep from plain tables; the recipe's file is looked for in `folder` too."""
    for key in tables:
        if key not in FIELDS:
            hint = did_you_mean(key, FIELDS)
            raise UserError(f"unknown field {shown(key)} of a sweep{hint}: known are {', '.join(FIELDS)}")
    for key in ("space", "override"):
        if not isinstance(tables.get(key, {}), Mapping):
            raise UserError(f"[{key}] is a table of recipe fields, got {shown(tables[key])}")
    name = tables.get("recipe")
    if not isinstance(name, str) or not name:
        raise UserError(f'a sweep names its recipe, as in recipe = "quick/jsb-dts"; got {shown(name)}')
    local = None if folder is None else folder / name
    name_or_path = str(local) if local is not None and name.endswith(".toml") and local.is_file() else name
    changes = flat(tables.get("override", {}))
    in_both = sorted(changes.keys() & flat(tables.get("space", {})).keys())
    if in_both:
        raise UserError(
            f"{in_both[0]} is in [space] and in [override]: a trial could only follow one of them"
        )
    return make_spec(override(resolve(name_or_path)[0], changes), tables)


def make_spec(recipe: Recipe, tables: Mapping[str, Any]) -> Spec:
    """A sweep of a recipe by the tables of a sweep's file."""
    for name, instead in (("rates", "optimiser.rate"), ("transpositions", "data.random_transpose")):
        if getattr(recipe, name):
            raise UserError(f"a sweep's recipe has no {name}: search over {instead} instead")
    space = read_space(tables.get("space", {}), recipe)
    sampler = _one_of("sampler", tables.get("sampler", "tpe"), get_args(Sampler))
    pruner = _one_of("pruner", tables.get("pruner", "median"), get_args(Pruner))
    trials = _count("trials", tables.get("trials"), 1, MOST_TRIALS)
    if sampler == "grid":
        size = space.grid_size  # which also refuses what has no grid
        for number, point in enumerate(space.grid()):
            if number == CHECKED:
                break
            check_recipe(override(recipe, point))
        trials = size if trials is None else min(size, trials)
    seed = _count("seed", tables.get("seed", 0), 0, 2**63 - 1) or 0
    return Spec(recipe, space, trials or TRIALS, sampler, pruner, seed)


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        hint = did_you_mean(str(value), known)
        raise UserError(f"{name} must be one of {', '.join(known)}, got {shown(value)}{hint}")
    return value


def _count(name: str, value: Any, least: int, most: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserError(f"{name} must be a whole number from {least:,} to {most:,}, got {shown(value)}")
    return value


def one_seed_each(recipe: Recipe) -> list[Recipe]:
    """The members of a trial: one for each of the recipe's seeds."""
    return [dataclasses.replace(recipe, seeds=(seed,)) for seed in recipe.seeds]


def recipe_text(spec: Spec) -> str:
    """The recipe with its overrides, every field written out."""
    return to_toml(spec.recipe)
