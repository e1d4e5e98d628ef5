"""Cells that mix their old state with a candidate: GRU, the minimal gated unit, the update-gate RNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.cells.shipped import MOST_LAYERS, ShippedCell, check_flag, check_whole
from deeprnn.errors import UserError


class GRU(ShippedCell):
    """h' = z ∘ h + (1 − z) ∘ n: the gated recurrent unit (Cho et al., 2014).

        r = σ(W_r h + U_r x),   z = σ(W_z h + U_z x)
        n = tanh(U_n x + r ∘ (W_n h + b))        reset="after", as in `nn.GRU`
        n = tanh(U_n x + W_n (r ∘ h) + b)        reset="before", as published

    With `intermediate_sizes` the candidate is the end of a deep transition (Pascanu et al., 2014): the first layer
    has the gate r, the others are z_l = tanh(W_l z_{l-1} + b_l), and n is the last. Parameters are named as in
    `nn.GRUCell`, rows in the order r, z, n; deeper layers add `weight_zh_d2`, `bias_d2`, …
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        reset: str = "after",
        intermediate_sizes: int | Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        if reset not in ("after", "before"):
            raise UserError(f"GRU: reset must be 'after' or 'before' (the product), got {reset!r}")
        check_flag("GRU", "bias", bias)
        self.reset, self.bias, self.intermediate_sizes = reset, bias, sizes_of("GRU", intermediate_sizes)
        if self.intermediate_sizes and reset == "before":
            raise UserError("GRU: intermediate_sizes need reset='after'")
        self.layers = (*self.intermediate_sizes, hidden_size)
        first = self.layers[0]
        self.rows = (first, hidden_size, first)
        self.add(weight_ih=(sum(self.rows), input_size), weight_hh=(sum(self.rows), hidden_size))
        if bias:
            self.add(bias_ih=(sum(self.rows),), bias_hh=(sum(self.rows),))
        add_depth(self, self.layers, bias)
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        b_ih, b_hh = (self.bias_ih, self.bias_hh) if self.bias else (None, None)
        v = self.dropped(h)
        r, z, n = F.linear(x, self.weight_ih, b_ih).split(self.rows, -1)
        if self.reset == "after":
            r_h, z_h, n_h = F.linear(v, self.weight_hh, b_hh).split(self.rows, -1)
            n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
        else:
            H, b = self.hidden_size, b_hh
            r_h, z_h = F.linear(v, self.weight_hh[: 2 * H], None if b is None else b[: 2 * H]).chunk(2, -1)
            reset = torch.sigmoid(r + r_h) * v
            n = torch.tanh(n + F.linear(reset, self.weight_hh[2 * H :], None if b is None else b[2 * H :]))
        n = through_depth(self, n)
        return self.kept(h, torch.lerp(n, h, torch.sigmoid(z + z_h)))


class MGU(ShippedCell):
    """h' = (1 − f) ∘ h + f ∘ n, f = σ(W_f h + U_f x + b_f), n = tanh(W_n (f ∘ h) + U_n x + b_n) (Zhou et al., 2016)."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        H = hidden_size
        self.add(weight_ih=(2 * H, input_size), weight_hh=(2 * H, H), bias=(2 * H,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        W_f, W_n = self.weight_hh.chunk(2)
        f, n = F.linear(x, self.weight_ih, self.bias).chunk(2, -1)
        v = self.dropped(h)
        f = torch.sigmoid(f + F.linear(v, W_f))
        n = torch.tanh(n + F.linear(f * v, W_n))
        return self.kept(h, torch.lerp(h, n, f))


class UGRNN(ShippedCell):
    """h' = g ∘ h + (1 − g) ∘ c, g = σ(W_g h + U_g x + b_g), c = tanh(W_c h + U_c x + b_c) (Collins et al., 2017)."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        H = hidden_size
        self.add(weight_ih=(2 * H, input_size), weight_hh=(2 * H, H), bias=(2 * H,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        a = F.linear(x, self.weight_ih, self.bias) + F.linear(self.dropped(h), self.weight_hh)
        g, c = a.chunk(2, -1)
        return self.kept(h, torch.lerp(torch.tanh(c), h, torch.sigmoid(g)))


# ---- the depth of a candidate, which GRU and LSTM share


def sizes_of(owner: str, intermediate_sizes: int | Sequence[int]) -> tuple[int, ...]:
    """One width or several, checked."""
    several = isinstance(intermediate_sizes, (tuple, list))
    sizes = tuple(intermediate_sizes) if several else (intermediate_sizes,)  # type: ignore[arg-type]
    for size in sizes:
        check_whole(owner, "intermediate_sizes", size)
    check_whole(owner, "the number of intermediate_sizes", len(sizes), least=0, most=MOST_LAYERS)
    return sizes  # type: ignore[return-value]


def add_depth(cell: ShippedCell, layers: Sequence[int], bias: bool) -> None:
    """Parameters of the layers of a candidate behind the first."""
    for d in range(1, len(layers)):
        cell.add(**{f"weight_zh_d{d + 1}": (layers[d], layers[d - 1])})
        if bias:
            cell.add(**{f"bias_d{d + 1}": (layers[d],)})


def through_depth(cell: Any, z: Tensor) -> Tensor:
    """z_l = tanh(W_l z_{l-1} + b_l) from the first layer of a candidate to the last."""
    for d in range(2, len(cell.layers) + 1):
        bias = getattr(cell, f"bias_d{d}") if cell.bias else None
        z = torch.tanh(F.linear(z, getattr(cell, f"weight_zh_d{d}"), bias))
    return z
