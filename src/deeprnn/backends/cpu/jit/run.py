"""A pass of a cell by machine code: tensors bound to a plan, and the plan run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeprnn.backends.call import Gradients, Inputs
from deeprnn.backends.cpu.jit import executor, machine, threads
from deeprnn.backends.cpu.jit.lowering import (
    InputProjectionShape,
    Pass,
    backward_pass,
    forward_pass,
    input_pass,
)
from deeprnn.backends.cpu.jit.number import NUMBERS
from deeprnn.backends.cpu.jit.plan import PassPlan
from deeprnn.backends.cpu.jit.sharing import WorkSplit, share
from deeprnn.backends.cpu.jit.tables import Call
from deeprnn.cells.description import CellDescription, from_text

POINTWISE_WORK = 16
"""multiplications that take about as long as the pointwise code of one unit"""
MOST_CALLS = 256
"""shapes of a program whose calls are settled: then all are forgotten"""
FIRST_ADDRESS = Call.size()
"""word of a call's table"""
KEPT_WORKSPACE = 2**26
"""bytes up to which a thread keeps its memory for packed weights: fresh memory costs more than packing"""


def forward(cell: CellDescription, inputs: Inputs, keep: bool) -> list[Tensor]:
    """Every output of every step and, with `keep`, what the backward pass needs."""
    program, A = forward_program(cell.text, keep), inputs.A
    assert A is not None
    lead = A.shape[:-1]
    results = [A.new_empty((*lead, width)) for width in program.results]
    given = [A, *inputs.states, *inputs.vectors, *inputs.masks, inputs.reset, *results, *inputs.matrices]
    program.run(given, inputs.members, *lead[-2:])
    return results


def backward(
    cell: CellDescription, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
) -> Gradients:
    """The gradients of pre-activations, as `delta`, and of the first states."""
    program, like = backward_program(cell.text), stored[0]
    *lead, steps, batch, _ = like.shape
    make = like.new_empty if program.fills_delta else like.new_zeros
    delta = make((*lead, steps, batch, program.delta))
    states = [x.new_empty(x.shape) if steps else x.new_zeros(x.shape) for x in inputs.states]
    carry = [like.new_zeros((*lead, 2, batch, width)) for width in program.carry]
    local = [like.new_empty((*lead, batch, width)) for width in program.local]
    given = [delta, *inputs.states, *inputs.vectors, *inputs.masks, inputs.reset, *stored, *gradients]
    program.run([*given, *states, *carry, *local, *inputs.matrices], inputs.members, steps, batch)
    return Gradients(delta, states)


@lru_cache(maxsize=1024)
def forward_program(
    text: str, keep: bool, projection: InputProjectionShape | None = None, in_loop: bool = False
) -> Program:
    """A cell's forward pass; see `lowering.forward_pass`."""
    return Program(forward_pass(from_text(text), keep, projection, in_loop))


@lru_cache(maxsize=1024)
def input_program(projection: InputProjectionShape) -> Program:
    """The product of an input with its matrices."""
    return Program(input_pass(projection))


@lru_cache(maxsize=1024)
def backward_program(text: str) -> Program:
    """A cell's backward pass."""
    return Program(backward_pass(from_text(text)))


