"""Backends under autograd, vmap, torch.compile and fake tensors: once, for all of them.

Eagerly a call is the autograd function `Unroll`; while compiling it is the operator `deeprnn::unroll`. Both share one
rule for what is saved, one backward pass and one way to map over a population. Gradients of the backward pass itself
follow `plain.backward`, a differentiable function of what the forward pass stored, so derivatives of every order are
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.gradients import matrix_gradients, vector_gradients
from deeprnn.backends.protocol import (
    Case,
    Gradients,
    InputProjection,
    Inputs,
    ProjectingBackend,
    ProjectionCase,
)
from deeprnn.backends.registry import load
from deeprnn.backends.transformations import (
    batched_by_autograd,
    constant_when_compiled,
    inside_function_transform,
    plain_tensors,
)
from deeprnn.cells.adjoint import adjoint, with_saved_as_outputs
from deeprnn.cells.description import CellDescription, from_text


class Call(NamedTuple):
    """What of a call is no tensor, as plain values: the form in which torch's operators take it."""

    backend: str
    text: str  # of the cell
    precision: str
    has_reset: bool
    keep: bool  # what a backward pass needs is wanted

    @property
    def cell(self) -> CellDescription:
        """The cell."""
        return from_text(self.text)


def unroll(backend: str, text: str, precision: str, inputs: Inputs) -> list[Tensor]:
    """Every output of every step by a backend, as an operation that torch's transformations can follow."""
    keep = torch.is_grad_enabled()
    call = Call(backend, text, precision, inputs.reset is not None, keep)
    if torch.compiler.is_compiling():
        stored = unroll_op(*call[:3], inputs.tensors, *call[3:])
    elif inside_function_transform():
        stored = _handed_out(call.cell, Unroll.apply(*call, *inputs.tensors))
    elif keep:
        stored = _handed_out(call.cell, UntransformedUnroll.apply(*call, *inputs.tensors))
    else:
        stored = _forward(call, inputs.tensors)
    return list(stored[: output_count(text)])


