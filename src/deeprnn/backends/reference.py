"""The plain loop over the equations: the truth that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.backends import TransitionSpec
from deeprnn.model import equations, units


def why_not(
    spec: TransitionSpec,
    device: torch.device,
    dtype: torch.dtype,
    T: int,
    B: int,
    P: int = 1,
    precision: str = "fp32",
) -> str | None:
    """The reference serves every unit that has a name."""
    unknown = [u for u in spec.units if u not in units.ELEMENTWISE]
    return f"unit {unknown[0]!r} is not element-wise" if unknown else None


def unroll(
    A: Tensor,
    h0: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    precision: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Unroll by autograd-recorded steps; see `deeprnn.backends.unroll` for the shapes."""
    phis = [units.ELEMENTWISE[u] for u in spec.units]
    return unroll_with(A, h0, W, spread(S, spec.shortcuts), phis, spec.sizes, reset)


def spread(S: Sequence[Tensor], shortcuts: Sequence[bool]) -> list[Tensor | None]:
    """Put the shortcut matrices at their layers, None where a layer has none."""
    remaining = iter(S)
    return [next(remaining) if has else None for has in shortcuts]


def unroll_with(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    phis: Sequence[equations.Phi],
    widths: Sequence[int],
    reset: Tensor | None = None,
    state_mask: Tensor | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Unroll with any units φ and, for dropout, masks on h(t-1) and on the intermediate layers.

    `widths` are those of the pre-activations in A. A mask is (B, n), one for the sequence, or
    (T, B, n), one for every step.
    """
    wt = [w.mT for w in W]
    st = [None if s is None else s.mT for s in S]
    layers = [part.unbind(0) for part in A.split(list(widths), dim=-1)]  # L x T of (B, width)
    h = h0
    hs: list[Tensor] = []
    zs: list[Tensor] = []
    for t in range(A.shape[0]):
        if reset is not None:
            h = torch.where(reset[t].unsqueeze(-1), 0.0, h)
        before = h if state_mask is None else h * at(state_mask, t)
        now = None if masks is None else [None if m is None else at(m, t) for m in masks]
        z = equations.transition_mlp([layer[t] for layer in layers], before, wt, st, phis, now)
        h = z[-1]
        hs.append(h)
        zs.append(torch.cat(z[:-1], -1) if len(z) > 1 else h[..., :0])
    if not hs:  # no step: empty results that still belong to the graph
        inner = sum(w.shape[-1] for w in W[1:])
        empty = A.sum(-1, keepdim=True) + h0.sum()
        return empty.expand(*A.shape[:-1], h0.shape[-1]), empty.expand(*A.shape[:-1], inner)
    return torch.stack(hs), torch.stack(zs)


def at(mask: Tensor, t: int) -> Tensor:
    """A mask at step t: its own where it has a time axis, else the one for the sequence."""
    return mask[t] if mask.dim() == 3 else mask
