"""A search space: for each recipe field a range or a list of values, checked against the recipe before anything runs.

"optimiser.rate" = "log:0.001..1"          # between two numbers, evenly in the logarithm
"regulariser.weight_noise" = "uniform:0..0.2"
"schedule.patience" = "int:1..8"           # whole numbers, both ends included
"model.hidden" = [[100], [200], [400]]     # one of these
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deeprnn.errors import UserError
from deeprnn.training.lockstep import may_differ
from deeprnn.training.recipe import Recipe, override
from deeprnn.training.recipe.continuing import flat
from deeprnn.training.recipe.fields import shown

KINDS = ("log", "uniform", "int")
MOST_FIELDS = 64
MOST_CHOICES = 1000
MOST_POINTS = 1_000_000
"""of a grid"""
CHECKED = 1000
"""points of a grid that are each checked before the first trial"""
_RANGE = re.compile(r"\s*(\w+)\s*:\s*(\S+?)\s*\.\.\s*(\S+)\s*")
_LABEL = "which only names the model in tables: search over what makes it, such as model.intermediate"
_NO_MATTER = "which changes nothing that is learnt"
_OTHER_DATA = (
    "by which scores would be of different data, and no winner could be chosen: begin a sweep for each"
)
UNSEARCHED = {
    "seeds": "but several seeds in [override] make every trial's score their mean",
    "rates": "search over optimiser.rate",
    "transpositions": "search over data.random_transpose",
    "model.kind": _LABEL,
    "save.seconds": _NO_MATTER,
    "save.updates": _NO_MATTER,
    "evaluation.test": "for no trial of a search sees the test part",
    "evaluation.chunk": _NO_MATTER,
    "evaluation.width": _NO_MATTER,
    "evaluation.streams": "by which the same model would have other scores",
    "data.name": _OTHER_DATA,
    "data.level": _OTHER_DATA,
    "data.steps_per_beat": _OTHER_DATA,
    "data.low": _OTHER_DATA,
    "data.high": _OTHER_DATA,
    "data.drums": _OTHER_DATA,
    "data.transpose": _OTHER_DATA,
    "data.minimum": _OTHER_DATA,
}
"""fields that no search can be over, and why"""
FORMS = 'use "log:0.001..1", "uniform:0..0.2", "int:1..8" or a list of values'


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> float | int:
        """The value at a share of the range, 0 to 1."""
        low, high = float(self.low), float(self.high)
        if self.whole:  # every whole number has a piece of the range, those at the ends too
            low, high = low - 0.5, high + 0.5
        if self.log:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = min(max(value, self.low), self.high)
        return round(value) if self.whole else float(f"{value:.6g}")

    @property
    def values(self) -> list[Any] | None:
        """All values where they are a grid."""
        if not self.whole or self.log or self.high - self.low >= MOST_CHOICES:
            return None
        return list(range(int(self.low), int(self.high) + 1))

    def to_plain(self) -> str:
        """As a sweep's file has it."""
        kind = "log" if self.log else "int" if self.whole else "uniform"
        return f"{kind}:{self.low:g}..{self.high:g}" if not self.whole else f"{kind}:{self.low}..{self.high}"

    @property
    def first(self) -> Any:
        """A value to check others with."""
        return self.at(0.0)

    @property
    def ends(self) -> list[Any]:
        """The values to check."""
        return [self.low, self.high]


@dataclass(frozen=True)
class Choice:
    """One of a list of values."""

    options: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """The value at a share of the list, 0 to 1."""
        return self.options[min(int(share * len(self.options)), len(self.options) - 1)]

    @property
    def values(self) -> list[Any]:
        """All values."""
        return list(self.options)

    def to_plain(self) -> list[Any]:
        """As a sweep's file has it."""
        return list(self.options)

    @property
    def first(self) -> Any:
        """A value to check others with."""
        return self.options[0]

    @property
    def ends(self) -> list[Any]:
        """The values to check."""
        return list(self.options)


Dimension = Range | Choice


