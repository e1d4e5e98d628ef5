"""The parameter block of a launch: `Params` of params.cuh, a table of words that is filled with addresses and strides.

Where each field lies follows from the code alone, and is found once. The kernels' own compiler checks it, field by
field, by `headers`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from deeprnn.backends.call import Inputs
from deeprnn.backends.cuda.cell_header import header
from deeprnn.backends.cuda.epilogue import Epilogue
from deeprnn.cells.adjoint import adjoint_of


@dataclass
class Arguments:
    """The tensors of a launch; None where the direction has none."""

    inputs: Inputs
    stored: Sequence[Tensor]
    initial_vectors: Sequence[Tensor | None] = ()
    gradients: Sequence[Tensor | None] = ()
    delta: Tensor | None = None
    grad_initial_vectors: Sequence[Tensor | None] = ()
    grad_initial_locals: Sequence[Tensor | None] = ()
    locals: Sequence[Tensor | None] = ()
    """where the tensor-core kernel and `stepwise` keep local values; the others have them in registers"""
    next_delta: Tensor | None = None
    scanned: Sequence[int] = (0, 0)
    """addresses of what a scan for the largest magnitudes found"""
    scratch: list[Tensor] = field(default_factory=list)
    """memory that the kernel needs while it runs"""


class PiecePlace(NamedTuple):
    """Where a piece of a matrix stands in the block, and what of the matrix it is."""

    place: int
    matrix: int
    first_row: int
    row_step: int
    first_column: int


class FieldOffsets(NamedTuple):
    """Where each field of `Params` begins, in words of eight bytes."""

    pieces: tuple[PiecePlace, ...]
    entry: int
    stored: int
    gradient: int
    delta: int
    initial: int
    initial_vector: int
    grad_initial_vector: int
    grad_initial_local: int
    vector: int
    mask: int
    reset: int
    entry_member: int
    initial_member: int
    initial_vector_member: int
    vector_member: int
    mask_member: int
    mask_step: int
    reset_member: int
    steps: int
    exchange: int
    local: int
    next_delta: int
    most_weights: int
    block: type[ctypes.Array]


@lru_cache(maxsize=1024)
def field_offsets(epilogue: Epilogue) -> FieldOffsets:
    """Those of a kernel's code."""
    schedule, cell = epilogue.schedule, epilogue.schedule.cell
    depth, states, slots = len(schedule.stages), len(cell.states), max(1, len(epilogue.slots))
    outputs, vectors, masks = len(cell.outputs), max(1, len(cell.vectors)), max(1, len(cell.masks))
    most = max(len(matrix.pieces) for matrix in schedule.matrices)
    pieces = tuple(
        PiecePlace(4 * (j * most + k), p.matrix, p.rows.start, p.rows.step, p.column)
        for j, matrix in enumerate(schedule.matrices)
        for k, p in enumerate(matrix.pieces)
        if p is not None
    )
    counts = {  # in the order of `Params`; a name stands for itself and for what follows it there without a name here
        "entry": 1, "stored": outputs + len(adjoint_of(cell).saved), "gradient": outputs, "delta": 1, "initial": states,
        "initial_vector": depth, "grad_initial_vector": depth, "grad_initial_local": slots, "vector": vectors,
        "mask": masks, "reset": 1, "entry_member": 1, "initial_member": states, "initial_vector_member": depth,
        "vector_member": vectors, "mask_member": masks, "mask_step": masks, "reset_member": 1,
        "steps": 3, "exchange": 3, "local": slots, "next_delta": 1, "most_weights": 2,
    }  # fmt: skip
    *starts, end = accumulate(counts.values(), initial=4 * most * len(schedule.matrices))
    return FieldOffsets(pieces, **dict(zip(counts, starts, strict=True)), block=ctypes.c_int64 * end)


def headers(epilogue: Epilogue) -> dict[str, str]:
    """What a kernel includes that is made for its code: `cell.cuh`."""
    return {"cell.cuh": header(epilogue) + _offset_checks(epilogue)}


def _offset_checks(epilogue: Epilogue) -> str:
    """Assertions for the kernel's compiler that `Params` lies in memory as it is filled here."""
    offsets = field_offsets(epilogue)
    lines = [
        f"static_assert(__builtin_offsetof(Params, {name}) == {8 * at});"
        for name, at in offsets._asdict().items()
        if isinstance(at, int)
    ]
    return "\n".join([*lines, f"static_assert(sizeof(Params) == {ctypes.sizeof(offsets.block)});"]) + "\n"


def parameter_block(
    epilogue: Epilogue,
    arguments: Arguments,
    like: Tensor,
    row_blocks: int = 1,
    exchange: Sequence[int] = (0, 0, 0),
) -> ctypes.Array:
    """The filled block. `like` is ([P,] T, B, any)."""
    at, inputs = field_offsets(epilogue), arguments.inputs
    block = at.block()
    _fill_matrices(block, at, inputs.matrices, epilogue.schedule.backward)
    if inputs.A is not None:
        block[at.entry] = inputs.A.data_ptr()
    if arguments.delta is not None:
        block[at.delta] = arguments.delta.data_ptr()
    if inputs.reset is not None:
        block[at.reset] = inputs.reset.data_ptr()
    if arguments.next_delta is not None:
        block[at.next_delta] = arguments.next_delta.data_ptr()
    for start, tensors in (
        (at.stored, arguments.stored),
        (at.gradient, arguments.gradients),
        (at.initial, inputs.states),
        (at.initial_vector, arguments.initial_vectors),
        (at.grad_initial_vector, arguments.grad_initial_vectors),
        (at.grad_initial_local, arguments.grad_initial_locals),
        (at.vector, inputs.vectors),
        (at.mask, inputs.masks),
        (at.local, arguments.locals),
    ):
        for place, x in enumerate(tensors, start):
            if x is not None:
                block[place] = x.data_ptr()
    _, steps, batch, _ = (1, *like.shape)[-4:]
    block[at.steps : at.steps + 3] = steps, batch, row_blocks
    block[at.exchange : at.exchange + 3] = exchange
    block[at.most_weights : at.most_weights + 2] = arguments.scanned
    members = inputs.members is not None
    for place, x in enumerate(inputs.masks, at.mask_step):
        block[place] = x.stride(-3) if x.dim() == 3 + members else 0
    if members:
        _fill_member_strides(block, at, arguments)
    return block


def _fill_matrices(block: ctypes.Array, at: FieldOffsets, matrices: Sequence[Tensor], backward: bool) -> None:
    """Each piece of each matrix: address, strides of member, output unit and inner unit."""
    for place, matrix, first_row, row_step, first_column in at.pieces:
        tensor = matrices[matrix]
        *member, row, column = tensor.stride()
        start = tensor.data_ptr() + 4 * (first_row * row + first_column * column)
        unit, inner = (column, row * row_step) if backward else (row * row_step, column)
        block[place : place + 4] = start, member[0] if member else 0, unit, inner


def _fill_member_strides(block: ctypes.Array, at: FieldOffsets, arguments: Arguments) -> None:
    """From one member of a population to the next."""
    inputs = arguments.inputs
    for start, tensors in (
        (at.entry_member, (inputs.A,)),
        (at.initial_member, inputs.states),
        (at.initial_vector_member, arguments.initial_vectors),
        (at.vector_member, inputs.vectors),
        (at.mask_member, inputs.masks),
    ):
        for place, x in enumerate(tensors, start):
            block[place] = 0 if x is None else x.stride(0)
    if inputs.reset is not None and inputs.reset.dim() == 3:
        block[at.reset_member] = inputs.reset.stride(0)
