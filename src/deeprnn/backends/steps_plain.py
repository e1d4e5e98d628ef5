"""The loop over time of a ⊕ with pooling units or masks: few products a step, units as calls of their own.

With v(t) = h(t-1), zeroed where a reset mark stands and times the state's mask,

    pre_l = A_l[t] + W_l z_{l-1} + S_l v(t),    z_l = mask_l φ_l(pre_l),    z_0 = v(t),    h(t) = z_L.

The layers that see v(t) and lie side by side share one product, accumulated in place onto a copy of A. A
`units` object applies φ at (layer, step); going backward another multiplies by the kept slopes. On the CPU
they are the torch calls below, on a GPU one kernel each (`cuda/unit_kernels.py`); the loops are the same.
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

from deeprnn.backends.gradients import _runs
from deeprnn.units import UnitSpec

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
        return tuple(map(tuple, _runs([True, *self.shortcuts[1:]])))

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


def steps_of(x: Tensor, steps: int) -> Sequence[Tensor]:
    """A mask of one model at each step: its own where it has a time axis, else the one for the sequence."""
    return x.unbind(0) if x.dim() == 3 else [x] * steps


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


# ---- units by torch calls, for one model


class PlainForward:
    """φ at (layer, step) by calls that write where the result belongs."""

    def __init__(self, layout: Layout, states: States, given: Given) -> None:
        steps, rows = states.h.shape[:2]
        self.layout, self.given = layout, given
        self.before = states.before.unbind(0)
        self.reset = None if given.reset is None else given.reset.unsqueeze(-1).unbind(0)
        self.state_mask = None if given.state_mask is None else steps_of(given.state_mask, steps)
        self.zero = states.h.new_zeros(())
        self.out: list[Sequence[Tensor]] = []
        self.pre: list[Sequence[Tensor]] = []
        self.masks: list[Sequence[Tensor] | None] = []
        self.spare: list[tuple[Tensor, Tensor] | None] = []
        for l, unit in enumerate(layout.units):
            pre = layout.columns(states.slope, l)
            pooled = unit.name in ("lp", "maxout")
            pre = pre.unflatten(-1, (-1, unit.pool)).movedim(-1, 1) if pooled else pre  # (T, N, B, M)
            self.pre.append(pre.unbind(0))
            out = states.h if l == layout.last else layout.place(states.z, l)
            self.out.append(out.unbind(0))
            mask = given.masks[l]
            self.masks.append(None if mask is None else steps_of(mask, steps))
            shape = (unit.pool, rows, layout.sizes[l])
            self.spare.append((out.new_empty(shape), out.new_empty(shape[1:])) if unit.name == "lp" else None)

    def __call__(self, l: int, t: int) -> None:
        unit, a, z = self.layout.units[l], self.pre[l][t], self.out[l][t]
        if unit.name == "lp":
            self._lp(l, a, z)
        elif unit.name == "maxout":
            torch.amax(a, 0, out=z)
        else:
            ELEMENTWISE[unit.name](a, z)
        if (mask := self.masks[l]) is not None:
            z.mul_(mask[t])
        if l == self.layout.last and t + 1 < len(self.before):
            self._next(z, t + 1)

    def _lp(self, l: int, a: Tensor, z: Tensor) -> None:
        """As `units.lp`; a maximum that is never 0 makes an empty pool's mean, and φ, zero by itself."""
        spare = self.spare[l]
        assert spare is not None
        p, (d, m) = self.given.exponents[self.layout.learned(l)], spare
        torch.abs(a, out=d)
        torch.amax(d, 0, out=m)
        m.clamp_min_(torch.finfo(m.dtype).tiny)
        torch.pow(d.div_(m), p, out=d)
        torch.mean(d, 0, out=z)
        torch.pow(z, 1 / p, out=z).mul_(m)

    def _next(self, h: Tensor, t: int) -> None:
        v = self.before[t]
        if self.reset is None:
            v.copy_(h)
        else:
            torch.where(self.reset[t], self.zero, h, out=v)
        if self.state_mask is not None:
            v.mul_(self.state_mask[t])


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda a, z: torch.sigmoid(a, out=z),
    "tanh": lambda a, z: torch.tanh(a, out=z),
    "relu": lambda a, z: torch.clamp_min(a, 0.0, out=z),
    "identity": lambda a, z: z.copy_(a),
}


