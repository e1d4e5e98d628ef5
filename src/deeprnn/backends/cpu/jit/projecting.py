"""A layer's call as a backend is given it: an input with its matrices, and the tensors of the loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.backends.call import InputProjection, Inputs, ProjectionCase
from deeprnn.backends.cpu.jit.layer import Given, LayerCall, layer_call
from deeprnn.backends.wiring import projection_wiring
from deeprnn.cells.description import CellDescription


def call_of(
    cell: CellDescription, projection: InputProjection, given: Inputs, dtype: torch.dtype
) -> LayerCall | None:
    """The call that serves these tensors, None where none does."""
    x, U, b, inputs = projection.x, projection.U, projection.b, projection.x.shape[-1]
    heights = tuple(u.shape[0] for u in U)
    expected = [(n,) for n in (*heights, *heights[:1])]
    numbers = (*projection.tensors, *given.states, *given.matrices, *given.vectors, *given.masks)
    if not x.numel() or x.dim() != 3 or any(tensor.dtype != dtype for tensor in numbers):
        return None
    if any(u.shape != (n, inputs) for u, n in zip(U, heights, strict=True)):
        return None
    if len(b) not in (0, len(U), len(U) + 1) or [tuple(v.shape) for v in b] != expected[: len(b)]:
        return None
    return _call(cell, heights, len(b), inputs, dtype)


def _call(
    cell: CellDescription, heights: tuple[int, ...], biases: int, inputs: int, dtype: torch.dtype
) -> LayerCall | None:
    return layer_call(projection_wiring(cell, heights, biases, inputs), inputs, dtype)


def forward(case: ProjectionCase, projection: InputProjection, inputs: Inputs, keep: bool) -> list[Tensor]:
    """Every output of every step and, with `keep`, what the backward pass needs."""
    call, given = _given(case, projection, inputs)
    steps, batch, _ = case.shape
    results = [given.x.new_empty((steps, batch, width)) for width in call.widths(keep)]
    call.at(steps, batch).forward(given, [x.data_ptr() for x in results], keep)
    return results


def backward(
    case: ProjectionCase,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    projection: InputProjection,
    inputs: Inputs,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, U, b, states, matrices and vectors; `needed` says which are wanted."""
    call, given = _given(case, projection, inputs)
    first = 1 + len(projection.U) + len(projection.b)
    behind = first + len(inputs.states)
    wanted = any((*needed[1:first], *needed[behind : behind + len(inputs.matrices) + len(inputs.vectors)]))
    sized = call.at(*case.shape[:2])
    memory, made = sized.backward(given, [x.data_ptr() for x in stored], gradients, wanted)
    d_x = sized.input_gradient(memory, given.parameters) if needed[0] else None
    d_parameters = made or [None] * len(given.parameters)
    return [d_x, *d_parameters[: first - 1], *sized.state_gradients(memory), *d_parameters[first - 1 :]]


def _given(case: ProjectionCase, projection: InputProjection, inputs: Inputs) -> tuple[LayerCall, Given]:
    call = _call(case.case.cell, case.heights, case.biases, case.shape[-1], case.case.dtype)
    assert call is not None  # as `call_of` said
    parameters = [*projection.U, *projection.b, *inputs.matrices, *inputs.vectors]
    return call, Given.of(projection.x, parameters, inputs.states, inputs.masks, inputs.reset)
