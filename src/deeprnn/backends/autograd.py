"""Backends under autograd, vmap, torch.compile and fake tensors: once, for all of them.

Eagerly a call is the autograd function `Unroll`; while compiling it is the operator `deeprnn::unroll`. Both share one
rule for what is saved, one backward pass and one way to map over a population. Gradients of the backward pass itself
follow `plain.backward`, a differentiable function of what the forward pass stored, so derivatives of every order are
right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Gradients, Inputs
from deeprnn.backends.gradients import matrix_gradients, vector_gradients
from deeprnn.backends.protocol import Backend, BackendWithMatrixGradients, MatrixGradients
from deeprnn.backends.registry import load_backend
from deeprnn.backends.torch_operators import (
    UnrollAttributes,
    backward_op,
    flat,
    output_count,
    run,
    run_backward,
    unroll_op,
)
from deeprnn.backends.transformations import (
    batched_by_autograd,
    inside_function_transform,
    plain_tensors,
)
from deeprnn.cells.adjoint import adjoint_of, with_saved_as_outputs
from deeprnn.cells.description import CellDescription, from_text


def unroll(backend: str, text: str, precision: str, inputs: Inputs) -> list[Tensor]:
    """Every output of every step by a backend, as an operation that torch's transformations can follow."""
    keep = torch.is_grad_enabled()
    attributes = UnrollAttributes(backend, text, precision, inputs.reset is not None, keep)
    if torch.compiler.is_compiling():
        stored = unroll_op(*attributes[:3], inputs.tensors, *attributes[3:])
    elif inside_function_transform():
        stored = _first_output_cloned(attributes.cell, Unroll.apply(*attributes, *inputs.tensors))
    elif keep:
        stored = _first_output_cloned(attributes.cell, EagerUnroll.apply(*attributes, *inputs.tensors))
    else:
        stored = _forward(attributes, inputs.tensors)
    return list(stored[: output_count(text)])


def _first_output_cloned(cell: CellDescription, stored: Sequence[Tensor]) -> Sequence[Tensor]:
    return clone_first_output(cell, stored) if stored[0].requires_grad else stored


