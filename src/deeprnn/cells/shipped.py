"""What the shipped cells share: parameters by name, recurrent dropout and zoneout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeprnn.cells.cell import Cell
from deeprnn.cells.draws import sequence_dropout, zoneout
from deeprnn.errors import UserError

MOST_LAYERS = 1000
"""of one cell"""
LARGEST = 2**53
"""width; what memory holds is checked where it is known (`training.memory`)"""


def check_whole(owner: str, name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no whole number, or one out of bounds."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if not number or not least <= value <= (LARGEST if most is None else most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        raise UserError(f"{owner}: {name} must be a whole number {bounds}, got {value!r}")


def check_number(owner: str, name: str, value: Any, bounds: str, holds: Callable[[float], bool]) -> None:
    """Refuse what is no number, or one for which `bounds`, in words, does not hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not holds(value):
        raise UserError(f"{owner}: {name} must be {bounds}, got {value!r}")


def check_flag(owner: str, name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise UserError(f"{owner}: {name} must be true or false, got {value!r}")


class ShippedCell(Cell):
    """A cell of the library.

    `recurrent_dropout` is the probability of leaving a unit of the state out where matrices multiply it, the same
    units for a whole sequence (Gal & Ghahramani, 2016). `zoneout` is the probability that a unit keeps its old state
    (Krueger et al., 2017). Both act in training only.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            check_whole(owner, name, size)
        for name, p in (("recurrent_dropout", recurrent_dropout), ("zoneout", zoneout)):
            check_number(owner, name, p, "at least 0 and below 1", lambda p: 0 <= p < 1)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.recurrent_dropout, self.zoneout = float(recurrent_dropout), float(zoneout)
        self._like = {"device": device, "dtype": dtype}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Parameters are registered by name."""

    def add(self, **shapes: tuple[int, ...]) -> None:
        """Parameters of these names and shapes."""
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **self._like)))

    def reset_parameters(self) -> None:
        """Fill with U(-1/√H, 1/√H), as torch's recurrent layers do."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for p in self.parameters():
            nn.init.uniform_(p, -bound, bound)

    def dropped(self, h: Tensor) -> Tensor:
        """h as matrices see it."""
        return sequence_dropout(h, self.recurrent_dropout, self.training)

    def kept(self, old: Tensor, new: Tensor) -> Tensor:
        """The new state, but for units that keep the old one."""
        return zoneout(old, new, self.zoneout, self.training)

    def extra_repr(self) -> str:
        options = {n: v for n in ("recurrent_dropout", "zoneout") if (v := getattr(self, n))}
        return ", ".join(
            [f"{self.input_size}, {self.hidden_size}", *(f"{n}={v}" for n, v in options.items())]
        )
