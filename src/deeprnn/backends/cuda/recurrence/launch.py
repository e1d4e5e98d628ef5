"""From tensors to a kernel launch: fill the parameter block, find or compile the kernel, launch it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import Device, device_of
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.epilogue import Code, Options, code, header
from deeprnn.backends.cuda.recurrence.planning import make_plan
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, listed
from deeprnn.backends.cuda.recurrence.schedule import Schedule, lower, schedule
from deeprnn.backends.protocol import Inputs
from deeprnn.cells.adjoint import adjoint
from deeprnn.cells.description import CellDescription
from deeprnn.cells.expressions import leaves_of

logger = logging.getLogger("deeprnn")


class Prepared(NamedTuple):
    """Everything about a launch that does not depend on where the tensors lie."""

    plan: KernelPlan
    code: Code
    kernel: Kernel

    @property
    def schedule(self) -> Schedule:
        """The stages in the kernel's order."""
        return self.code.schedule


@lru_cache(maxsize=4096)
def prepare(
    cell: CellDescription, batch: int, members: int, bf16: bool, backward: bool, options: Options, device: int
) -> Prepared:
    """Planned, compiled and loaded."""
    plan = make_plan(schedule(cell, backward), batch, members, bf16, device_of(device))
    assert plan is not None  # the backend has asked before
    return prepare_plan(plan, cell, backward, options, device)


def prepare_plan(
    plan: KernelPlan, cell: CellDescription, backward: bool, options: Options, device: int
) -> Prepared:
    """The same for a plan that is given."""
    own = code(schedule(cell, backward), options)
    return Prepared(plan, own, load_kernel(plan, own, device))


@lru_cache(maxsize=1024)
def load_kernel(plan: KernelPlan, own: Code, device: int) -> Kernel:
    """The compiled and loaded kernel of a plan."""
    direction = "backward" if own.schedule.backward else "forward"
    logger.info("deeprnn CUDA kernel, %s: %s", direction, plan.describe())
    cubin = compile_plan(plan, own, device_of(device))
    return Kernel(cubin, "transition", device, plan.shared, plan.cluster, plan.cooperative)


def compile_plan(plan: KernelPlan, own: Code, device: Device) -> bytes:
    """The machine code of a plan's kernel; needs no GPU."""
    macros = {name: str(value) for name, value in macros_of(plan, own).items()}
    return nvrtc.cubin(plan.source, macros, plan.arch(device), {"cell.cuh": header(own)})


def macros_of(plan: KernelPlan, own: Code) -> dict[str, int | str]:
    """The #defines of a kernel: the plan's, and what depends on the launch's options."""
    if not own.schedule.backward:
        scanned = [1] * len(own.schedule.stages)
    else:
        given = dict(zip(own.schedule.cell.outputs, own.options.gradients, strict=True))
        scanned = [
            int(any(given[o] for o in given if o.stage == stage.stage)) for stage in own.schedule.stages
        ]
    return {**plan.macros(), "SCANNED": listed(scanned)}


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