def _handed_out(cell: CellDescription, stored: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first state's sequence, which layers hand to the user, as a copy on the CPU.

    The backward pass reads the original, so `F.dropout(output, inplace=True)` works as it does after `nn.RNN`. The
    copy costs about 1 % of a call (H = 400, 1 to 64 rows), more where its memory is fresh; what stays inside a layer
    is not copied.
    """
    place = cell.outputs.index(cell.new_states[0])
    if stored[place].device.type != "cpu" or not stored[place].requires_grad:
        return stored
    return [x.clone() if i == place else x for i, x in enumerate(stored)]


@constant_when_compiled
def output_count(text: str) -> int:
    """How many outputs a cell has."""
    return len(from_text(text).outputs)


# ---- the operators; defined by schema: torch.library.custom_op would import the compiler, a second, at the first call

torch.library.define(
    "deeprnn::unroll",
    "(str backend, str cell, str precision, Tensor[] inputs, bool has_reset, bool keep) -> Tensor[]",
)
torch.library.define(
    "deeprnn::unroll_backward",
    "(str backend, str cell, str precision, Tensor?[] gradients, Tensor[] stored, Tensor[] inputs, bool has_reset) "
    "-> Tensor[]",
)
unroll_op = torch.ops.deeprnn.unroll.default
backward_op = torch.ops.deeprnn.unroll_backward.default


@lru_cache(maxsize=4096)
def _case(text: str, device: torch.device, dtype: torch.dtype, precision: str) -> Case:
    return Case(from_text(text), device, dtype, precision)


def _run(
    backend: str, text: str, precision: str, tensors: Sequence[Tensor], has_reset: bool, keep: bool
) -> list[Tensor]:
    inputs = Inputs.of(from_text(text), tensors)
    case = _case(text, tensors[0].device, tensors[0].dtype, precision)
    return load(backend).forward(case, inputs, keep)


def _run_backward(
    backend: str,
    text: str,
    precision: str,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    tensors: Sequence[Tensor],
    has_reset: bool,
) -> list[Tensor]:
    inputs = Inputs.of(from_text(text), tensors, has_A=False)
    case = _case(text, stored[0].device, stored[0].dtype, precision)
    found = load(backend).backward(case, gradients, stored, inputs)
    return [found.delta, *found.states]


for _device in ("cpu", "cuda"):
    torch.library.impl("deeprnn::unroll", _device, _run)
    torch.library.impl("deeprnn::unroll_backward", _device, _run_backward)


@torch.library.register_fake("deeprnn::unroll")
def _(backend, cell, precision, inputs, has_reset, keep):
    lead = inputs[0].shape[:-1]
    return [inputs[0].new_empty(*lead, n) for n in plain.stored_sizes(from_text(cell), keep)]


@torch.library.register_fake("deeprnn::unroll_backward")
def _(backend, cell, precision, gradients, stored, inputs, has_reset):
    described = from_text(cell)
    delta = stored[0].new_empty(*stored[0].shape[:-1], adjoint(described).width)
    return [delta, *(x.new_empty(x.shape) for x in inputs[: len(described.states)])]


def _forward(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    arguments = (*call[:3], list(tensors), *call[3:])
    return _run(*arguments) if plain_tensors(*tensors) else unroll_op(*arguments)


# ---- autograd


class Unroll(torch.autograd.Function):
    """A forward pass."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(_forward(Call(*arguments[:5]), arguments[5:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        _save(ctx, Call(*inputs[:5]), inputs[5:], output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (*(None for _ in Call._fields), *_gradients(ctx, gradients, ctx.needs_input_grad[5:]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        call = Call(*arguments[:5])
        tensors = _population(info, arguments[5:], in_dims[5:], call.has_reset)
        outputs = Unroll.apply(*call, *tensors)
        return outputs, (0,) * len(outputs)


class UntransformedUnroll(torch.autograd.Function):
    """`Unroll` outside of torch.func, where torch inspects the signature of what has a `setup_context` at each call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        call, tensors = Call(*arguments[:5]), arguments[5:]
        output = tuple(_forward(call, tensors))
        _save(ctx, call, tensors, output)
        return output

    backward = Unroll.backward


def _save(ctx: Any, call: Call, tensors: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.call, ctx.count = call, len(output)
    ctx.save_for_backward(*output, *tensors[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of all inputs, in their order."""
    call: Call = ctx.call
    cell, saved = call.cell, ctx.saved_tensors
    stored, tensors = saved[: ctx.count], saved[ctx.count :]
    inputs = Inputs.of(cell, tensors, has_A=False)
    kept = any(g is not None for g in gradients[len(cell.outputs) :])
    if batched_by_autograd(*gradients):
        flat = _flat(_plainly(cell, kept, gradients, stored, tensors))
    elif not torch.is_grad_enabled() and not inside_function_transform():
        flat = UnrollBackward.forward(*call[:4], kept, len(gradients), *gradients, *stored, *tensors)
    else:
        flat = UnrollBackward.apply(*call[:4], kept, len(gradients), *gradients, *stored, *tensors)
    described = with_saved_as_outputs(cell) if kept else cell
    own, found = adjoint(described), Gradients(flat[0], list(flat[1:]))
    after = 1 + len(cell.states)
    matrices = needed[after : after + len(cell.matrices)]
    d_matrices: Sequence[Tensor | None] = [None] * len(matrices)
    if any(matrices):
        outputs = [stored[i] for i in _order(cell)] if kept else stored
        plainly = torch.is_grad_enabled() or not plain_tensors(found.delta, *outputs, *tensors)
        compute = (
            matrix_gradients if plainly else getattr(load(call.backend), "matrix_gradients", matrix_gradients)
        )
        d_matrices = compute(own, found.delta, outputs, inputs)
    d_vectors = vector_gradients(own, found.delta)
    d_A = found.delta[..., : cell.entry_width] if own.width > cell.entry_width else found.delta
    rest = len(cell.masks) + int(call.has_reset)
    return [d_A, *found.states, *d_matrices, *d_vectors, *(None for _ in range(rest))]


class UnrollBackward(torch.autograd.Function):
    """A backward pass; where what the forward pass saved has gradients itself (`kept`), by plain operations."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        backend, text, precision, has_reset, kept, *_ = arguments
        gradients, stored, tensors = _apart(from_text(text), arguments[5], arguments[6:])
        if kept:
            return _flat(_plainly(from_text(text), kept, gradients, stored, tensors))
        count = len(from_text(text).outputs)
        rest = (backend, text, precision, list(gradients[:count]), list(stored), list(tensors), has_reset)
        run = _run_backward if plain_tensors(*gradients, *stored, *tensors) else backward_op
        return tuple(run(*rest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.text, ctx.kept, ctx.count = inputs[1], inputs[4], inputs[5]
        ctx.save_for_backward(*inputs[6:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> Any:
        """By letting autograd follow the plain formulas."""
        cell, saved, again = from_text(ctx.text), ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            # Views: one input may depend on another outside, and that path is not ours.
            own = [x if x is None or not x.is_floating_point() else own_view(x) for x in saved]
            results = _flat(_plainly(cell, ctx.kept, *_apart(cell, ctx.count, own)))
            wanted = [x for x in own if x is not None and x.is_floating_point()]
            pairs = [(y, g) for y, g in zip(results, outer, strict=True) if g is not None]
            found = torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=again,
                allow_unused=True,
            )
        by_tensor = iter(found)
        grads = [next(by_tensor) if x is not None and x.is_floating_point() else None for x in own]
        return (*(None for _ in range(6)), *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        tensors = _population(info, arguments[6:], in_dims[6:], arguments[3])
        outputs = UnrollBackward.apply(*arguments[:6], *tensors)
        return outputs, (0,) * len(outputs)


def own_view(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _apart(cell: CellDescription, count: int, flat: Sequence[Any]) -> tuple[list, list, list]:
    """Gradients, what was stored, and the inputs."""
    stored = 2 * count
    return list(flat[:count]), list(flat[count:stored]), list(flat[stored:])


def _flat(found: Gradients) -> tuple[Tensor, ...]:
    return (found.delta, *found.states)


def _plainly(
    cell: CellDescription,
    kept: bool,
    gradients: Sequence[Any],
    stored: Sequence[Tensor],
    tensors: Sequence[Tensor],
) -> Gradients:
    """The backward pass by plain operations."""
    inputs = Inputs.of(cell, tensors, has_A=False)
    if not kept:
        return plain.backward(cell, gradients[: len(cell.outputs)], stored, inputs)
    order = _order(cell)
    described = with_saved_as_outputs(cell)
    return plain.backward(described, [gradients[i] for i in order], [stored[i] for i in order], inputs)


def _order(cell: CellDescription) -> list[int]:
    """Where the outputs of `with_saved_as_outputs` stand among what a forward pass stores."""
    outputs, saved = list(map(tuple, cell.outputs)), list(adjoint(cell).saved)
    places = []
    for s, stage in enumerate(cell.stages):
        places += [outputs.index((s, k)) for k in range(len(stage.outputs))]
        places += [len(outputs) + i for i, (at, _) in enumerate(saved) if at == s]
    return places


# ---- the input's product in one with the loop


def project_and_unroll(
    backend: ProjectingBackend, projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs
) -> Sequence[Tensor]:
    """`unroll` of an input that enters through matrices, by a backend that takes both together; plain tensors alone."""
    if torch.is_grad_enabled():
        return ProjectAndUnroll.apply(backend, projection_case, *projection.tensors, *inputs.tensors)
    return backend.forward_with_projection(projection_case, projection, inputs, False)


class ProjectAndUnroll(torch.autograd.Function):
    """The input's product and the loop: autograd sees one operation instead of many, which is time of the host's."""

    @staticmethod
    def forward(
        ctx: Any, backend: ProjectingBackend, projection_case: ProjectionCase, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        stored = backend.forward_with_projection(projection_case, *projection_case.split(tensors), True)
        ctx.backend, ctx.projection_case, ctx.count = backend, projection_case, len(stored)
        ctx.save_for_backward(*stored, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(stored[: len(projection_case.case.cell.outputs)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        projection_case: ProjectionCase = ctx.projection_case
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        stored, tensors = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled() or not plain_tensors(*gradients):
            return (None, None, *_projection_again(ctx, tensors, gradients, needs))
        found = ctx.backend.backward_with_projection(
            projection_case, gradients, stored, *projection_case.split(tensors), needs
        )
        return (None, None, *found, *[None] * (len(tensors) - len(found)))


def _projection_again(
    ctx: Any, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The same gradients by operations that a second derivative and vmap can follow."""
    again, case = torch.is_grad_enabled(), ctx.projection_case.case
    with torch.enable_grad():
        own = [own_view(x) if x.is_floating_point() else x for x in tensors]
        projection, inputs = ctx.projection_case.split(own)
        call = Call(ctx.backend.name, case.cell.text, case.precision, ctx.projection_case.marked, True)
        outputs = Unroll.apply(*call, *inputs._replace(A=projection.A).tensors)[: len(gradients)]
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
        wanted = [x for x, needed in zip(own, needs, strict=True) if needed]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
            )
        )
    return [next(found) if needed else None for needed in needs]


# ---- vmap: the mapped dimension becomes the leading population dimension of every tensor


def _population(info: Any, tensors: Sequence[Any], dims: Sequence[Any], has_reset: bool) -> list[Any]:
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
    _save(ctx, Call(backend, text, precision, has_reset, keep), tensors, output)


def _op_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    return None, None, None, _gradients(ctx, gradients, ctx.needs_input_grad[3]), None, None


def _op_vmap(info: Any, in_dims: Any, backend, text, precision, tensors, has_reset, keep) -> Any:
    moved = _population(info, tensors, in_dims[3], has_reset)
    outputs = unroll_op(backend, text, precision, moved, has_reset, keep)
    return outputs, [0] * len(outputs)


torch.library.register_autograd("deeprnn::unroll", _op_backward, setup_context=_op_setup)
torch.library.register_vmap("deeprnn::unroll", _op_vmap)