@dataclass(frozen=True)
class Space:
    """Dimensions by the names of the fields they are for."""

    dimensions: Mapping[str, Dimension] = field(default_factory=dict)

    def draw(self, seed: int, number: int) -> dict[str, Any]:
        """The random point of a number: the same whenever it is asked for."""
        chance = random.Random(f"{seed}/{number}")
        return {name: dimension.at(chance.random()) for name, dimension in self.dimensions.items()}

    @property
    def grid_size(self) -> int:
        """Points of the grid."""
        return math.prod(len(values) for values in self._axes().values())

    def grid(self) -> Iterator[dict[str, Any]]:
        """All points, in the order of their numbers."""
        return map(self.grid_point, range(self.grid_size))

    def grid_point(self, number: int) -> dict[str, Any]:
        """The point of a number: fields that a population shares vary slowest, so that neighbours train together."""
        axes, point = self._axes(), {}
        names = sorted(axes, key=may_differ)
        for name in reversed(names):
            number, place = divmod(number, len(axes[name]))
            point[name] = axes[name][place]
        return {name: point[name] for name in names}

    def _axes(self) -> dict[str, list[Any]]:
        axes = {}
        for name, dimension in self.dimensions.items():
            values = dimension.values
            if values is None:
                raise UserError(
                    f"space.{name} = {dimension.to_plain()!r} has no end of values for a grid: give a list of them, "
                    'or sampler = "random" or "tpe"'
                )
            axes[name] = values
        if math.prod(len(values) for values in axes.values()) > MOST_POINTS:
            raise UserError(f"the grid has more than {MOST_POINTS:,} points: leave some values out")
        return axes

    def to_plain(self) -> dict[str, Any]:
        """As a sweep's file has it."""
        return {name: dimension.to_plain() for name, dimension in self.dimensions.items()}


def read_space(tables: Mapping[str, Any], recipe: Recipe) -> Space:
    """The space of plain values, each of which the recipe accepts; an error in the recipe's own words where not."""
    fields = flat(tables)
    if not fields:
        raise UserError(f"the sweep has no [space]: name at least one recipe field; {FORMS}")
    if len(fields) > MOST_FIELDS:
        raise UserError(f"the space has {len(fields):,} fields; the most is {MOST_FIELDS}")
    known = flat(recipe.to_dict())
    dimensions = {name: _dimension(name, value, known.get(name)) for name, value in fields.items()}
    for name in UNSEARCHED.keys() & dimensions.keys():
        raise UserError(f"{name} is no field to search over, {UNSEARCHED[name]}")
    space = Space(dimensions)
    _check(space, recipe)
    return space


def _dimension(name: str, value: Any, default: Any) -> Dimension:
    if isinstance(value, list | tuple):
        return _choice(name, list(value))
    if not isinstance(value, str):
        raise UserError(f"space.{name} = {shown(value)} is one value: {FORMS}, or put it into [override]")
    parts = _RANGE.fullmatch(value)
    if parts is None or parts[1] not in KINDS:
        raise UserError(f"space.{name} = {shown(value)} is no range: {FORMS}")
    example = default[0] if isinstance(default, list) and default else default
    whole = parts[1] == "int" or (isinstance(example, int) and not isinstance(example, bool))
    try:
        low, high = (_number(text, whole) for text in (parts[2], parts[3]))
    except ValueError:
        what = "whole numbers" if whole else "numbers"
        raise UserError(f"space.{name} = {shown(value)}: both ends must be {what}") from None
    if not low < high:
        raise UserError(f"space.{name} = {shown(value)} is empty: the first end must be below the second")
    if parts[1] == "log" and low <= 0:
        raise UserError(f"space.{name} = {shown(value)}: a logarithmic range begins above zero")
    return Range(low, high, log=parts[1] == "log", whole=whole)


def _number(text: str, whole: bool) -> float:
    value = int(text) if whole else float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _choice(name: str, values: list[Any]) -> Choice:
    if not values:
        raise UserError(f"space.{name} = [] is empty: {FORMS}")
    if len(values) > MOST_CHOICES:
        raise UserError(f"space.{name} lists {len(values):,} values; the most is {MOST_CHOICES:,}")
    return Choice(tuple(values))


def _check(space: Space, recipe: Recipe) -> None:
    """Refuse a field that does not exist and a value that the recipe would refuse, before the first trial."""
    for name in space.dimensions:
        override(
            recipe, {name: flat(recipe.to_dict()).get(name)}
        )  # an unknown one, by its nearest known name
    # The first values of all others stand beside each: some fields only go together with others.
    others = {name: dimension.first for name, dimension in space.dimensions.items()}
    for name, dimension in space.dimensions.items():
        recipes: list[Recipe] = []
        for value in dimension.ends:
            try:
                recipes.append(override(recipe, {**others, name: value}))
                check_recipe(recipes[-1])
            except UserError as error:
                raise UserError(f"space.{name} = {shown(value)}: {error}") from None
        if len(set(recipes)) < len(recipes):  # 1 and 1.0, or 5 and [5], are one value of their field
            raise UserError(f"space.{name} = {shown(dimension.to_plain())} lists a value twice")


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe whose model cannot be put together."""
    recipe.model.spec(1, False, recipe.regulariser.dropout)


def value_text(value: Any) -> str:
    """A value of a field for a person."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