def clone_first_output(cell: CellDescription, stored: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first state's sequence, which layers hand to the user, as a copy on the CPU.

    The backward pass reads the original, so `F.dropout(output, inplace=True)` works as it does after `nn.RNN`. The
    copy costs about 1 % of a call (H = 400, 1 to 64 rows), more where its memory is fresh; what stays inside a layer
    is not copied.
    """
    place = cell.outputs.index(cell.new_states[0])
    if stored[place].device.type != "cpu":
        return stored
    return [x.clone() if i == place else x for i, x in enumerate(stored)]


def _forward(attributes: UnrollAttributes, tensors: Sequence[Tensor]) -> list[Tensor]:
    arguments = (*attributes[:3], list(tensors), *attributes[3:])
    return run(*arguments) if plain_tensors(*tensors) else unroll_op(*arguments)


# ---- autograd


class Unroll(torch.autograd.Function):
    """The loop as one autograd node; its outputs are the cell's outputs, then what the backward pass reads."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_forward(UnrollAttributes(*arguments[:5]), arguments[5:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        _save(ctx, UnrollAttributes(*inputs[:5]), inputs[5:], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_tensors = _gradients(ctx, gradients, ctx.needs_input_grad[5:])
        return (*(None for _ in UnrollAttributes._fields), *of_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        attributes = UnrollAttributes(*arguments[:5])
        tensors = _move_batch_dim_first(info, arguments[5:], in_dims[5:], attributes.has_reset)
        outputs = Unroll.apply(*attributes, *tensors)
        return outputs, (0,) * len(outputs)


class EagerUnroll(torch.autograd.Function):
    """`Unroll` outside of torch.func, where torch inspects the signature of what has a `setup_context` at each call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        attributes, tensors = UnrollAttributes(*arguments[:5]), arguments[5:]
        output = tuple(_forward(attributes, tensors))
        _save(ctx, attributes, tensors, output)
        return output

    backward = Unroll.backward


def _save(
    ctx: Any, attributes: UnrollAttributes, tensors: Sequence[Tensor], output: Sequence[Tensor]
) -> None:
    ctx.attributes, ctx.count = attributes, len(output)
    ctx.save_for_backward(*output, *tensors[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of all inputs, in their order."""
    attributes: UnrollAttributes = ctx.attributes
    cell, saved = attributes.cell, ctx.saved_tensors
    stored, tensors = saved[: ctx.count], saved[ctx.count :]
    inputs = Inputs.of(cell, tensors, has_A=False)
    saved_has_grad = any(g is not None for g in gradients[len(cell.outputs) :])
    if batched_by_autograd(*gradients):
        results = flat(_plain_backward(cell, saved_has_grad, gradients, stored, tensors))
    else:
        without_graph = not torch.is_grad_enabled() and not inside_function_transform()
        backward = UnrollBackward.forward if without_graph else UnrollBackward.apply
        results = backward(*attributes[:4], saved_has_grad, len(gradients), *gradients, *stored, *tensors)
    adjoint = adjoint_of(with_saved_as_outputs(cell) if saved_has_grad else cell)
    delta, d_states = results[0], results[1:]
    after = 1 + len(cell.states)
    matrices = needed[after : after + len(cell.matrices)]
    d_matrices: Sequence[Tensor | None] = [None] * len(matrices)
    if any(matrices):
        outputs = [stored[i] for i in _places_by_stage(cell)] if saved_has_grad else stored
        differentiable = torch.is_grad_enabled() or not plain_tensors(delta, *outputs, *tensors)
        compute = matrix_gradients
        if not differentiable:
            compute = _matrix_gradients_of(load_backend(attributes.backend))
        d_matrices = compute(adjoint, delta, outputs, inputs)
    d_vectors = vector_gradients(adjoint, delta)
    d_A = delta[..., : cell.entry_width] if adjoint.width > cell.entry_width else delta
    rest = len(cell.masks) + int(attributes.has_reset)
    return [d_A, *d_states, *d_matrices, *d_vectors, *(None for _ in range(rest))]


@lru_cache(maxsize=64)
def _matrix_gradients_of(backend: Backend) -> MatrixGradients:
    """A backend's own way, where it has one."""
    return backend.matrix_gradients if isinstance(backend, BackendWithMatrixGradients) else matrix_gradients


class UnrollBackward(torch.autograd.Function):
    """A backward pass; by plain operations where what the forward pass saved has gradients (`saved_has_grad`)."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        backend, text, precision, has_reset, saved_has_grad, *_ = arguments
        cell = from_text(text)
        gradients, stored, tensors = _split(arguments[5], arguments[6:])
        if saved_has_grad:
            return tuple(flat(_plain_backward(cell, saved_has_grad, gradients, stored, tensors)))
        of_outputs = list(gradients[: len(cell.outputs)])
        rest = (backend, text, precision, of_outputs, list(stored), list(tensors), has_reset)
        compute = run_backward if plain_tensors(*gradients, *stored, *tensors) else backward_op
        return tuple(compute(*rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.text, ctx.saved_has_grad, ctx.count = inputs[1], inputs[4], inputs[5]
        ctx.save_for_backward(*inputs[6:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        def compute(saved: Sequence[Any]) -> Sequence[Tensor]:
            return flat(_plain_backward(from_text(ctx.text), ctx.saved_has_grad, *_split(ctx.count, saved)))

        needed = ctx.needs_input_grad[6:]
        of_tensors = gradients_by_autograd(compute, ctx.saved_tensors, grad_outputs, needed)
        return (*(None for _ in range(6)), *of_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        tensors = _move_batch_dim_first(info, arguments[6:], in_dims[6:], arguments[3])
        outputs = UnrollBackward.apply(*arguments[:6], *tensors)
        return outputs, (0,) * len(outputs)


def gradients_by_autograd(
    compute: Callable[[Sequence[Any]], Sequence[Tensor]],
    tensors: Sequence[Any],
    gradients: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of tensors, from those of what `compute` makes of them, as autograd and vmap can follow them.

    It is what every backward pass of ours does when it is differentiated itself.
    """
    places = [i for i, wants in enumerate(needed) if wants]
    grad_outputs = [g for g in gradients if g is not None]

    def outputs(*wanted: Tensor) -> list[Tensor]:
        arguments = list(tensors)
        for i, x in zip(places, wanted, strict=True):
            arguments[i] = x
        return [y for y, g in zip(compute(arguments), gradients, strict=True) if g is not None]

    wanted = [tensors[i] for i in places]
    if inside_function_transform():  # where no tensor may be made a leaf
        by_place = dict(zip(places, torch.func.vjp(outputs, *wanted)[1](grad_outputs), strict=True))
    else:
        by_place = dict(zip(places, _through_graph(outputs, wanted, grad_outputs), strict=True))
    return [by_place.get(i) for i in range(len(needed))]


def _through_graph(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of a function's inputs, None for those that it does not depend on.

    It runs on views: one input may depend on another outside, and that path is not ours.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [_view(x) for x in inputs]
        pairs = [(y, g) for y, g in zip(function(*views), grad_outputs, strict=True) if y.requires_grad]
        if not pairs:
            return [None] * len(views)
        outputs, grad_outputs = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, views, grad_outputs, create_graph=create_graph, allow_unused=True)


def _view(x: Tensor) -> Tensor:
    """A view that has a gradient, also of what came out of a transformation of torch.func that has ended."""
    view = x.view_as(x)
    return view if view.requires_grad else view.detach().requires_grad_()


def _split(count: int, tensors: Sequence[Any]) -> tuple[list, list, list]:
    """Gradients, as many stored tensors, and the inputs."""
    return list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])


