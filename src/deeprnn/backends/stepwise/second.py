"""Gradients of `steps` that can be differentiated again: autograd follows the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends import reference
from deeprnn.backends.stepwise.loop import layout_of
from deeprnn.model import units as phi


def groups_of(flat: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """A flat sequence cut into lists of these lengths."""
    rest = iter(flat)
    return [[next(rest) for _ in range(n)] for n in counts]


def gradients(
    dh: Tensor | None, dz: Tensor | None, values: tuple[Any, ...], units: str, shortcuts: str, masked: str
) -> tuple[Any, ...]:
    """The same gradients by the plain loop, whose operations a second derivative can follow."""
    A, h0, *groups, masks, state_mask, reset = values
    counts = [len(g) for g in groups]
    # Views of the inputs: one input may depend on another outside, and that path is not ours.
    leaves = [x.view_as(x) for x in (A, h0, *(y for group in groups for y in group))]
    own = [leaves[0], leaves[1], *groups_of(leaves[2:], counts), masks, state_mask, reset]
    members = range(len(A)) if A.dim() == 4 else [None]
    each = [_plain(own if p is None else _slices(own, p), units, shortcuts, masked) for p in members]
    h, z = each[0] if A.dim() == 3 else map(torch.stack, zip(*each, strict=True))
    wanted = [x for x in leaves if x.requires_grad]
    ends = [(y, d) for y, d in ((h, dh), (z, dz)) if d is not None and y.requires_grad]
    outputs, gradients = zip(*ends, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    grads = [next(found) if x.requires_grad else None for x in leaves]
    return grads[0], grads[1], *groups_of(grads[2:], counts)


def _slices(values: Sequence[Any], p: int) -> list[Any]:
    return [None if v is None else v[p] if isinstance(v, Tensor) else [x[p] for x in v] for v in values]


def _plain(values: Sequence[Any], units: str, shortcuts: str, masked: str) -> tuple[Tensor, Tensor]:
    A, h0, W, S, rho, centre, masks, state_mask, reset = values
    layout = layout_of(units, shortcuts, tuple(w.shape[-2] for w in W))
    parameters, spread = iter(zip(rho, centre, strict=True)), iter(masks)
    phis = [phi.resolve(u, *(next(parameters) if u.name == "lp" else ())) for u in layout.units]
    by_layer = [next(spread) if has == "1" else None for has in masked]
    S = reference.spread(S, layout.shortcuts)
    return reference.unroll_with(A, h0, W, S, phis, layout.widths, reset, state_mask, by_layer)
