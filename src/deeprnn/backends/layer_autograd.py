"""The loop under autograd as one operation with what a layer does around it: its input's product, or the whole call.

Autograd sees one operation instead of many, which is time of the host's. Gradients of the backward pass itself, and
gradients that are mapped over, go through `Unroll`, which every transformation can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.autograd import Unroll, clone_first_output, gradients_by_autograd
from deeprnn.backends.call import Case, InputProjection, Inputs, ProjectionCase, SavedTensors
from deeprnn.backends.protocol import DirectCall, ProjectingBackend
from deeprnn.backends.torch_operators import UnrollAttributes
from deeprnn.backends.transformations import plain_tensors
from deeprnn.backends.wiring import Wiring


def project_and_unroll(
    backend: ProjectingBackend, projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs
) -> Sequence[Tensor]:
    """`unroll` of an input that enters through matrices, by a backend that takes both together; plain tensors alone."""
    if torch.is_grad_enabled():
        return ProjectAndUnroll.apply(backend, projection_case, *projection.tensors, *inputs.tensors)
    return backend.forward_with_projection(projection_case, projection, inputs, False)


class ProjectAndUnroll(torch.autograd.Function):
    """The input's product and the loop."""

    @staticmethod
    def forward(
        ctx: Any, backend: ProjectingBackend, projection_case: ProjectionCase, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        stored = backend.forward_with_projection(projection_case, *projection_case.split(tensors), True)
        ctx.backend, ctx.projection_case, ctx.count = backend, projection_case, len(stored)
        ctx.save_for_backward(*stored, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(
            clone_first_output(projection_case.case.cell, stored)[: len(projection_case.case.cell.outputs)]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        projection_case: ProjectionCase = ctx.projection_case
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        stored, tensors = saved[: ctx.count], saved[ctx.count :]
        if not torch.is_grad_enabled() and plain_tensors(*gradients):
            results = ctx.backend.backward_with_projection(
                projection_case, gradients, stored, *projection_case.split(tensors), needed
            )
            return (None, None, *results, *[None] * (len(tensors) - len(results)))

        def compute(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            projection, inputs = projection_case.split(tensors)
            case, has_reset = projection_case.case, projection_case.has_reset
            attributes = UnrollAttributes(ctx.backend.name, case.cell.text, case.precision, has_reset, True)
            return Unroll.apply(*attributes, *inputs._replace(A=projection.A).tensors)[: len(gradients)]

        return (None, None, *gradients_by_autograd(compute, tensors, gradients, needed))


class DirectUnroll(torch.autograd.Function):
    """A layer's call: from input, parameters and first states, if there are any, to output and last states."""

    @staticmethod
    def forward(
        ctx: Any, backend: str, call: DirectCall, wiring: Wiring, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(wiring.shapes)
        y, last, workspace = call.forward(x, rest[count:] or None, rest[:count], True)
        ctx.backend, ctx.call, ctx.wiring = backend, call, wiring
        ctx.save_for_backward(y if call.reads_output else None, workspace, x, *rest)
        ctx.set_materialize_grads(False)
        return (y, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        y, workspace, x, *rest = ctx.saved_tensors
        call, wiring = ctx.call, ctx.wiring
        count = len(wiring.shapes)
        parameters, states = rest[:count], rest[count:]
        needed = ctx.needs_input_grad[3 : 4 + count]
        results: Sequence[Tensor | None]
        if not torch.is_grad_enabled() and plain_tensors(*gradients):
            tensors = SavedTensors(y, workspace, x, states or None, parameters)
            results = call.backward(gradients, tensors, needed[0], any(needed[1:]))
            if False in needed:
                results = [d if wants else None for d, wants in zip(results, needed, strict=True)]
        else:

            def compute(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
                return _by_unroll(ctx.backend, call.case, wiring, tensors[0], tensors[1:], states)

            results = gradients_by_autograd(compute, [x, *parameters], gradients, needed)
        return (None, None, None, *results, *[None] * len(states))


def _by_unroll(
    backend: str,
    case: Case,
    wiring: Wiring,
    x: Tensor,
    parameters: Sequence[Tensor],
    states: Sequence[Tensor],
) -> list[Tensor]:
    """What a direct call computes, by way of `Unroll`."""
    cell = wiring.cell
    matrices, vectors = [parameters[i] for i in wiring.matrices], wiring.vector_parameters(parameters)
    first = [h[0] for h in states] or [x.new_zeros(x.shape[1], n) for n in cell.states]
    inputs = Inputs(wiring.enter(x, parameters), first, matrices, vectors, [])
    stored = Unroll.apply(*UnrollAttributes(backend, cell.text, case.precision, False, True), *inputs.tensors)
    sequences = [stored[cell.outputs.index(o)] for o in cell.new_states]
    return [sequences[0], *(h[-1:] for h in sequences)]
