"""The loop over time of a ⊕ with pooling units or masks: few products a step, units as calls of their own.

With v(t) = h(t-1), zeroed where a reset mark stands and times the state's mask,

    pre_l = A_l[t] + W_l z_{l-1} + S_l v(t),    z_l = mask_l φ_l(pre_l),    z_0 = v(t),    h(t) = z_L.

The layers that see v(t) and lie side by side share one product, accumulated in place onto a copy of A. A
`units` object applies φ at (layer, step); going backward another multiplies by the kept slopes. On the CPU
they are torch calls (`steps_plain.py`), on a GPU one kernel each (`cuda/unit_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from deeprnn.backends.gradients import runs_of
from deeprnn.model.units import UnitSpec

UnitAt = Callable[[int, int], None]  # layer, step


@dataclass(frozen=True)
class Layout:
    """Where each layer lies in A (widths before the units), in z (after them) and among the Lp units."""

    units: tuple[UnitSpec, ...]
    widths: tuple[int, ...]
    shortcuts: tuple[bool, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Outputs of each layer."""
        return tuple(w // u.pool for w, u in zip(self.widths, self.units, strict=True))

    @cached_property
    def powers(self) -> tuple[int, ...]:
        """Exponents that each layer learns."""
        return tuple(n if u.name == "lp" else 0 for n, u in zip(self.sizes, self.units, strict=True))

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The layers that see h(t-1), neighbours grouped."""
        return runs_of(self.shortcuts)

    @property
    def last(self) -> int:
        """The layer that gives the state."""
        return len(self.widths) - 1

    def columns(self, x: Tensor, first: int, last: int | None = None) -> Tensor:
        """A layer's part of a tensor as wide as A; with two layers, all from one to the other."""
        starts = _starts(self.widths)
        end = first if last is None else last
        return x[..., starts[first] : starts[end] + self.widths[end]]

    def place(self, z: Tensor, layer: int) -> Tensor:
        """A layer's part of the intermediate layers."""
        start = _starts(self.sizes)[layer]
        return z[..., start : start + self.sizes[layer]]

    def power(self, x: Tensor, layer: int) -> Tensor:
        """A layer's part of a tensor with one column for each exponent."""
        start = _starts(self.powers)[layer]
        return x[..., start : start + self.powers[layer]]

    def learned(self, layer: int) -> int:
        """The place of an Lp layer among those."""
        return sum(bool(n) for n in self.powers[:layer])


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes[:-1], initial=0))


@lru_cache(maxsize=256)
def layout_of(units: str, shortcuts: str, widths: tuple[int, ...]) -> Layout:
    """The layout behind an operator's plain arguments."""
    return Layout(tuple(map(UnitSpec.parse, units.split(","))), widths, tuple(c == "1" for c in shortcuts))


class Given(NamedTuple):
    """What the units see beside the pre-activations; masks are ([P,] [T,] B, n), reset ([P,] T, B)."""

    exponents: tuple[Tensor, ...]  # p of each Lp layer
    growth: tuple[Tensor, ...]  # dp/dρ
    masks: tuple[Tensor | None, ...]
    state_mask: Tensor | None
    reset: Tensor | None
    keep: bool  # slopes are wanted


class States(NamedTuple):
    """What a forward pass leaves; `slope` holds the pre-activations until the units put dz/dpre there."""

    h: Tensor  # ([P,] T, B, H)
    z: Tensor  # ([P,] T, B, ΣM - H)
    slope: Tensor  # ([P,] T, B, Σ widths)
    power: Tensor  # ([P,] T, B, Σ powers): dz/dρ
    before: Tensor  # ([P,] T, B, H): v(t)


def given(rho: Sequence[Tensor], masks, state_mask, reset, keep: bool) -> Given:
    """The exponents from their parameters, the rest as it is."""
    exponents = tuple(1 + softplus(r) for r in rho)
    growth = tuple(torch.sigmoid(r) for r in rho)
    return Given(exponents, growth, tuple(masks), state_mask, reset, keep)


def product(x: Tensor) -> Callable[..., Tensor]:
    """target += a @ b in place, for matrices or one matrix a member."""
    return torch.Tensor.baddbmm_ if x.dim() == 4 else torch.Tensor.addmm_


def kept(x: Tensor, reset: Tensor | None, mask: Tensor | None) -> Tensor:
    """A state as the next step sees it, or the gradient on its way back: reset rows zeroed, times the mask."""
    if reset is not None:
        x = torch.where(reset.unsqueeze(-1), 0.0, x)
    return x if mask is None else x * mask


def first(x: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    """`kept` at the first step."""
    lead = x.dim() - 2  # the population
    if mask is not None and mask.dim() == lead + 3:
        mask = mask.select(lead, 0)
    return kept(x, None if reset is None else reset.select(lead, 0), mask)


def matrices(layout: Layout, W: Sequence[Tensor], S: Sequence[Tensor]) -> list[Tensor]:
    """For each run of layers that see v(t), their matrices one below the other."""
    shortcut = iter(S)
    seen = [w if l == 0 else next(shortcut) if layout.shortcuts[l] else None for l, w in enumerate(W)]
    return [torch.cat([m for l in run if (m := seen[l]) is not None], -2) for run in layout.runs]


def forward(
    layout: Layout,
    states: States,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    given: Given,
    units: UnitAt,
) -> None:
    """Fill `states`, whose slope holds A with the Lp centres taken off."""
    add = product(states.slope)
    states.before.select(-3, 0).copy_(first(h0, given.state_mask, given.reset))
    before = states.before.unbind(-3)
    seen = [
        (layout.columns(states.slope, run[0], run[-1]).unbind(-3), m.mT)
        for run, m in zip(layout.runs, matrices(layout, W, S), strict=True)
    ]
    pre = [layout.columns(states.slope, l).unbind(-3) for l in range(len(W))]
    below = [layout.place(states.z, l).unbind(-3) for l in range(layout.last)]
    for t in range(len(before)):
        for target, matrix in seen:
            add(target[t], before[t], matrix)
        units(0, t)
        for l in range(1, len(W)):
            add(pre[l][t], below[l - 1][t], W[l].mT)
            units(l, t)


def backward(
    layout: Layout, dA: Tensor, G: Sequence[Tensor], carry: Tensor, W: Sequence[Tensor], S: Sequence[Tensor],
    inner: bool, units: UnitAt,
) -> None:  # fmt: skip
    """Fill dA and complete G_l = dL/dz_l, which begin as the gradients from outside (`inner`: for l < L too).

    `carry` goes from step to step: the gradient of v(t), which `units` takes over at the last layer.
    """
    add = product(dA)
    seen = [
        (layout.columns(dA, run[0], run[-1]).unbind(-3), m)
        for run, m in zip(layout.runs, matrices(layout, W, S), strict=True)
    ]
    delta = [layout.columns(dA, l).unbind(-3) for l in range(len(W))]
    into = [g.unbind(-3) for g in G]
    for t in range(dA.shape[-3] - 1, -1, -1):
        units(layout.last, t)
        for l in range(layout.last, 0, -1):
            add(into[l - 1][t], delta[l][t], W[l], beta=1 if inner else 0)
            units(l - 1, t)
        for number, (source, matrix) in enumerate(seen):
            add(carry, source[t], matrix, beta=1 if number else 0)
