"""Cells without gates: the conventional RNN, the leaky RNN with noise, the independently recurrent one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.cells.functions import UNITS
from deeprnn.cells.shipped import ShippedCell, check_number
from deeprnn.errors import UserError


def unit_named(owner: str, name: str) -> Any:
    """φ by name."""
    if name not in UNITS:
        raise UserError(f"{owner}: unknown unit {name!r}: known are {', '.join(UNITS)}")
    return UNITS[name]


class RNN(ShippedCell):
    """h' = φ(W h + U x + b): the conventional RNN (Elman, 1990)."""

    def __init__(self, input_size: int, hidden_size: int, unit: str = "tanh", **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.unit = unit
        unit_named("RNN", unit)
        self.add(
            weight_ih=(hidden_size, input_size), weight_hh=(hidden_size, hidden_size), bias=(hidden_size,)
        )
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        a = F.linear(x, self.weight_ih, self.bias) + F.linear(self.dropped(h), self.weight_hh)
        return self.kept(h, UNITS[self.unit](a))


class LeakyRNN(ShippedCell):
    """h' = h + α (φ(W h + U x + b + √(2/α) σ ξ) − h), ξ ~ N(0, 1) at every step (Song, Yang & Wang, 2016).

    α is the step of time over the units' time constant; the noise, of standard deviation σ, acts in training only.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        alpha: float = 0.2,
        noise: float = 0.0,
        unit: str = "relu",
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        check_number("LeakyRNN", "alpha", alpha, "above 0 and at most 1", lambda a: 0 < a <= 1)
        check_number("LeakyRNN", "noise", noise, "not negative and finite", lambda n: 0 <= n < math.inf)
        self.alpha, self.noise, self.unit = alpha, noise, unit
        unit_named("LeakyRNN", unit)
        self.add(
            weight_ih=(hidden_size, input_size), weight_hh=(hidden_size, hidden_size), bias=(hidden_size,)
        )
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        a = F.linear(x, self.weight_ih, self.bias) + F.linear(self.dropped(h), self.weight_hh)
        if self.noise and self.training:
            a = a + math.sqrt(2 / self.alpha) * self.noise * torch.randn_like(h)
        return self.kept(h, torch.lerp(h, UNITS[self.unit](a), self.alpha))


class IndRNN(ShippedCell):
    """h' = φ(u ∘ h + U x + b): every unit sees its own past alone (Li et al., 2018)."""

    def __init__(self, input_size: int, hidden_size: int, unit: str = "relu", **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.unit = unit
        unit_named("IndRNN", unit)
        self.add(weight_ih=(hidden_size, input_size), weight_hh=(hidden_size,), bias=(hidden_size,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        a = F.linear(x, self.weight_ih, self.bias) + self.weight_hh * self.dropped(h)
        return self.kept(h, UNITS[self.unit](a))
