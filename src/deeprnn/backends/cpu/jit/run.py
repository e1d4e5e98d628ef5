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

from deeprnn.backends.cpu.jit import executor, machine, threads
from deeprnn.backends.cpu.jit.lowering import InputEntry, Pass, backward_pass, forward_pass, input_pass
from deeprnn.backends.cpu.jit.number import NUMBERS
from deeprnn.backends.cpu.jit.plan import Planned, Sharing
from deeprnn.backends.cpu.jit.sharing import share
from deeprnn.backends.cpu.jit.tables import Call
from deeprnn.backends.protocol import Gradients, Inputs
from deeprnn.cells.description import CellDescription, from_text

POINTWISE_WORK = 16
"""multiplications that take about as long as the pointwise code of one unit"""
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
    text: str, keep: bool, through: InputEntry | None = None, in_loop: bool = False
) -> Program:
    """A cell's forward pass; see `lowering.forward_pass`."""
    return Program(forward_pass(from_text(text), keep, through, in_loop))


@lru_cache(maxsize=1024)
def input_program(through: InputEntry) -> Program:
    """The product of an input with its matrices."""
    return Program(input_pass(through))


@lru_cache(maxsize=1024)
def backward_program(text: str) -> Program:
    """A cell's backward pass."""
    return Program(backward_pass(from_text(text)))


class Program:
    """A pass, and plans for it, each made when it is first needed."""

    def __init__(self, work: Pass):
        self.work = work
        self.plans: dict[Any, Planned] = {}
        self.results = self._widths("output", "saved")
        self.carry, self.local = self._widths("carry"), self._widths("local")
        self.delta = sum(self._widths("delta"))
        self.fills_delta = len(self._delta_columns()) == self.delta
        self.masks = [i for i, x in enumerate(work.operands) if x.kind == "mask"]
        self.marks = next(i for i, x in enumerate(work.operands) if x.kind == "marks")
        self.row_bytes = 8 * max(x.width for x in work.operands)
        self.first_states = [(i, x.width) for i, x in enumerate(work.operands) if x.kind == "first"]
        self.multiplications = sum(
            stage.size * (POINTWISE_WORK + sum(term.depth for terms in stage.sums for term in terms))
            for stage in work.stages
        )

    def _widths(self, *kinds: str) -> list[int]:
        return [x.width for x in self.work.operands if x.kind in kinds]

    def _delta_columns(self) -> set[int]:
        """The columns of delta that are written: one of A that no stage reads is not."""
        return {
            stage.views[write.slot].column + unit * write.step
            for stage in self.work.stages
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
        timeless = tuple([i for i in self.masks if dense[i].dim() < timed])  # type: ignore[union-attr]
        dtype = dense[0].dtype  # type: ignore[union-attr]
        self.run_at(addresses, dtype, steps, batch, timeless, 1 if members is None else members, distances)

    def run_at(
        self,
        addresses: Sequence[int | None],
        dtype: torch.dtype,
        steps: int,
        batch: int,
        timeless: tuple[int, ...] = (),
        members: int = 1,
        distances: Sequence[int] = (),
    ) -> None:
        """Run all steps on contiguous tensors at these addresses, None for zeros.

        `timeless` are the masks that are one for the whole sequence, `distances` the bytes from member to member.
        """
        if steps == 0 or batch == 0 or members == 0:
            return
        # A step reads the state before it with that sequence's distance between rows, the first step's too.
        absent_widths = [width for i, width in self.first_states if addresses[i] is None]
        zero_states = dtype.itemsize * max(absent_widths, default=0)
        zeros = zeros_address(max(self.row_bytes, batch * max(1, zero_states)))
        absent = tuple([i for i, x in enumerate(addresses) if x is None])
        given = [zeros if x is None else x for x in addresses] if absent else addresses

        def run(sharing: Sharing) -> None:
            key = (sharing, dtype, absent, timeless)
            planned = self.plans.get(key) or self.plans.setdefault(key, self._planned(*key))
            weights = _workspace(members * planned.weights_bytes)
            call = planned.new_call()
            call[Call.STEPS], call[Call.MEMBERS] = steps, members
            bound = [*given, zeros, weights.data_ptr()]
            if distances:
                bound += [*distances, 0, planned.weights_bytes]
            call[Call.size() : Call.size() + len(bound)] = bound
            execute(call, executor.run(machine.machine().vector_bytes), sharing.parts)

        work = members * steps * batch * self.multiplications
        share((self, dtype), batch, members, work, 0 if self.work.backward else steps, run)

    def _planned(
        self, sharing: Sharing, dtype: torch.dtype, absent: tuple[int, ...], timeless: tuple[int, ...]
    ) -> Planned:
        operands = self.work.operands
        still = [operands[i] for i in absent], [operands[i] for i in timeless]
        return Planned(self.work, NUMBERS[dtype], sharing, *map(frozenset, still))

    def _distances(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """Bytes from member to member; reset marks may be shared."""
        shared = tensors[self.marks] is None or tensors[self.marks].dim() == 2  # type: ignore[union-attr]
        return [
            0 if x is None or (i == self.marks and shared) else x.stride(0) * x.element_size()
            for i, x in enumerate(tensors)
        ]


def _dense(x: Tensor, members: int | None) -> Tensor:
    """Contiguous, but for members that share one tensor."""
    if members and x.stride(0) == 0 and x[0].is_contiguous():
        return x
    return x.contiguous()


def execute(call: Any, function: int, parts: int) -> None:
    """Run all shares of a call: `function` is the address of `run(call, part)`."""
    if parts > 1:
        call[Call.SHARE], call[Call.PARTS] = function, parts
        if threads.in_openmp_region(executor.region(), call, parts):
            return
    run = _share_of(function)
    if parts == 1:
        run(ctypes.addressof(call), 0)
    else:
        threads.in_own_threads(run, call, parts)


@lru_cache(maxsize=64)
def _share_of(function: int) -> Callable[[int, int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(function)


class _Kept(threading.local):
    """A thread's memory for packed weights."""

    memory = torch.empty(0, dtype=torch.uint8)


_KEPT = _Kept()


def _fresh_zeros(size: int) -> tuple[int, int, np.ndarray]:
    memory = np.zeros(size, dtype=np.uint8)  # numpy's take no memory of the system's before they are written
    return size, memory.ctypes.data, memory


_ZEROS = [_fresh_zeros(2**14)]
"""bytes, address, memory: the last is the largest; smaller ones stay, for another thread may read them"""


def _workspace(size: int) -> Tensor:
    """Memory of at least so many bytes, with anything in it."""
    if _KEPT.memory.numel() >= size:
        return _KEPT.memory
    fresh = torch.empty(size, dtype=torch.uint8)
    if size <= KEPT_WORKSPACE:
        _KEPT.memory = fresh
    return fresh


def zeros_address(size: int) -> int:
    """Where at least so many bytes of zeros lie, which nobody writes."""
    kept = _ZEROS[-1]
    if kept[0] < size:
        kept = _fresh_zeros(2 * size)
        _ZEROS.append(kept)
    return kept[1]
