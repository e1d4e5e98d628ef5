"""From the weights of one ⊕ to its unrolled layers: what `Plus` and `DeepRNN` share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, softplus

from deeprnn.backends.call import InputProjection, Inputs
from deeprnn.backends.registry import check_plain
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.backends.unrolling import project_and_unroll, unroll
from deeprnn.cells.deep_transition import POOLED, DeepTransition
from deeprnn.cells.description import CellDescription, from_text
from deeprnn.cells.functions import FUNCTIONS
from deeprnn.model import equations, units
from deeprnn.model.operator_specs import PlusSpec
from deeprnn.model.units import UnitSpec, resolve


class Weights(NamedTuple):
    """The matrices of one ⊕: every W, the S of the layers that have one, and ρ of Lp units."""

    W: Sequence[Tensor]
    S: Sequence[Tensor]
    rho: Sequence[Tensor] = ()


def why_not_described(units_of_layers: Sequence[UnitSpec]) -> str | None:
    """None where ⊕ is made of known functions, else which unit is not."""
    unknown = [
        u.name
        for u in units_of_layers
        if u.name not in POOLED
        and (u.name not in FUNCTIONS or units.ELEMENTWISE[u.name] is not FUNCTIONS[u.name].torch)
    ]
    return f"unit {unknown[0]!r} is not in the table of functions" if unknown else None


def unroll_layers(
    spec: PlusSpec,
    projection: Tensor | InputProjection,
    h0: Tensor,
    weights: Weights,
    reset: Tensor | None = None,
    state_mask: Tensor | None = None,
    masks: Sequence[Tensor | None] = (),
    backend: str = "auto",
) -> list[Tensor]:
    """All layers of ⊕ over a sequence, (T, B, M_l) each; the states are the last.

    `projection` is A (T, B, Σ widths), or what A is computed from. A mask is (B, n), one for the sequence, or
    (T, B, n).
    """
    masks = list(masks) + [None] * (spec.depth - len(masks))
    if (reason := why_not_described(spec.unit_specs)) is not None:
        check_plain(backend, f"this case: {reason}; use backend='auto'")
        A = projection.A if isinstance(projection, InputProjection) else projection
        return _by_equations(spec, A, h0, weights, reset, state_mask, masks)
    flags = tuple(m is not None for m in masks), state_mask is not None
    cell = _text(spec, *flags) if torch.compiler.is_compiling() else cell_of(spec, *flags)
    present = [m for m in (state_mask, *masks) if m is not None]
    vectors = [1 + softplus(rho) for rho in weights.rho]
    inputs = Inputs(None, [h0], [*weights.W, *weights.S], vectors, present, reset)
    if isinstance(projection, InputProjection):
        outputs = project_and_unroll(cell, projection, inputs, backend)
    else:
        outputs = unroll(cell, inputs._replace(A=projection), backend)
    return outputs[1:] if state_mask is not None else outputs


def single_step(
    phis: Sequence[UnitSpec],
    x: Tensor,
    h: Tensor,
    U: Sequence[Tensor | None],
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    b: Sequence[Tensor],
) -> list[Tensor]:
    """All layers of ⊕ after one step, one call of torch for each product: x (B, I), h (B, H) -> (B, M_l) each.

    The last of b, where there are any, is the second bias of the first layer, as in `nn.RNN`.
    """
    layers, z = [], h
    for l, unit in enumerate(phis):
        u, s, bias = U[l], S[l], b[l] if b else None
        a = linear(z, W[l], b[-1] if b and l == 0 else bias)
        if u is not None:
            a = a + linear(x, u, bias if l == 0 else None)
        elif l == 0 and bias is not None:
            a = a + bias
        z = resolve(unit)(a if s is None else a + linear(h, s))
        layers.append(z)
    return layers


def _by_equations(
    spec: PlusSpec,
    A: Tensor,
    h: Tensor,
    weights: Weights,
    reset: Tensor | None,
    state_mask: Tensor | None,
    masks: Sequence[Tensor | None],
) -> list[Tensor]:
    """The plain loop, for units that no backend knows."""
    rho, S = iter(weights.rho), iter(weights.S)
    zero = A.new_zeros(())  # centres are taken off A already
    phis = [resolve(u, *((next(rho), zero) if u.name == "lp" else ())) for u in spec.unit_specs]
    shortcuts = [next(S).mT if has else None for has in spec.shortcuts]
    W, steps = [w.mT for w in weights.W], []
    for t, a in enumerate(A.unbind(0)):
        h = h if reset is None else torch.where(reset[t].unsqueeze(-1), 0.0, h)
        v = h if state_mask is None else h * _at(state_mask, t)
        now = [None if m is None else _at(m, t) for m in masks]
        steps.append(equations.transition_mlp(a.split(list(spec.widths), -1), v, W, shortcuts, phis, now))
        h = steps[-1][-1]
    if not steps:
        return [A.new_zeros(*A.shape[:-1], size) for size in spec.sizes]
    return [torch.stack(layer) for layer in zip(*steps, strict=True)]


def _at(mask: Tensor, t: int) -> Tensor:
    return mask[t] if mask.dim() == 3 else mask


@lru_cache(maxsize=1024)
def cell_of(spec: PlusSpec, masks: tuple[bool, ...], state_mask: bool) -> CellDescription:
    """The description of a ⊕, with masks on its layers and on the state or without."""
    names, pools = zip(*((u.name, u.pool) for u in spec.unit_specs), strict=True)
    made = DeepTransition(spec.sizes, names, spec.shortcuts, pools, masks, state_mask).cell
    return from_text(made.text)  # one object for all specs that differ outside the loop


@constant_when_compiled
def _text(spec: PlusSpec, masks: tuple[bool, ...], state_mask: bool) -> str:
    return cell_of(spec, masks, state_mask).text


def less_centres(A: Tensor, spec: PlusSpec, centre: Sequence[Tensor]) -> Tensor:
    """A with the centres of Lp units taken off: they are a bias like any other."""
    if not centre:
        return A
    remaining = iter(centre)
    parts = [
        next(remaining) if u.name == "lp" else A.new_zeros(width)
        for u, width in zip(spec.unit_specs, spec.widths, strict=True)
    ]
    return A - torch.cat(parts)


def joined(layers: Sequence[Tensor]) -> Tensor:
    """The layers below the state side by side, (T, B, ΣM_l − H)."""
    if len(layers) == 1:
        return layers[0][..., :0]
    return layers[0] if len(layers) == 2 else torch.cat(list(layers[:-1]), -1)
