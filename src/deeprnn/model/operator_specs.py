"""One operator as data: ⊕, a cell in its place, ▷."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from deeprnn.errors import UserError
from deeprnn.model.spec_fields import Units, as_tuple, boolean, one_of, positive, positive_each, unit_list
from deeprnn.model.units import UnitSpec

Place = Literal["first", "last", "all"]
"""which layers of ⊕ read the input"""
Shortcut = Literal["none", "last", "all"]
"""which layers of ⊕ above the first read h(t-1)"""


@dataclass(frozen=True)
class PlusSpec:
    """One ⊕: depth, widths, units, shortcuts and where the input enters."""

    input_size: int
    hidden_size: int
    intermediate_sizes: tuple[int, ...] = ()
    units: tuple[str, ...] = ("sigmoid",)
    """a name or a function for all layers, or one each; kept as names"""
    shortcut: Shortcut = "none"
    """at depth 1 there is no layer to go around, and every value means the same"""
    input_to: Place = "first"
    input_mlp_sizes: tuple[int, ...] = ()
    input_mlp_units: tuple[str, ...] = ("sigmoid",)
    skip_size: int = 0
    """size of a second input that enters beside the first: the model's own, on the upper levels of a stack"""
    bias: bool = True
    symbols: bool = False
    """integer symbols instead of vectors (the skip input where there is one, else the input)"""
    stacked: bool = False
    """the input is another level's state"""

    def __post_init__(self) -> None:
        positive("Plus", input_size=self.input_size, hidden_size=self.hidden_size)
        positive_each(self, "Plus", "intermediate_sizes", "input_mlp_sizes")
        if self.skip_size != 0:
            positive("Plus", skip_size=self.skip_size)
        boolean("Plus", bias=self.bias, symbols=self.symbols, stacked=self.stacked)
        one_of("Plus", "shortcut", self.shortcut, Shortcut)
        one_of("Plus", "input_to", self.input_to, Place)
        object.__setattr__(self, "units", unit_list("Plus", self.units, self.depth))
        mlp = unit_list("Plus", self.input_mlp_units, len(self.input_mlp_sizes))
        object.__setattr__(self, "input_mlp_units", mlp)

    @property
    def embeds(self) -> bool:
        """Whether the input itself (not the skip input) is integer symbols."""
        return self.symbols and not self.skip_size

    @property
    def entering(self) -> int:
        """Width of what enters the transition, behind the input function; 0 where that is integer symbols."""
        if self.input_mlp_sizes:
            return self.input_mlp_sizes[-1]
        return 0 if self.embeds else self.input_size

    @property
    def depth(self) -> int:
        """Number of nonlinear layers between h(t-1) and h(t): 1 is the conventional RNN."""
        return len(self.intermediate_sizes) + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Width of each layer's output, M_1 .. M_L, the last being the state's."""
        return (*self.intermediate_sizes, self.hidden_size)

    @property
    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """The units as data, one per layer."""
        return tuple(UnitSpec.parse(u) for u in self.units)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each layer's pre-activation: size times the unit's pool."""
        return tuple(m * u.pool for m, u in zip(self.sizes, self.unit_specs, strict=True))

    @property
    def shortcuts(self) -> tuple[bool, ...]:
        """Which layers receive h(t-1) directly; the first always does, through W_1."""
        last = self.depth - 1
        return tuple(l > 0 and (self.shortcut == "all" or (self.shortcut == "last" and l == last))
                     for l in range(self.depth))  # fmt: skip

    @property
    def inputs(self) -> tuple[bool, ...]:
        """Which layers receive the input."""
        layers = {"first": {0}, "last": {self.depth - 1}, "all": set(range(self.depth))}[self.input_to]
        return tuple(l in layers for l in range(self.depth))


def warn_idle_shortcut(owner: str, shortcut: str, intermediate_sizes: Sequence[int]) -> None:
    """Say that a shortcut has nothing to go around."""
    if shortcut != "none" and not intermediate_sizes:
        warnings.warn(f"{owner}: shortcut={shortcut!r} goes around intermediate layers, and there are none: give "
                      "intermediate_sizes, or leave the shortcut out", stacklevel=3)  # fmt: skip


class PlusSettings(TypedDict, total=False):
    """The fields of `PlusSpec` beside its two sizes, as keyword arguments."""

    intermediate_sizes: Sequence[int]
    units: Units
    shortcut: Shortcut
    input_to: Place
    input_mlp_sizes: Sequence[int]
    input_mlp_units: Units
    skip_size: int
    bias: bool
    symbols: bool
    stacked: bool


@dataclass(frozen=True)
class CellSpec:
    """One level that is a cell: a shipped one by its name, or a user's own by where it is written (`cells.lookup`)."""

    cell: str
    input_size: int
    hidden_size: int
    options: tuple[str, ...] = ()
    """the constructor's other arguments, as they are written: "depth=3" """
    symbols: bool = False
    """integer symbols, each of which becomes a learned vector as wide as the state"""
    stacked: bool = False
    """the input is another level's state"""

    skip_size = 0
    intermediate_sizes = ()
    units = ()
    depth = 1
    shortcut = "none"
    shortcuts = (False,)
    input_to = "first"

    def __post_init__(self) -> None:
        if not isinstance(self.cell, str) or not self.cell:
            raise UserError(f"cell: a name is expected, such as lstm or my_cells.py:Paced, got {self.cell!r}")
        positive("cell", input_size=self.input_size, hidden_size=self.hidden_size)
        boolean("cell", symbols=self.symbols, stacked=self.stacked)
        as_tuple(self, "options")

    @property
    def entering(self) -> int:
        """How wide the cell's own input is."""
        return self.hidden_size if self.symbols else self.input_size

    @property
    def input_mlp_sizes(self) -> tuple[int, ...]:
        """Layers in front of the cell: the embedding of symbols."""
        return (self.entering,) if self.symbols else ()


Level = PlusSpec | CellSpec


@dataclass(frozen=True)
class PredictSpec:
    """One ▷: hidden widths and units between the state and the logits."""

    input_size: int
    output_size: int
    sizes: tuple[int, ...] = ()
    units: tuple[str, ...] = ("sigmoid",)
    shortcut: bool = False
    bias: bool = True
    nade_size: int = 0
    """hidden units of the NADE above these layers; 0: none, they give the logits"""

    def __post_init__(self) -> None:
        positive("Predict", input_size=self.input_size, output_size=self.output_size)
        positive_each(self, "Predict", "sizes")
        if self.nade_size != 0:
            positive("Predict", nade_size=self.nade_size)
        boolean("Predict", shortcut=self.shortcut, bias=self.bias)
        if self.shortcut and not self.sizes:
            raise UserError("Predict: shortcut=True needs at least one hidden layer to go around (sizes=...)")
        object.__setattr__(self, "units", unit_list("Predict", self.units, len(self.sizes)))

    @property
    def unit_specs(self) -> tuple[UnitSpec, ...]:
        """The hidden layers' units as data."""
        return tuple(UnitSpec.parse(u) for u in self.units)


class PredictSettings(TypedDict, total=False):
    """The fields of `PredictSpec` beside its two sizes, as keyword arguments."""

    sizes: Sequence[int]
    units: Units
    shortcut: bool
    bias: bool
