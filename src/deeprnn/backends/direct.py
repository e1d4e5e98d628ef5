"""A layer's whole call as one operation: the short way for plain tensors, on a backend that has one.

`unrolling` serves every caller; what it does for a call takes the host longer than a small layer takes a GPU. Here one
level in one direction goes from its input and its parameters, as they are, to its output and last states, and autograd
sees one operation. Nothing is remembered about numbers. Whatever is not plain (transformations, modes, subclasses,
autocast, tracing, a graph being captured, a first state with a gradient) is left to the ordinary way: `None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deeprnn.backends.autograd import Call, Unroll, own_view
from deeprnn.backends.protocol import (
    Case,
    DirectCall,
    InputProjection,
    Inputs,
    KeptTensors,
    ProjectingBackend,
    ProjectionCase,
)
from deeprnn.backends.registry import load
from deeprnn.backends.transformations import PLAIN, nothing_around, plain_tensors
from deeprnn.backends.unrolling import autocasts, select
from deeprnn.backends.wiring import Wiring

DEVICE = "cuda"
"""where backends have a short way"""
MOST_CALLS = 1024
_calls: dict[tuple, DirectCall | None] = {}
_seen: set[tuple] = set()
"""met once: preparing a call takes longer than an ordinary one, and lengths may differ from batch to batch"""


def may_be_direct(x: Any) -> bool:
    """Whether it is worth asking for the short way: a plain fp32 tensor where backends have one."""
    return type(x) in PLAIN and x.device.type == DEVICE and x.dtype == torch.float32


def direct(
    wiring: Wiring, x: Tensor, states: Sequence[Any] | None, parameters: Sequence[Any], backend: str
) -> tuple[Tensor, list[Tensor]] | None:
    """The output (T, B, n) and the last states (1, B, n) of x (T, B, I); None where the ordinary way is to be taken.

    x is a tensor that `may_be_direct`.
    The first states are (1, B, n), None for zeros. Parameters are in the wiring's order; None among them stands for one
    that is no plain parameter of the layer.
    """
    if not nothing_around() or _is_recorded() or autocasts(DEVICE):
        return None
    device, keep = x.device, torch.is_grad_enabled()
    for p, shape in zip(parameters, wiring.shapes, strict=True):
        if type(p) not in PLAIN or p.shape != shape or p.dtype != torch.float32 or p.device != device:
            return None
        if not p.is_contiguous():
            return None
    key = wiring, backend, x.shape, device
    if states is not None:
        for h in states:
            if type(h) not in PLAIN or h.dtype != torch.float32 or h.device != device or h.requires_grad:
                return None
        key = *key, *[h.shape for h in states]
    if key not in _calls:
        for known in (_calls, _seen):
            if len(known) >= MOST_CALLS:
                known.clear()
        if key not in _seen:
            _seen.add(key)
            return None
        _calls[key] = _call_of(wiring, x, states, parameters, backend)
    call = _calls[key]
    if call is None:
        return None
    if not keep:
        y, last, _ = call.forward(x, states, parameters, False)
        return y, last
    y, *last = DirectUnroll.apply(call, wiring, x, *parameters, *(states or ()))
    return y, last


def _is_recorded() -> bool:
    """Whether operations become part of a trace, of a forward-mode derivative or of a CUDA graph."""
    return (
        forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or (DEVICE == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def _call_of(
    wiring: Wiring, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor], backend: str
) -> DirectCall | None:
    """What serves these shapes; errors about them are left to the ordinary way."""
    cell = wiring.cell
    if (
        x.dim() != 3
        or not x.numel()
        or any(wiring.shapes[i] != (wiring.shapes[i][0], x.shape[-1]) for i in wiring.U)
    ):
        return None
    if states is not None and [tuple(h.shape) for h in states] != [(1, x.shape[1], n) for n in cell.states]:
        return None
    chosen, case = load(select(cell.text, x.device, x.dtype, "fp32", backend)), Case(cell, x.device, x.dtype)
    if not isinstance(chosen, ProjectingBackend):
        return None
    matrices, vectors = [parameters[i] for i in wiring.matrices], wiring.vector_parameters(parameters)
    first = [x.new_empty((x.shape[1], n)) for n in cell.states]
    projection, inputs = (
        InputProjection(x, [parameters[i] for i in wiring.U], []),
        Inputs(None, first, matrices, vectors, []),
    )
    if not chosen.serves_projection(case, projection, inputs):
        return None
    return chosen.direct_call(ProjectionCase.of(case, projection, inputs), wiring)


class DirectUnroll(torch.autograd.Function):
    """From input, parameters and first states, if there are any, to output and last states."""

    @staticmethod
    def forward(ctx: Any, call: DirectCall, wiring: Wiring, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        count = len(wiring.shapes)
        y, last, kept = call.forward(x, rest[count:] or None, rest[:count], True)
        ctx.call, ctx.wiring = call, wiring
        ctx.save_for_backward(y, kept, x, *rest)
        ctx.set_materialize_grads(False)
        return (y, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        y, kept, x, *rest = ctx.saved_tensors
        count = len(ctx.wiring.shapes)
        parameters, states = rest[:count], rest[count:]
        wanted = ctx.needs_input_grad[2 : 3 + count]
        if torch.is_grad_enabled() or not plain_tensors(*gradients):
            found = _again(ctx, gradients, [x, *parameters], states, wanted)
        else:
            kept_from = KeptTensors(y, kept, x, states or None, parameters)
            found = ctx.call.backward(gradients, kept_from, wanted[0], any(wanted[1:]))
        if False in wanted:
            found = [d if wants else None for d, wants in zip(found, wanted, strict=True)]
        return (None, None, *found, *[None] * len(states))


def _again(
    ctx: Any,
    gradients: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    states: Sequence[Tensor],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The same gradients by operations that a second derivative and vmap can follow."""
    again, wiring, (backend, case) = torch.is_grad_enabled(), ctx.wiring, ctx.call.served
    cell = wiring.cell
    with torch.enable_grad():
        x, *parameters = own = [own_view(t) for t in tensors]
        matrices, vectors = [parameters[i] for i in wiring.matrices], wiring.vector_parameters(parameters)
        first = [h[0] for h in states] or [x.new_zeros(x.shape[1], n) for n in cell.states]
        inputs = Inputs(wiring.enter(x, parameters), first, matrices, vectors, [])
        stored = Unroll.apply(*Call(backend, cell.text, case.precision, False, True), *inputs.tensors)
        sequences = [stored[cell.outputs.index(o)] for o in cell.new_states]
        outputs = [sequences[0], *(h[-1:] for h in sequences)]
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        wanted = [t for t, needed in zip(own, needs, strict=True) if needed]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
            )
        )
    return [next(found) if needed else None for needed in needs]
