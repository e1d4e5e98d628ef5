"""What the two neural operators share: weights in the paper's letters, and units that may have their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.model import init, units
from deeprnn.model.tracing import Traceable
from deeprnn.model.units import UnitSpec

Masks = Mapping[str, Tensor]


class Operator(Traceable):
    """What ⊕ and ▷ share: flat parameters in the paper's letters, and units that may have their own."""

    def _matrix(self, name: str, rows: int, columns: int, role: str, **kw) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(rows, columns, **kw)))
        self.roles[name] = role

    def _vector(self, name: str, size: int, role: str, **kw) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(size, **kw)))
        self.roles[name] = role

    def _unit(self, suffix: str, unit: UnitSpec, size: int, **kw) -> None:
        if unit.name == "lp":
            self._vector(f"rho{suffix}", size, "lp_rho", **kw)
            self._vector(f"c{suffix}", size * unit.pool, "lp_centre", **kw)

    def _phi(self, suffix: str, unit: UnitSpec) -> units.Unit:
        return units.resolve(unit, getattr(self, f"rho{suffix}", None), getattr(self, f"c{suffix}", None))

    roles: dict[str, str]

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Fill the parameters as the paper does for music."""
        init.initialise(self, init.MUSIC, generator)


def enter(x: Tensor, U: Tensor, symbols: bool) -> Tensor:
    """U x for vectors, a row of U for each integer symbol (never a one-hot vector)."""
    if symbols:
        return F.embedding(x if x.dtype in (torch.int32, torch.int64) else x.long(), U)
    return F.linear(x.to(U.dtype), U)