def launch(ready: Prepared, arguments: Arguments) -> None:
    """Fill the parameter block and launch, on the current stream."""
    stored, plan = arguments.stored[0], ready.plan
    members = stored.shape[0] if stored.dim() == 4 else 1
    groups = -(-stored.shape[-2] // plan.rows)
    blocks, *exchange = _grid(plan, groups * members, stored.device, arguments.scratch)
    block = parameter_block(ready, arguments, stored, groups, exchange)
    ready.kernel.launch(blocks, plan.threads, [block], stored.device)


def parameter_block(
    ready: Prepared, arguments: Arguments, like: Tensor, groups: int = 1, exchange: Sequence[int] = (0, 0, 0)
) -> ctypes.Array:
    """`Params` of params.cuh: all its fields have eight bytes. `like` is ([P,] T, B, any)."""
    fields = [*_matrix_fields(ready, arguments.inputs), *_tensor_fields(ready, arguments)]
    fields += [*like.shape[-3:-1], groups, *exchange]
    fields += [*_pointers(arguments.locals, max(1, len(ready.code.slots))), _pointer(arguments.after)]
    fields += arguments.scanned
    return (ctypes.c_int64 * len(fields))(*fields)


def _grid(
    plan: KernelPlan, items: int, device: torch.device, scratch: list[Tensor]
) -> tuple[int, int, int, int]:
    """Blocks, the address of the exchange buffer, row groups of all members, and how many of them a team serves."""
    words = plan.exchange_words
    if plan.cooperative:
        teams: int = plan.teams  # type: ignore[attr-defined]
        share = -(-items // teams)
        used = -(-items // share)
        exchange = torch.zeros(used * words, dtype=torch.int32, device=device)
        scratch.append(exchange)
        return used * plan.team, exchange.data_ptr(), items, share  # type: ignore[attr-defined]
    if not words:
        return items * plan.cluster, 0, 0, 0
    exchange = torch.empty(items * words, dtype=torch.int32, device=device)
    scratch.append(exchange)
    return items * plan.cluster, exchange.data_ptr(), 0, 0


def _matrix_fields(ready: Prepared, inputs: Inputs) -> list[int]:
    """Each piece of each matrix: address, strides of member, output unit and inner unit."""
    backward, fields = ready.schedule.backward, []
    pieces = max(len(m.pieces) for m in ready.schedule.matrices)
    for matrix in ready.schedule.matrices:
        for piece in (*matrix.pieces, *[None] * (pieces - len(matrix.pieces))):
            if piece is None:
                fields += [0, 0, 0, 0]
                continue
            tensor = inputs.matrices[piece.matrix]
            *member, row, column = tensor.stride()
            start = tensor.data_ptr() + 4 * (piece.rows.start * row + piece.column * column)
            own = row * piece.rows.step
            strides = (column, own) if backward else (own, column)
            fields += [start, member[0] if member else 0, *strides]
    return fields


def _tensor_fields(ready: Prepared, arguments: Arguments) -> list[int]:
    cell, depth = ready.schedule.cell, len(ready.schedule.stages)
    inputs, slots = arguments.inputs, max(1, len(ready.code.slots))
    count = len(cell.outputs) + len(adjoint(cell).saved)
    vectors, streams = inputs.vectors or [None], inputs.streams or [None]
    fields = [
        _pointer(inputs.A),
        *_pointers(arguments.stored, count),
        *_pointers(arguments.gradients, len(cell.outputs)),
        _pointer(arguments.delta),
        *map(_pointer, inputs.states),
        *_pointers(arguments.initial_vectors, depth),
        *_pointers(arguments.initial_sums, depth),
        *_pointers(arguments.initial_locals, slots),
        *map(_pointer, vectors),
        *map(_pointer, streams),
        _pointer(inputs.reset),
    ]
    own = 0 if inputs.members is None else 1
    fields += [_stride(inputs.A, own), *(_stride(x, own) for x in inputs.states)]
    fields += [
        *(_stride(x, own) for x in arguments.initial_vectors),
        *[0] * (depth - len(arguments.initial_vectors)),
    ]
    fields += [_stride(x, own) for x in vectors]
    fields += [_stride(x, own) for x in streams]
    fields += [0 if x is None or x.dim() < 3 + own else x.stride(own) for x in streams]
    reset = inputs.reset
    return [*fields, 0 if reset is None or reset.dim() == 2 else reset.stride(0)]


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _pointers(tensors: Sequence[Tensor | None], count: int) -> list[int]:
    return [*map(_pointer, tensors), *[0] * (count - len(tensors))]


def _stride(x: Tensor | None, own: int) -> int:
    """From one member to the next."""
    return x.stride(0) if own and x is not None else 0


def sent_states(cell: CellDescription, backward: bool, strict: bool = True) -> dict[int, int]:
    """For each kernel stage whose vector is made of a state: that state."""
    order = {stage.stage: k for k, stage in enumerate(schedule(cell, backward, strict).stages)}
    low, found = lower(cell), {}
    for _, _, product in cell.products:
        v = product.vector
        if v.kind == "state":
            found[order[cell.new_states[v.index].stage]] = v.index
        elif v.stage in low.inlined:
            (node,) = leaves_of([cell.stages[v.stage].outputs[v.index]], "state")
            found[order[cell.new_states[node.value[0]].stage]] = node.value[0]  # type: ignore[index]
    return found
