"""A layer's whole call as one operation: the fast path for plain tensors, on a backend that has one.

`unrolling` serves every caller; what it does for a call takes the host longer than a small layer takes a GPU. Here one
level in one direction goes from its input and its parameters, as they are, to its output and last states, and autograd
sees one operation. Nothing is remembered about numbers. Whatever is not plain (transformations, modes, subclasses,
autocast, tracing, a graph being captured, a first state with a gradient) is left to the general path: `None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from deeprnn.backends.call import Case, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.layer_autograd import DirectUnroll
from deeprnn.backends.protocol import DirectBackend, DirectCall
from deeprnn.backends.registry import load_backend
from deeprnn.backends.transformations import EXACT_TYPES, no_modes_or_transforms
from deeprnn.backends.unrolling import autocasts, resolve_backend
from deeprnn.backends.wiring import Wiring

DEVICES = ("cuda", "cpu")
"""types of those with a `DirectBackend`: elsewhere not even its absence should cost a call time"""
MOST_CALLS = 1024
_calls: dict[tuple, tuple[str, DirectCall] | None] = {}
"""with the names of their backends"""
_seen_once: set[tuple] = set()
"""met once: preparing a call takes longer than an ordinary one, and lengths may differ from batch to batch"""


def eligible_for_direct_call(x: Any) -> bool:
    """Whether it is worth asking for the fast path: a plain fp32 tensor where backends have one, and no trace.

    In a trace sizes are tensors: not even the wiring can be read there.
    """
    plain = type(x) in EXACT_TYPES and x.device.type in DEVICES and x.dtype == torch.float32
    return plain and torch._C._get_tracing_state() is None


def direct(
    wiring: Wiring, x: Tensor, states: Sequence[Any] | None, parameters: Sequence[Any], backend: str
) -> tuple[Tensor, list[Tensor]] | None:
    """The output (T, B, n) and the last states (1, B, n) of x (T, B, I); None where the general path is to be taken.

    x is `eligible_for_direct_call`. The first states are (1, B, n), None for zeros. Parameters are in the wiring's
    order; None among them stands for one that is no plain parameter of the layer.
    """
    if not no_modes_or_transforms() or _is_recorded(x) or autocasts(x.device.type):
        return None
    device, keep = x.device, torch.is_grad_enabled()
    for p, shape in zip(parameters, wiring.shapes, strict=True):
        if type(p) not in EXACT_TYPES or p.shape != shape or p.dtype != torch.float32 or p.device != device:
            return None
        if not p.is_contiguous():
            return None
    key = wiring, backend, x.shape, device
    if states is not None:
        for h in states:
            if (
                type(h) not in EXACT_TYPES
                or h.dtype != torch.float32
                or h.device != device
                or h.requires_grad
            ):
                return None
        key = *key, *[h.shape for h in states]
    if key not in _calls:
        for known in (_calls, _seen_once):
            if len(known) >= MOST_CALLS:
                known.clear()
        if key not in _seen_once:
            _seen_once.add(key)
            return None
        _calls[key] = _call_of(wiring, x, states, parameters, backend)
    served = _calls[key]
    if served is None:
        return None
    name, call = served
    if not keep:
        y, last, _ = call.forward(x, states, parameters, False)
        return y, last
    y, *last = DirectUnroll.apply(name, call, wiring, x, *parameters, *(states or ()))
    return y, last


def _is_recorded(x: Tensor) -> bool:
    """Whether operations become part of a forward-mode derivative or of a CUDA graph."""
    return forward_ad._current_level >= 0 or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _call_of(
    wiring: Wiring, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor], backend: str
) -> tuple[str, DirectCall] | None:
    """The backend that serves these shapes, and its call; errors about them are left to the general path."""
    cell = wiring.cell
    if (
        x.dim() != 3
        or not x.numel()
        or any(wiring.shapes[i] != (wiring.shapes[i][0], x.shape[-1]) for i in wiring.U)
    ):
        return None
    if states is not None and [tuple(h.shape) for h in states] != [(1, x.shape[1], n) for n in cell.states]:
        return None
    chosen = load_backend(resolve_backend(cell.text, x.device, x.dtype, "fp32", backend))
    case = Case(cell, x.device, x.dtype)
    if not isinstance(chosen, DirectBackend):
        return None
    matrices, vectors = [parameters[i] for i in wiring.matrices], wiring.vector_parameters(parameters)
    first = [x.new_empty((x.shape[1], n)) for n in cell.states]
    projection, inputs = (
        InputProjection(x, [parameters[i] for i in wiring.U], []),
        Inputs(None, first, matrices, vectors, []),
    )
    if not chosen.serves_projection(case, projection, inputs):
        return None
    call = chosen.direct_call(ProjectionCase.of(case, projection, inputs), wiring)
    return None if call is None else (chosen.name, call)
