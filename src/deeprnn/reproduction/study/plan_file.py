"""The plan of a study, read from TOML: who competes, on what, by which grid, with which seeds, and what is compared."""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from deeprnn.cells import lookup
from deeprnn.errors import UserError, did_you_mean
from deeprnn.reproduction.identity import identity
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import Recipe, SavePart, load_recipe, override
from deeprnn.training.recipe.toml import read_toml

Trial = Mapping[str, Any]
"""one point of the grid: recipe fields and their values"""
RATE = "optimiser.rate"


@dataclass(frozen=True)
class Family:
    """Contenders that share data sets, settings and a grid."""

    name: str
    data: tuple[str, ...]
    settings: Mapping[str, Any]
    """recipe fields of all of them"""
    grid: Mapping[str, tuple[Any, ...]]
    """recipe fields and their values: every combination is a trial"""
    by_data: Mapping[str, Mapping[str, Any]]
    """recipe fields for one data set"""

    @property
    def trials(self) -> list[Trial]:
        """Every combination, the last field changing fastest."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True)
class Contender:
    """One model of a family."""

    name: str
    family: str
    recipe: str
    """the recipe it starts from, with {data} for the data set"""
    label: str
    tested: bool
    """whether it is what the question asks about (deep), or a control (shallow)"""
    settings: Mapping[str, Any]
    by_data: Mapping[str, Mapping[str, Any]]
    length: float = 1.0
    """its epochs as a multiple of the others'"""


@dataclass(frozen=True)
class Goal:
    """What a family shall reach on a data set, and what others have."""

    family: str
    data: str
    known: str
    """the best known numbers, with their names"""
    goal: tuple[float, ...]
    """test results to reach, the easiest first"""
    title: str = ""
    """of its row; the data set's name where there is none"""
    dynamic: bool = False
    """scored by dynamic evaluation, with a rate that validation chose (`study.dynamic`)"""


