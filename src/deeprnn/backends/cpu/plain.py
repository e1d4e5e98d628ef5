"""One unrolled ⊕ and its backward through time in plain PyTorch calls, nothing allocated per step.

This is what the CPU backend runs where llvmlite is not installed, and what the machine-code path
(`cpu_jit.py`) is measured against. Arguments and equations are those of `backends.unroll`, without a
population dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

APPLY: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "identity": lambda y: y,
}

SLOPE: dict[str, Callable[[Tensor], Tensor]] = {  # φ' from the unit's output y
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: 1 - y * y,
    "relu": lambda y: (y > 0).to(y.dtype),
    "identity": torch.ones_like,
}


def forward(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    reset: Tensor | None,
    units: Sequence[str],
    shortcuts: Sequence[bool],
    h: Tensor,
    z: Tensor,
) -> None:
    """Fill h (T, B, H) and z (T, B, ΣM - H)."""
    entering = [w.t() for w in W]
    shortcut = _by_layer([s.t() for s in S], shortcuts)
    inputs = _layers(A, [w.shape[0] for w in W])
    outputs = [*_layers(z, [w.shape[0] for w in W[:-1]]), h.unbind(0)]
    keep = None if reset is None else (~reset).to(A.dtype).unsqueeze(-1).unbind(0)  # T of (B, 1)
    state, gated = h0, torch.empty_like(h0)
    for t in range(A.shape[0]):
        if keep is not None:
            state = torch.mul(state, keep[t], out=gated)
        below = state
        for l, name in enumerate(units):
            out = outputs[l][t]
            torch.addmm(inputs[l][t], below, entering[l], out=out)
            matrix = shortcut[l]
            if matrix is not None:
                out.addmm_(state, matrix)
            below = APPLY[name](out)
        state = below


def backward(
    dh: Tensor,
    dz: Tensor | None,
    h: Tensor,
    z: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    reset: Tensor | None,
    units: Sequence[str],
    shortcuts: Sequence[bool],
    dA: Tensor,
    dh0: Tensor,
) -> None:
    """Fill dA (T, B, ΣM), the gradients before each unit, and dh0 (B, H)."""
    sizes = [w.shape[0] for w in W]
    shortcut = _by_layer(S, shortcuts)
    deltas = _layers(dA, sizes)
    outer = [*([None] * (len(W) - 1) if dz is None else _layers(dz, sizes[:-1])), dh.unbind(0)]
    slopes = [SLOPE[name](y) for name, y in zip(units, [*z.split(sizes[:-1], dim=-1), h], strict=True)]
    slopes = [slope.unbind(0) for slope in slopes]
    keep = None if reset is None else (~reset).to(dA.dtype).unsqueeze(-1).unbind(0)
    carried = dh0.zero_()  # ∂loss/∂h(t) from the steps after t
    for t in range(dA.shape[0] - 1, -1, -1):
        torch.add(carried, outer[-1][t], out=deltas[-1][t])
        deltas[-1][t].mul_(slopes[-1][t])
        for l in range(len(W) - 2, -1, -1):
            delta = deltas[l][t]
            torch.mm(deltas[l + 1][t], W[l + 1], out=delta)
            if outer[l] is not None:
                delta.add_(outer[l][t])
            delta.mul_(slopes[l][t])
        torch.mm(deltas[0][t], W[0], out=carried)
        for l, matrix in enumerate(shortcut):
            if matrix is not None:
                carried.addmm_(deltas[l][t], matrix)
        if keep is not None:
            carried.mul_(keep[t])


def differentiable_backward(
    dh: Tensor,
    dz: Tensor | None,
    h: Tensor,
    z: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    reset: Tensor | None,
    units: Sequence[str],
    shortcuts: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """The same dA and dh0 as a function autograd can follow: what a second backward differentiates."""
    sizes = [w.shape[0] for w in W]
    shortcut = _by_layer(S, shortcuts)
    outer = [*(z.new_zeros(z.shape) if dz is None else dz).split(sizes[:-1], dim=-1), dh]
    slopes = [SLOPE[name](y) for name, y in zip(units, [*z.split(sizes[:-1], dim=-1), h], strict=True)]
    carried, steps = torch.zeros_like(h0), []
    for t in range(h.shape[0] - 1, -1, -1):
        delta = (carried + dh[t]) * slopes[-1][t]
        deltas = [delta]
        for l in range(len(W) - 2, -1, -1):
            delta = (delta @ W[l + 1] + outer[l][t]) * slopes[l][t]
            deltas.insert(0, delta)
        carried = delta @ W[0]
        for l, matrix in enumerate(shortcut):
            if matrix is not None:
                carried = carried + deltas[l] @ matrix
        if reset is not None:
            carried = carried.masked_fill(reset[t].unsqueeze(-1), 0)
        steps.append(torch.cat(deltas, dim=-1))
    dA = torch.stack(steps[::-1]) if steps else h.new_zeros(*h.shape[:-1], sum(sizes))
    return dA, carried


def _by_layer(S: Sequence[Tensor], shortcuts: Sequence[bool]) -> list[Tensor | None]:
    """S_l at its layer, None where a layer has no shortcut."""
    matrices = iter(S)
    return [next(matrices) if shortcut else None for shortcut in shortcuts]


def _layers(x: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Views x_l[t] of (T, B, Σ sizes): one list of T matrices per layer."""
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    return [x[..., a:b].unbind(0) for a, b in pairwise(edges)]