class Program:
    """A pass, and plans for it, each made when it is first needed."""

    def __init__(self, pass_: Pass):
        self.pass_ = pass_
        self._plans: dict[Any, PassPlan] = {}
        self._calls: dict[Any, _Call] = {}
        self.results = self._widths("output", "saved")
        self.carry, self.local = self._widths("carry"), self._widths("local")
        self.delta = sum(self._widths("delta"))
        self.fills_delta = len(self._delta_columns()) == self.delta
        self.masks = [i for i, x in enumerate(pass_.operands) if x.kind == "mask"]
        self.marks = next(i for i, x in enumerate(pass_.operands) if x.kind == "marks")
        self.row_bytes = 8 * max(x.width for x in pass_.operands)
        self.first_states = [(i, x.width) for i, x in enumerate(pass_.operands) if x.kind == "first"]
        self.multiplications = sum(
            stage.size * (POINTWISE_WORK + sum(term.depth for terms in stage.sums for term in terms))
            for stage in pass_.stages
        )

    def _widths(self, *kinds: str) -> list[int]:
        return [x.width for x in self.pass_.operands if x.kind in kinds]

    def _delta_columns(self) -> set[int]:
        """The columns of delta that are written: one of A that no stage reads is not."""
        return {
            stage.views[write.slot].column + unit * write.step
            for stage in self.pass_.stages
            for _, writes in stage.pointwise.results
            for write in writes
            if stage.views[write.slot].operand.kind == "delta"
            for unit in range(stage.size)
        }

    def run(self, tensors: Sequence[Tensor | None], members: int | None, steps: int, batch: int) -> None:
        """Run all steps on tensors in the order of the pass's operands."""
        dense = [x if x is None or x.is_contiguous() else _dense(x, members) for x in tensors]
        addresses = [None if x is None else x.data_ptr() for x in dense]
        distances = self._distances(dense) if members is not None else []
        timed = 3 if members is None else 4
        per_sequence = tuple([i for i in self.masks if dense[i].dim() < timed])  # type: ignore[union-attr]
        dtype = dense[0].dtype  # type: ignore[union-attr]
        self.run_at(
            addresses, dtype, steps, batch, per_sequence, 1 if members is None else members, distances
        )

    def run_at(
        self,
        addresses: Sequence[int | None],
        dtype: torch.dtype,
        steps: int,
        batch: int,
        per_sequence: tuple[int, ...] = (),
        members: int = 1,
        distances: Sequence[int] = (),
    ) -> None:
        """Run all steps on contiguous tensors at these addresses, None for zeros.

        `per_sequence` are the masks that are one for the whole sequence, `distances` the bytes from member to member.
        """
        if steps == 0 or batch == 0 or members == 0:
            return
        absent = tuple([i for i, x in enumerate(addresses) if x is None])
        key = dtype, steps, batch, per_sequence, members, absent
        if (call := self._calls.get(key)) is None:
            call = _Call(self, *key)
            if len(self._calls) >= MOST_CALLS:  # sequences of ever new lengths
                self._calls.clear()
            self._calls[key] = call
        call.run(addresses, distances)

    def planned(
        self, split: WorkSplit, dtype: torch.dtype, absent: tuple[int, ...], per_sequence: tuple[int, ...]
    ) -> PassPlan:
        """The plan of calls that share their work like this and lack these operands."""
        key = (split, dtype, absent, per_sequence)
        if (found := self._plans.get(key)) is None:
            operands = self.pass_.operands
            still = [operands[i] for i in absent], [operands[i] for i in per_sequence]
            made = PassPlan(self.pass_, NUMBERS[dtype], split, *map(frozenset, still))
            found = self._plans.setdefault(key, made)
        return found

    def _distances(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Bytes from member to member; reset marks may be shared."""
        shared = tensors[self.marks] is None or tensors[self.marks].dim() == 2  # type: ignore[union-attr]
        return [
            0 if x is None or (i == self.marks and shared) else x.stride(0) * x.element_size()
            for i, x in enumerate(tensors)
        ]


class _Call:
    """What calls of one shape have in common, settled once: a small one costs more before its loop than in it."""

    def __init__(
        self, program: Program, dtype: torch.dtype, steps: int, batch: int, per_sequence: tuple[int, ...],
        members: int, absent: tuple[int, ...],
    ):  # fmt: skip
        self.program, self.dtype, self.absent, self.per_sequence = program, dtype, absent, per_sequence
        self.steps, self.batch, self.members = steps, batch, members
        self.multiply_count = members * steps * batch * program.multiplications
        self.passes = 0 if program.pass_.backward else steps
        # A step reads the state before it with that sequence's distance between rows, the first step's too.
        absent_widths = [width for i, width in program.first_states if i in absent]
        zero_states = dtype.itemsize * max(absent_widths, default=0)
        self.zeros = zeros_address(max(program.row_bytes, batch * max(1, zero_states)))
        self._tables: dict[WorkSplit, tuple[PassPlan, Any]] = {}
        self._function = executor.run(machine.machine().vector_bytes)

    def run(self, addresses: Sequence[int | None], distances: Sequence[int]) -> None:
        """Run all steps; the work's sharing depends on what the machine does just now."""
        given = [self.zeros if x is None else x for x in addresses]

        def run(split: WorkSplit) -> None:
            self._run(split, given, distances)

        share((self.program, self.dtype), self.batch, self.members, self.multiply_count, self.passes, run)

    def _run(self, split: WorkSplit, given: list[int], distances: Sequence[int]) -> None:
        planned, table = self._tables.get(split) or self._tables.setdefault(split, self._table(split))
        call = type(table).from_buffer_copy(table)
        weights = _workspace(self.members * planned.weights_bytes)
        bound = [*given, self.zeros, weights.data_ptr()]
        if distances:
            bound += [*distances, 0, planned.weights_bytes]
        call[FIRST_ADDRESS : FIRST_ADDRESS + len(bound)] = bound
        execute(call, self._function, split.parts)

    def _table(self, split: WorkSplit) -> tuple[PassPlan, Any]:
        """The plan, and a call's table without addresses."""
        planned = self.program.planned(split, self.dtype, self.absent, self.per_sequence)
        table = planned.new_call()
        table[Call.STEPS], table[Call.MEMBERS] = self.steps, self.members
        return planned, table


def _dense(x: Tensor, members: int | None) -> Tensor:
    """Contiguous, but for members that share one tensor."""
    if members and x.stride(0) == 0 and x[0].is_contiguous():
        return x
    return x.contiguous()


def execute(call: Any, function: int, parts: int) -> None:
    """Run all shares of a call: `function` is the address of `run(call, part)`."""
    if parts > 1:
        call[Call.WORKER], call[Call.PARTS] = function, parts
        if threads.in_openmp_region(executor.region(), call, parts):
            return
    run = _callable_of(function)
    if parts == 1:
        run(ctypes.addressof(call), 0)
    else:
        threads.in_own_threads(run, call, parts)


@lru_cache(maxsize=64)
def _callable_of(function: int) -> Callable[[int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(function)


class _ThreadMemory(threading.local):
    """A thread's memory for packed weights."""

    memory = torch.empty(0, dtype=torch.uint8)


_THREAD_MEMORY = _ThreadMemory()


def _fresh_zeros(size: int) -> tuple[int, int, np.ndarray]:
    memory = np.zeros(size, dtype=np.uint8)  # numpy's take no memory of the system's before they are written
    return size, memory.ctypes.data, memory


_ZEROS = [_fresh_zeros(2**14)]
"""bytes, address, memory: the last is the largest; smaller ones stay, for another thread may read them"""


def _workspace(size: int) -> Tensor:
    """Memory of at least so many bytes, with anything in it."""
    if _THREAD_MEMORY.memory.numel() >= size:
        return _THREAD_MEMORY.memory
    fresh = torch.empty(size, dtype=torch.uint8)
    if size <= KEPT_WORKSPACE:
        _THREAD_MEMORY.memory = fresh
    return fresh


def zeros_address(size: int) -> int:
    """Where at least so many bytes of zeros lie, which nobody writes."""
    kept = _ZEROS[-1]
    if kept[0] < size:
        kept = _fresh_zeros(2 * size)
        _ZEROS.append(kept)
    return kept[1]