def slopes(layout: Layout, states: States, given: Given) -> None:
    """Turn the pre-activations of all steps into dz/dpre, and fill dz/dρ."""
    for l, unit in enumerate(layout.units):
        a = layout.columns(states.slope, l)
        mask = given.masks[l]
        if unit.name == "lp":
            number = layout.learned(l)
            p, growth = given.exponents[number], given.growth[number]
            power = layout.power(states.power, l)
            _lp_slopes(a.unflatten(-1, (-1, unit.pool)), p, growth, power)
            if mask is not None:
                power.mul_(mask)
        elif unit.name == "maxout":
            pools = a.unflatten(-1, (-1, unit.pool))
            top = pools == pools.amax(-1, keepdim=True)
            pools.copy_(top / top.sum(-1, keepdim=True))  # as torch shares a gradient among equals
        else:
            a.copy_(_slope(unit.name, a))
        if mask is not None:
            a.unflatten(-1, (-1, unit.pool)).mul_(mask.unsqueeze(-1))


def _slope(name: str, a: Tensor) -> Tensor:
    if name == "sigmoid":
        y = torch.sigmoid(a)
        return y * (1 - y)
    if name == "tanh":
        return 1 - torch.tanh(a).square_()
    return (a > 0).to(a.dtype) if name == "relu" else torch.ones_like(a)


def _lp_slopes(a: Tensor, p: Tensor, growth: Tensor, power: Tensor) -> None:
    """With r = |a|/max: dφ/da = sign(a) r^(p-1) mean^(1/p-1) / N, and dφ/dp from the two places of p."""
    d = a.movedim(-1, 0).abs()  # (N, ..., M): side by side
    m = d.amax(0)
    empty = m == 0
    r = d.div_(m.masked_fill(empty, 1.0)).masked_fill_(empty, 1.0)
    raised = r ** (p - 1)
    s = raised * r
    mean = s.mean(0)
    root = mean ** (1 / p)
    weighted = torch.xlogy(s, r).mean(0) / mean
    torch.mul((weighted - mean.log() / p).mul_(m * root).div_(p), growth, out=power)
    raised.mul_((root / mean / a.shape[-1]).masked_fill_(empty, 0.0))
    torch.mul(raised.movedim(0, -1), a.sign(), out=a)


class PlainBackward:
    """dL/dpre = dL/dz · slope at (layer, step); at the last layer what comes back from the next step joins."""

    def __init__(
        self, layout: Layout, slope: Tensor, dA: Tensor, G: Sequence[Tensor], carry: Tensor, state_mask, reset
    ) -> None:
        steps = dA.shape[0]
        self.last, self.carry = layout.last, carry
        self.reset = None if reset is None else reset.unsqueeze(-1).unbind(0)
        self.state_mask = None if state_mask is None else steps_of(state_mask, steps)
        self.gradient = [g.unbind(0) for g in G]
        pools = [(-1, u.pool) for u in layout.units]
        self.slope = [layout.columns(slope, l).unflatten(-1, n).unbind(0) for l, n in enumerate(pools)]
        self.delta = [layout.columns(dA, l).unflatten(-1, n).unbind(0) for l, n in enumerate(pools)]
        self.wide = [g.unsqueeze(-1).unbind(0) for g in G]

    def __call__(self, l: int, t: int) -> None:
        if l == self.last and t + 1 < len(self.wide[l]):
            if self.reset is not None:
                self.carry.masked_fill_(self.reset[t + 1], 0.0)
            if self.state_mask is not None:
                self.carry.mul_(self.state_mask[t + 1])
            self.gradient[l][t].add_(self.carry)
        torch.mul(self.wide[l][t], self.slope[l][t], out=self.delta[l][t])
