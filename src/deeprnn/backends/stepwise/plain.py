"""Units by torch calls, for one model: what `steps_loop` calls on the CPU.

Slopes do not depend on what comes back, so they are taken for all steps at once after the loop; going
backward a layer is one multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deeprnn.backends.stepwise.loop import Given, Layout, States


def steps_of(x: Tensor, steps: int) -> Sequence[Tensor]:
    """A mask of one model at each step: its own where it has a time axis, else the one for the sequence."""
    return x.unbind(0) if x.dim() == 3 else [x] * steps


class PlainForward:
    """φ at (layer, step) by calls that write where the result belongs."""

    def __init__(self, layout: Layout, states: States, given: Given) -> None:
        steps, rows = states.h.shape[:2]
        self.layout, self.given = layout, given
        self.before = states.before.unbind(0)
        self.reset = None if given.reset is None else given.reset.unsqueeze(-1).unbind(0)
        self.state_mask = None if given.state_mask is None else steps_of(given.state_mask, steps)
        self.zero = states.h.new_zeros(())
        self.exponents = [(p, 1 / p) for p in given.exponents]
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
        p, inverse = self.exponents[self.layout.learned(l)]
        d, m = spare
        torch.abs(a, out=d)
        torch.amax(d, 0, out=m)
        m.clamp_min_(torch.finfo(m.dtype).tiny)
        torch.pow(d.div_(m), p, out=d)
        torch.sum(d, 0, out=z)
        torch.pow(z.mul_(1 / len(d)), inverse, out=z).mul_(m)

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
    r = a.new_empty(a.shape[-1], *a.shape[:-1])  # (N, ..., M): each calculation runs along the units
    torch.abs(a.movedim(-1, 0), out=r)
    tiny = torch.finfo(
        a.dtype
    ).tiny  # for 0 as a divisor or under a logarithm, where the factor beside it is 0
    m = r.amax(0).clamp_min_(tiny)
    r.div_(m)
    raised = r ** (p - 1)
    s = raised * r
    mean = s.mean(0).clamp_min_(tiny)
    root = mean ** (1 / p)
    weighted = r.clamp_min_(tiny).log_().mul_(s).mean(0).div_(mean)
    torch.mul(weighted.sub_(mean.log() / p).mul_(m).mul_(root), growth / p, out=power)
    raised.mul_(root.div_(mean).div_(a.shape[-1]))
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
