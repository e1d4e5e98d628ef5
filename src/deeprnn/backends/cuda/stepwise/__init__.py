"""CUDA backend for cells that no persistent kernel can hold: library products, and a generated kernel a stage and step.

A step costs a launch or two for each stage in either direction. Called from Python the host is what takes time; in a
CUDA graph it is the products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, Inputs
from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import Device, device_of, index_of, nvidia
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.epilogue import Epilogue, EpilogueOptions, epilogue_of
from deeprnn.backends.cuda.recurrence.parameters import Arguments, headers, parameter_block
from deeprnn.backends.cuda.recurrence.run import (
    dense,
    first_locals,
    inlined_outputs,
    moved_to_states,
    rounded,
    sent_vectors,
    state_gradient,
    with_first,
)
from deeprnn.backends.cuda.recurrence.schedule import NotScheduled, Schedule, schedule, sent_states
from deeprnn.cells.adjoint import adjoint_of

THREADS = 128


@lru_cache(maxsize=512)
def load_kernel(epilogue: Epilogue, stage: int, device: int) -> Kernel:
    """The epilogue of one stage."""
    return Kernel(compile_stage(epilogue, stage, device_of(device)), "epilogue_step", device)


def compile_stage(epilogue: Epilogue, stage: int, device: Device) -> bytes:
    """The machine code of a stage's epilogue; needs no GPU."""
    macros = {"STAGE": str(stage)}
    return nvrtc.cubin("stepwise/stepwise.cu", macros, device.arch, headers(epilogue))


class Stepwise:
    """Any cell whose stages can be put in order."""

    name = "stepwise"

    def why_not(self, case: Case) -> str | None:
        """None where this backend can serve, else the reason and the remedy in a sentence."""
        if case.device.type != "cuda" or not torch.cuda.is_available() or not nvidia(case.device):
            return f"the stepwise backend needs tensors on an NVIDIA GPU, not {case.device}: move them with .cuda()"
        if case.dtype != torch.float32:
            return f"the stepwise backend computes in float32, not {case.dtype}: cast the model with .float()"
        if torch.cuda.get_device_capability(case.device) < (7, 0):
            return "compute capability is below 7.0: use backend='reference'"
        try:
            for backward in (False, True):
                schedule(case.cell, backward, strict=False)
        except NotScheduled as reason:
            return f"{reason}: use backend='reference'"
        return None

    @torch.no_grad()
    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """Every output of every step, and with `keep` what the backward pass needs."""
        assert inputs.A is not None
        cell, lead = case.cell, inputs.A.shape[:-1]
        stored = [inputs.A.new_empty((*lead, n)) for n in plain.stored_sizes(cell, keep)]
        if stored[0].numel() == 0:
            return stored
        inputs = rounded(dense(inputs), case)
        options = EpilogueOptions(inputs.reset is not None, keep)
        epilogue = epilogue_of(schedule(cell, False, strict=False), options)
        arguments = Arguments(inputs, stored)
        arguments.locals = first_locals(epilogue, inputs, stored[0])
        loop = Loop(epilogue, arguments, stored[0])
        for stage, vector in sent_vectors(cell, inputs, False, strict=False).items():
            first = vector if inputs.reset is None else _cleared(vector, inputs.reset)
            loop.vectors[stage].next[1].copy_(first.reshape(loop.vectors[stage].next[1].shape))
        loop.run()
        return inlined_outputs(cell, stored, inputs)

    @torch.no_grad()
    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """The gradients of pre-activations and first states."""
        cell, like = case.cell, stored[0]
        delta = like.new_empty(*like.shape[:-1], adjoint_of(cell).width)
        if delta.numel() == 0:
            return Gradients(delta, [torch.zeros_like(x) for x in inputs.states])
        inputs = rounded(dense(inputs), case)
        gradients, first = moved_to_states(cell, gradients, stored, inputs)
        dense_gradients = [None if g is None else g.contiguous() for g in gradients]
        has_gradient = tuple(g is not None for g in dense_gradients)
        options = EpilogueOptions(inputs.reset is not None, gradients=has_gradient)
        epilogue = epilogue_of(schedule(cell, True, strict=False), options)
        lead = (*like.shape[:-3], like.shape[-2])
        arguments = Arguments(inputs, [x.contiguous() for x in stored], (), dense_gradients, delta)
        arguments.locals = [like.new_zeros(*lead, n) for n in epilogue.slots]
        loop = Loop(epilogue, arguments, like)
        loop.run()
        sums = {stage: loop.delayed_sums(stage) for stage in sent_states(cell, True, strict=False)}
        states = []
        for i in range(len(cell.states)):
            slot = epilogue.finals[i]
            carried = None if slot is None else arguments.locals[slot]
            if carried is not None and inputs.reset is not None:
                carried = _cleared(carried, inputs.reset)
            states.append(state_gradient(cell, inputs, i, sums, carried, strict=False))
        return Gradients(delta, with_first(states, first))


