"""The parameter block of a launch: `Params` of params.cuh, a table of words that is filled with addresses and strides.

Where each field lies follows from the code alone, and is found once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from deeprnn.backends.cuda.epilogue import Code
from deeprnn.backends.protocol import Inputs
from deeprnn.cells.adjoint import adjoint


@dataclass
class Arguments:
    """The tensors of a launch; None where the direction has none."""

    inputs: Inputs
    stored: Sequence[Tensor]
    initial_vectors: Sequence[Tensor | None] = ()
    gradients: Sequence[Tensor | None] = ()
    delta: Tensor | None = None
    initial_sums: Sequence[Tensor | None] = ()
    initial_locals: Sequence[Tensor | None] = ()
    locals: Sequence[Tensor | None] = ()
    """where the tensor-core kernel keeps local values; the others have them in registers"""
    after: Tensor | None = None
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


class Places(NamedTuple):
    """Where each field begins, in words of eight bytes, in the order of `Params`."""

    pieces: tuple[PiecePlace, ...]
    entry: int
    stored: int
    gradient: int
    delta: int
    initial: int
    initial_vector: int
    initial_sum: int
    initial_local: int
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
    after: int
    scanned: int
    block: type[ctypes.Array]


@lru_cache(maxsize=1024)
def places(own: Code) -> Places:
    """Those of a kernel's code."""
    schedule, cell = own.schedule, own.schedule.cell
    depth, states, slots = len(schedule.stages), len(cell.states), max(1, len(own.slots))
    outputs, saved = len(cell.outputs), len(adjoint(cell).saved)
    vectors, masks = max(1, len(cell.vectors)), max(1, len(cell.masks))
    most = max(len(matrix.pieces) for matrix in schedule.matrices)
    pieces = tuple(
        PiecePlace(4 * (j * most + k), p.matrix, p.rows.start, p.rows.step, p.column)
        for j, matrix in enumerate(schedule.matrices)
        for k, p in enumerate(matrix.pieces)
        if p is not None
    )
    counts = [1, outputs + saved, outputs, 1, states, depth, depth, slots, vectors, masks, 1]
    counts += [
        1,
        states,
        depth,
        vectors,
        masks,
        masks,
        1,
    ]  # strides from member to member, and of masks
    counts += [3, 3, slots, 1, 2]
    starts = [4 * most * len(schedule.matrices)]
    for count in counts:
        starts.append(starts[-1] + count)
    return Places(pieces, *starts[:-1], block=ctypes.c_int64 * starts[-1])


def parameter_block(
    own: Code, arguments: Arguments, like: Tensor, groups: int = 1, exchange: Sequence[int] = (0, 0, 0)
) -> ctypes.Array:
    """The filled block. `like` is ([P,] T, B, any)."""
    at, inputs = places(own), arguments.inputs
    block = at.block()
    _fill_matrices(block, at, inputs.matrices, own.schedule.backward)
    if inputs.A is not None:
        block[at.entry] = inputs.A.data_ptr()
    if arguments.delta is not None:
        block[at.delta] = arguments.delta.data_ptr()
    if inputs.reset is not None:
        block[at.reset] = inputs.reset.data_ptr()
    if arguments.after is not None:
        block[at.after] = arguments.after.data_ptr()
    for start, tensors in (
        (at.stored, arguments.stored),
        (at.gradient, arguments.gradients),
        (at.initial, inputs.states),
        (at.initial_vector, arguments.initial_vectors),
        (at.initial_sum, arguments.initial_sums),
        (at.initial_local, arguments.initial_locals),
        (at.vector, inputs.vectors),
        (at.mask, inputs.masks),
        (at.local, arguments.locals),
    ):
        for place, x in enumerate(tensors, start):
            if x is not None:
                block[place] = x.data_ptr()
    _, steps, batch, _ = (1, *like.shape)[-4:]
    block[at.steps : at.steps + 3] = steps, batch, groups
    block[at.exchange : at.exchange + 3] = exchange
    block[at.scanned : at.scanned + 2] = arguments.scanned
    members = inputs.members is not None
    for place, x in enumerate(inputs.masks, at.mask_step):
        block[place] = x.stride(-3) if x.dim() == 3 + members else 0
    if members:
        _fill_member_strides(block, at, arguments)
    return block


def _fill_matrices(block: ctypes.Array, at: Places, matrices: Sequence[Tensor], backward: bool) -> None:
    """Each piece of each matrix: address, strides of member, output unit and inner unit."""
    for place, matrix, first_row, row_step, first_column in at.pieces:
        tensor = matrices[matrix]
        *member, row, column = tensor.stride()
        start = tensor.data_ptr() + 4 * (first_row * row + first_column * column)
        own, inner = (column, row * row_step) if backward else (row * row_step, column)
        block[place : place + 4] = start, member[0] if member else 0, own, inner


def _fill_member_strides(block: ctypes.Array, at: Places, arguments: Arguments) -> None:
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
