"""A pass of a cell by machine code: tensors bound to a plan, and the plan run."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.cpu.jit import executor, machine, threads
from deeprnn.backends.cpu.jit.lowering import Pass, backward_pass, forward_pass
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
    program, A = _forward_program(cell.text, keep), inputs.A
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
    program, like = _backward_program(cell.text), stored[0]
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
def _forward_program(text: str, keep: bool) -> Program:
    return Program(forward_pass(from_text(text), keep))


@lru_cache(maxsize=1024)
def _backward_program(text: str) -> Program:
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
        population = 1 if members is None else members
        if steps == 0 or batch == 0 or population == 0:
            return
        dense = [x if x is None or x.is_contiguous() else _dense(x, members) for x in tensors]
        zeros = _zeros(max(self.row_bytes, batch)).data_ptr()
        addresses = [zeros if x is None else x.data_ptr() for x in dense]
        distances = self._distances(dense) if members is not None else []
        dtype = dense[0].dtype  # type: ignore[union-attr]
        absent = tuple([i for i, x in enumerate(dense) if x is None])
        timed = 3 if members is None else 4
        timeless = tuple([i for i in self.masks if dense[i].dim() < timed])  # type: ignore[union-attr]

        def run(sharing: Sharing) -> None:
            key = (sharing, dtype, absent, timeless)
            planned = self.plans.get(key) or self.plans.setdefault(key, self._planned(*key))
            weights = _workspace(population * planned.weights_bytes)
            call = planned.new_call()
            call[Call.STEPS], call[Call.MEMBERS] = steps, population
            bound = [*addresses, zeros, weights.data_ptr()]
            if distances:
                bound += [*distances, 0, planned.weights_bytes]
            call[Call.size() : Call.size() + len(bound)] = bound
            _execute(call, sharing.parts)

        work = population * steps * batch * self.multiplications
        share((self, dtype), batch, population, work, 0 if self.work.backward else steps, run)

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


def _execute(call: Any, parts: int) -> None:
    run, region = _functions(machine.machine().vector_bytes)
    if parts == 1:
        run(ctypes.addressof(call), 0)
    elif not threads.in_openmp_region(region, call, parts):
        threads.in_own_threads(run, call, parts)


@lru_cache(maxsize=4)
def _functions(vector_bytes: int) -> tuple[Callable[[int, int], None], int]:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    return kind(executor.run(vector_bytes)), executor.region(vector_bytes)


class _Kept(threading.local):
    """A thread's memory for packed weights."""

    memory = torch.empty(0, dtype=torch.uint8)


_KEPT = _Kept()
_NOTHING = torch.zeros(2**14, dtype=torch.uint8)


def _workspace(size: int) -> Tensor:
    """Memory of at least so many bytes, with anything in it."""
    if _KEPT.memory.numel() >= size:
        return _KEPT.memory
    fresh = torch.empty(size, dtype=torch.uint8)
    if size <= KEPT_WORKSPACE:
        _KEPT.memory = fresh
    return fresh


def _zeros(size: int) -> Tensor:
    """At least so many bytes of zeros, which nobody writes."""
    global _NOTHING
    if _NOTHING.numel() < size:
        _NOTHING = torch.zeros(2 * size, dtype=torch.uint8)
    return _NOTHING
