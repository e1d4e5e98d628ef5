"""The way in: tensors checked, types settled, a backend chosen, and the cell unrolled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deeprnn.backends import autograd, layer_autograd, plain, scan
from deeprnn.backends.call import Case, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.choose import fastest_backend, why_not
from deeprnn.backends.protocol import ProjectingBackend
from deeprnn.backends.registry import EXPORTABLE, REFERENCE, load_backend
from deeprnn.backends.transformations import plain_tensors, required_by_transformation
from deeprnn.cells.description import CellDescription, from_text
from deeprnn.errors import UserError

MOST_CASES = 4096
_projection_cases: dict[tuple, tuple[ProjectingBackend, ProjectionCase] | None] = {}


def unroll(
    cell: CellDescription | str, inputs: Inputs, backend: str = "auto", precision: str = "auto"
) -> list[Tensor]:
    """Every output of every step, (T, B, n) each, in the order of `cell.outputs`; a compiler sees the cell as text.

    Under autocast the products may run in bf16 where the backend can, but states keep their type.
    """
    assert inputs.A is not None
    if isinstance(cell, CellDescription):
        check(cell, inputs, inputs.A.shape, inputs.A.device)
    return _unroll_checked(cell, inputs, backend, precision)


def _unroll_checked(
    cell: CellDescription | str, inputs: Inputs, backend: str, precision: str = "auto"
) -> list[Tensor]:
    assert inputs.A is not None
    device = inputs.A.device
    dtype = (inputs.matrices or inputs.states)[0].dtype
    if precision == "auto":
        autocast = autocasts(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16
        precision = "bf16" if autocast and device.type == "cuda" else "fp32"
    with without_autocast(device.type):
        inputs = inputs._replace(
            A=inputs.A.to(dtype),
            states=[x.to(dtype) for x in inputs.states],
            vectors=[x.to(dtype) for x in inputs.vectors],
        )
        text = cell if isinstance(cell, str) else cell.text
        name = resolve_backend(text, device, dtype, precision, backend)
        if name == EXPORTABLE:
            return scan.forward(text, inputs)
        if name == REFERENCE and not torch.compiler.is_compiling():  # which would unroll its loop
            return plain.forward(from_text(text), inputs)
        return autograd.unroll(name, text, precision, inputs)


def project_and_unroll(
    cell: CellDescription | str, projection: InputProjection, inputs: Inputs, backend: str = "auto"
) -> list[Tensor]:
    """`unroll` of an input that enters through matrices, its product in one with the loop where a backend can."""
    if isinstance(cell, CellDescription) and not autocasts(projection.x.device.type):
        tensors = [*projection.tensors, *inputs.tensors]
        if plain_tensors(*tensors) and required_by_transformation() is None:
            served = _projection_case(cell, projection, inputs, backend, tensors)
            if served is not None:
                return list(layer_autograd.project_and_unroll(*served, projection, inputs))
            return _unroll_checked(cell, inputs._replace(A=projection.A), backend)
    return unroll(cell, inputs._replace(A=projection.A), backend)


def _projection_case(
    cell: CellDescription, projection: InputProjection, inputs: Inputs, backend: str, tensors: list[Tensor]
) -> tuple[ProjectingBackend, ProjectionCase] | None:
    """Which backend takes the input's product in one with the loop, and the call's case; None: product and loop apart.

    Decided once for all calls whose tensors have these types and shapes: deciding costs the host more than a launch.
    """
    counts = len(projection.U), len(projection.b), inputs.reset is None
    key = (cell, backend, counts, *[(t.shape, t.dtype, t.device) for t in tensors])
    if key in _projection_cases:
        return _projection_cases[key]
    x = projection.x
    check(cell, inputs, torch.Size((*x.shape[:-1], cell.entry_width)), x.device)
    chosen = load_backend(resolve_backend(cell.text, x.device, x.dtype, "fp32", backend))
    case = Case(cell, x.device, x.dtype)
    serving = None
    if isinstance(chosen, ProjectingBackend) and chosen.serves_projection(case, projection, inputs):
        serving = chosen, ProjectionCase.of(case, projection, inputs)
    if len(_projection_cases) >= MOST_CASES:  # sequences of ever new lengths
        _projection_cases.clear()
    _projection_cases[key] = serving
    return serving


def resolve_backend(text: str, device: torch.device, dtype: torch.dtype, precision: str, backend: str) -> str:
    """The backend that was asked for, or the one that serves best."""
    if backend == "auto":
        return required_by_transformation() or fastest_backend(text, str(device), dtype, precision)
    if (reason := why_not(backend, text, str(device), dtype, precision)) is not None:
        raise UserError(f"backend {backend!r} cannot serve this case: {reason}")
    return backend


def autocasts(device: str) -> bool:
    """Whether autocast is on for a device; the meta device, which only knows shapes, has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager:
    """Inside, products run in the types they are given: states keep their own."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def check(cell: CellDescription, inputs: Inputs, shape: torch.Size, device: torch.device) -> None:
    """Refuse what does not fit together: a kernel reads where it is told, even beyond a tensor's end.

    `shape` is A's, (T, B, entry width), and `device` the input's.
    """
    *_, steps, batch, width = shape
    for x in inputs.tensors:
        if x.device != device:
            raise UserError(
                f"all tensors must be on one device: one of shape {tuple(x.shape)} is on {x.device}, the input on "
                f"{device}; move it with .to({str(device)!r})"
            )
    if width != cell.entry_width:
        raise UserError(f"A is {width} wide, but the cell's layers are {cell.entry_width} wide together")
    shapes = [tuple(x.shape[-2:]) for x in inputs.matrices]
    if shapes != list(cell.matrices):
        wanted, got = (", ".join(map(str, s)) for s in (cell.matrices, shapes))
        raise UserError(f"the cell's matrices must be {wanted}, got {got}")
    for x, n in zip(inputs.states, cell.states, strict=True):
        if tuple(x.shape[-2:]) != (batch, n):
            raise UserError(f"the first state must be (B, H) = {(batch, n)}, got {tuple(x.shape)}")
    for x, n in zip(inputs.vectors, cell.vectors, strict=True):
        if x.shape[-1:] != (n,):
            raise UserError(f"a vector of the cell must have {n} numbers, got {tuple(x.shape)}")
    for x, n in zip(inputs.masks, cell.masks, strict=True):
        if tuple(x.shape[-3:]) not in ((steps, batch, n), (batch, n)):
            raise UserError(f"a mask must be {(batch, n)} or {(steps, batch, n)}, got {tuple(x.shape)}")
    reset = inputs.reset
    if reset is not None and (reset.dtype != torch.bool or tuple(reset.shape[-2:]) != (steps, batch)):
        raise UserError(
            f"reset must be bool marks of shape (T, B) = {(steps, batch)}, got {reset.dtype} of shape "
            f"{tuple(reset.shape)}"
        )
