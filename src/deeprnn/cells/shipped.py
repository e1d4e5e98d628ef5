"""What the shipped cells share: parameters by name, recurrent dropout and zoneout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeprnn.cells.cell import Cell
from deeprnn.cells.draws import sequence_dropout, zoneout
from deeprnn.errors import UserError


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
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(
                    f"{type(self).__name__}: {name} must be a whole number of at least 1, got {size!r}"
                )
        for name, p in (("recurrent_dropout", recurrent_dropout), ("zoneout", zoneout)):
            if not 0 <= p < 1:
                raise UserError(f"{type(self).__name__}: {name} must be at least 0 and below 1, got {p!r}")
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