@dataclass(frozen=True)
class Study:
    """The whole plan."""

    name: str
    path: Path
    question: str
    tested: str
    """what the contenders are that the question asks about, in a word: deep"""
    control: str
    search_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    level: float
    families: tuple[Family, ...]
    contenders: tuple[Contender, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    """further comparisons, each a tested contender and a control: family/name"""
    goals: tuple[Goal, ...] = ()
    least_seeds: int = 3
    """a final seed that diverges is left out; a contender with fewer results than this counts as lost"""

    def family(self, contender: Contender) -> Family:
        """The family of a contender."""
        return next(f for f in self.families if f.name == contender.family)

    def entrants(self, only: Sequence[str] = ()) -> list[tuple[Contender, str]]:
        """Every contender on every data set of its family, or those that `only` names.

        A word is a data set (jsb), a family (nade), or parts of family/data/contender with patterns (nade/jsb).
        """
        out = [(c, data) for c in self.contenders for data in self.family(c).data]
        for word in only:
            if not any(_is_named(c, data, word) for c, data in out):
                known = [*dict.fromkeys(data for _, data in out), *(f.name for f in self.families)]
                hint = did_you_mean(word.partition("/")[0], known)
                raise UserError(
                    f"--only {word!r} names nothing of the study {self.name}{hint}: use {', '.join(known)}, "
                    "family/data or family/data/contender"
                )
        return [(c, data) for c, data in out if not only or any(_is_named(c, data, w) for w in only)]

    @property
    def digest(self) -> str:
        """Of the file and of every recipe that it comes to: a change of either is another study.

        Recipes count by their identity, which a new field with a default leaves as it is; a user's cell by its file.
        """
        pairs = [
            recipes_of(self, contender, data, trial)
            for contender, data in self.entrants()
            for trial in self.family(contender).trials
        ]
        recipes = json.dumps([identity(*recipe_and_stage) for recipe_and_stage in pairs])
        code = b"".join(map(lookup.code, sorted({recipe.model.cell for recipe, _ in pairs})))
        return hashlib.sha256(self.path.read_bytes() + recipes.encode() + code).hexdigest()


def _is_named(contender: Contender, data: str, word: str) -> bool:
    parts = (contender.family, data, contender.name)
    if word in (data, contender.family):
        return True
    words = word.split("/")
    return 1 < len(words) <= len(parts) and all(
        fnmatch.fnmatchcase(part, w) for part, w in zip(parts, words, strict=False)
    )


def members(
    study: Study, contender: Contender, data: str, trial: Trial, final: bool = False
) -> list[tuple[Recipe, Recipe | None]]:
    """A contender's recipe with one trial's settings, and its first stage's, seed by seed."""
    recipe, stage = recipes_of(study, contender, data, trial, final)
    return [
        (override(recipe, {"seeds": [seed]}), None if stage is None else override(stage, {"seeds": [seed]}))
        for seed in (study.seeds if final else study.search_seeds)
    ]


def recipes_of(
    study: Study, contender: Contender, data: str, trial: Trial, final: bool = False
) -> tuple[Recipe, Recipe | None]:
    """The recipes of a contender's first seed, and of its first stage, which never scores test."""
    family = study.family(contender)
    shared = {**family.settings, **family.by_data.get(data, {})}
    of_contender = {**contender.settings, **contender.by_data.get(data, {})}
    seeds = list((study.seeds if final else study.search_seeds)[:1])
    # A trial that diverges must end alone, not with the population it trains in.
    fixed = {
        "optimiser.nonfinite": "skip",
        "seeds": seeds,
        "rates": [],
        "model.kind": contender.name,
        "evaluation.test": final,
    }
    recipe = override(
        load_recipe(contender.recipe.format(data=data)), {**shared, **of_contender, **trial, **fixed}
    )
    if contender.length != 1:
        epochs = round(contender.length * recipe.stop.epochs)
        recipe = override(recipe, {"stop.epochs": epochs})
    stage = first_stage(recipe)
    if stage is None:
        return recipe, None
    of_stage = {k: v for k, v in {**shared, **trial}.items() if not k.startswith(("model.", "pretrain."))}
    stage = override(
        stage,
        {**of_stage, "optimiser.nonfinite": "skip", "evaluation.test": False, "seeds": seeds, "rates": []},
    )
    plain = stage.model.kind == "dts" and stage.model.shortcut == "none"
    return recipe, replace(stage, model=replace(stage.model, kind="dt" if plain else stage.model.kind))


def member_key(recipe: Recipe) -> Recipe:
    """What tells one trained model of a study from another: its recipe with its own seed and rate."""
    return replace(recipe, save=SavePart())


# ---- reading


def packaged_studies() -> dict[str, Path]:
    """The plans that come with the package, by name."""
    root = Path(str(resources.files("deeprnn"))) / "reproduction" / "study" / "plans"
    return {path.stem: path for path in sorted(root.glob("*.toml"))}


def read_study(name_or_path: str) -> Study:
    """A packaged plan by its name, or a TOML file."""
    known = packaged_studies()
    path = Path(name_or_path) if name_or_path.endswith(".toml") else known.get(name_or_path)
    if path is None or not path.is_file():
        hint = did_you_mean(name_or_path, known)
        raise UserError(
            f"no study {name_or_path!r}{hint}: known are {', '.join(known)}, or give a .toml file"
        )
    try:
        study = _study(path, read_toml(path))
        for contender, data in study.entrants():  # every recipe it comes to is whole
            recipes_of(study, contender, data, study.family(contender).trials[0])
    except (UserError, KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: {what}") from None
    return study


def _study(path: Path, raw: Mapping[str, Any]) -> Study:
    _known(
        raw,
        {f.name for f in fields(Study)} - {"name", "path", "contenders", "families", "goals"}
        | {"family", "contender", "goal"},
    )
    families = tuple(
        Family(
            f["name"],
            tuple(f["data"]),
            f.get("settings", {}),
            {name: tuple(values) for name, values in f.get("grid", {}).items()},
            f.get("by_data", {}),
        )
        for f in raw["family"]
    )
    contenders = []
    for c in raw["contender"]:
        _known(c, {f.name for f in fields(Contender)})
        contenders.append(Contender(**{"settings": {}, "by_data": {}, "tested": False, **c}))
        if c["family"] not in [f.name for f in families]:
            raise UserError(f"contender {c['name']}: there is no family {c['family']!r}")
    for f in families:
        if {c.tested for c in contenders if c.family == f.name} != {True, False}:
            raise UserError(f"family {f.name}: it needs a tested contender and a control")
    names = [f"{c.family}/{c.name}" for c in contenders]
    if len(set(names)) != len(names):
        raise UserError("two contenders of a family have one name")
    pairs = tuple((a, b) for a, b in raw.get("pairs", ()))
    for name in (n for pair in pairs for n in pair):
        if name not in names:
            raise UserError(f"pairs: no contender is named {name!r}")
    goals = tuple(_goal(g, families) for g in raw.get("goal", ()))
    seeds, search = tuple(raw["seeds"]), tuple(raw.get("search_seeds", (1,)))
    if set(seeds) & set(search):
        raise UserError(
            f"seeds {sorted(set(seeds) & set(search))} were searched with: the final ones must be new"
        )
    level = float(raw.get("level", 0.05))
    least = raw.get("least_seeds", Study.least_seeds)
    if not 2 <= least <= len(seeds):
        raise UserError(f"least_seeds must be from 2 to the {len(seeds)} seeds, got {least}")
    return Study(path.stem, path, raw["question"], raw["tested"], raw["control"], search, seeds, level, families,
                 tuple(contenders), pairs, goals, least)  # fmt: skip


def _goal(raw: Mapping[str, Any], families: Sequence[Family]) -> Goal:
    _known(raw, {f.name for f in fields(Goal)})
    goal = Goal(**{**raw, "goal": tuple(raw["goal"])})
    if goal.data not in [data for f in families if f.name == goal.family for data in f.data]:
        raise UserError(f"goal: there is no family {goal.family!r} with data {goal.data!r}")
    return goal


def _known(table: Mapping[str, Any], names: set[str]) -> None:
    for key in table:
        if key not in names:
            raise UserError(f"unknown field {key!r}: known are {', '.join(sorted(names))}")