def _cleared(x: Tensor, reset: Tensor) -> Tensor:
    """Zero in rows that a mark resets before the first step."""
    return x.masked_fill(reset.select(-2, 0).unsqueeze(-1), 0)


@dataclass
class StageVector:
    """What a stage sends: for this step, and for the next one by step parity."""

    now: Tensor
    next: tuple[Tensor, Tensor]


class _StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "now", "next")),
        *((name, ctypes.c_int64) for name in ("members", "t")),
    )


class Loop:
    """A pass over all steps: per stage its products, then its epilogue."""

    def __init__(self, epilogue: Epilogue, arguments: Arguments, like: Tensor) -> None:
        self.epilogue, self.schedule, inputs = epilogue, epilogue.schedule, arguments.inputs
        self.steps, batch = like.shape[-3], like.shape[-2]
        self.members = inputs.members or 1
        self.rows = self.members * batch
        shape = (self.members, batch)
        self.device = like.device
        self.sums = [
            like.new_zeros(*shape, max(1, stage.gates) * stage.size) for stage in self.schedule.stages
        ]
        self.vectors = [self._vector(like, shape, stage.sent * stage.size) for stage in self.schedule.stages]
        self.weights = [_joined(self.schedule, m, inputs, self.members) for m in self.schedule.matrices]
        self.block = parameter_block(epilogue, arguments, like)
        device = index_of(self.device)
        self.kernels = [load_kernel(epilogue, s, device) for s in range(len(self.schedule.stages))]
        self.arguments = arguments  # kept: the kernels read at their addresses

    @staticmethod
    def _vector(like: Tensor, shape: tuple[int, int], width: int) -> StageVector:
        first, second, third = (like.new_zeros(*shape, max(1, width)) for _ in range(3))
        return StageVector(first, (second, third))

    def run(self) -> None:
        """All steps."""
        backward = self.schedule.backward
        for step in range(self.steps):
            t = self.steps - 1 - step if backward else step
            for s in range(len(self.schedule.stages)):
                self._products(s, step, only_delayed=False)
                self._epilogue(s, step, t)

    def delayed_sums(self, stage: int) -> Tensor:
        """After the last step: what comes back to the vector that this stage sent before the first one."""
        self._products(stage, self.steps, only_delayed=True)
        sums = self.sums[stage].clone()
        epilogue = self.arguments.inputs.states[0].dim() == 3
        return sums if epilogue else sums.squeeze(0)

    def _products(self, s: int, step: int, only_delayed: bool) -> None:
        started, target = False, self.sums[s]
        for matrix, weight in zip(self.schedule.matrices, self.weights, strict=True):
            if matrix.stage != s or (only_delayed and not matrix.delayed):
                continue
            vector = self.vectors[matrix.source]
            source = vector.next[(step - 1) % 2] if matrix.delayed else vector.now
            if started:
                target.baddbmm_(source, weight)
            else:
                torch.bmm(source, weight, out=target)
            started = True

    def _epilogue(self, s: int, step: int, t: int) -> None:
        vector, stage = self.vectors[s], self.schedule.stages[s]
        pointers = (vector.now, vector.next[step % 2]) if stage.sent else (None, None)
        sums = self.sums[s].data_ptr() if stage.gates else None
        now, later = (None if x is None else x.data_ptr() for x in pointers)
        epilogue = _StepArguments(sums, now, later, self.members, t)
        blocks = -(-self.rows * stage.size // THREADS)
        self.kernels[s].launch(blocks, THREADS, [self.block, epilogue], self.device)


def _joined(schedule: Schedule, matrix, inputs: Inputs, members: int) -> Tensor:
    """All weights between a vector and a stage's sums as one matrix, (members, length of the vector, sums)."""
    parts = []
    size = schedule.sizes[matrix.source if schedule.backward else matrix.stage]
    other = schedule.sizes[matrix.stage if schedule.backward else matrix.source]
    for piece in matrix.pieces:
        if piece is None:
            like = inputs.matrices[0]
            parts.append(like.new_zeros(*like.shape[:-2], size, other))
            continue
        m, (start, step) = inputs.matrices[piece.matrix], piece.rows
        rows = m[..., start : start + (size - 1) * step + 1 : step, :]
        parts.append(rows[..., piece.column : piece.column + other])
    whole = torch.cat(parts, -2)  # forward (gates · units, length), backward (length, units)
    whole = whole if schedule.backward else whole.transpose(-2, -1)
    return whole.expand(members, *whole.shape[-2:]) if whole.dim() == 2 else whole


BACKEND = Stepwise()