def _plain_backward(
    cell: CellDescription,
    saved_has_grad: bool,
    gradients: Sequence[Any],
    stored: Sequence[Tensor],
    tensors: Sequence[Tensor],
) -> Gradients:
    """The backward pass by plain operations."""
    inputs = Inputs.of(cell, tensors, has_A=False)
    if not saved_has_grad:
        return plain.backward(cell, gradients[: len(cell.outputs)], stored, inputs)
    order = _places_by_stage(cell)
    described = with_saved_as_outputs(cell)
    return plain.backward(described, [gradients[i] for i in order], [stored[i] for i in order], inputs)


def _places_by_stage(cell: CellDescription) -> list[int]:
    """Where the outputs of `with_saved_as_outputs` stand among what a forward pass stores."""
    outputs, saved = list(map(tuple, cell.outputs)), list(adjoint_of(cell).saved)
    places = []
    for s, stage in enumerate(cell.stages):
        places += [outputs.index((s, k)) for k in range(len(stage.outputs))]
        places += [len(outputs) + i for i, (at, _) in enumerate(saved) if at == s]
    return places


# ---- vmap: the mapped dimension becomes the leading population dimension of every tensor


def _move_batch_dim_first(
    info: Any, tensors: Sequence[Any], dims: Sequence[Any], has_reset: bool
) -> list[Any]:
    """Tensors with the mapped dimension first; what is not mapped is repeated, reset marks may be shared."""
    last = len(tensors) - 1
    return [
        x
        if x is None or (has_reset and i == last and dim is None)
        else x.expand(info.batch_size, *x.shape)
        if dim is None
        else x.movedim(dim, 0)
        for i, (x, dim) in enumerate(zip(tensors, dims, strict=True))
    ]


# ---- the same rules for the operator, which torch.compile sees


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    backend, text, precision, tensors, has_reset, keep = inputs
    _save(ctx, UnrollAttributes(backend, text, precision, has_reset, keep), tensors, output)


def _op_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    return None, None, None, _gradients(ctx, gradients, ctx.needs_input_grad[3]), None, None


def _op_vmap(info: Any, in_dims: Any, backend, text, precision, tensors, has_reset, keep) -> Any:
    moved = _move_batch_dim_first(info, tensors, in_dims[3], has_reset)
    outputs = unroll_op(backend, text, precision, moved, has_reset, keep)
    return outputs, [0] * len(outputs)


torch.library.register_autograd("deeprnn::unroll", _op_backward, setup_context=_op_setup)
torch.library.register_vmap("deeprnn::unroll", _op_vmap)
