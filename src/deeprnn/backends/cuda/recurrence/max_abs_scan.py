"""A scan for the largest magnitudes that tensor_core.cu will meet: numbers in fp16 parts need a scale.

One launch of max_abs_scan.cu before the loop goes through every matrix and through what is added to sums. Its results
lie in one buffer: (members, matrices, pieces), the largest sum of magnitudes of eight rows each; and (members, T, B,
stages), the largest magnitude of a row. The loop itself scans the vectors before its first step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from deeprnn.backends.call import Inputs
from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.recurrence.plans import ceil_div
from deeprnn.backends.cuda.recurrence.schedule import Schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan

WARPS = 8  # of a block, each with a row
FIELDS = 10  # of a job: `Rows` in max_abs_scan.cu


class ScanJobs(NamedTuple):
    """Everything about a launch that does not depend on where the tensors lie."""

    fields: tuple[int, ...]
    """of all jobs, the matrices first; addresses are zero"""
    data: tuple[tuple[int, int, int], ...]
    """place of an address, the stage whose rows are meant, bytes from the tensor's first"""
    outs: tuple[tuple[int, int], ...]
    """place of an address, bytes from the buffer's first"""
    size: int
    """of the buffer, in numbers"""
    blocks: int
    inputs: int
    """where the buffer's second part begins, in bytes"""


@dataclass(frozen=True)
class ScanShape:
    """The shapes of a launch."""

    members: int
    steps: int
    batch: int
    entry_member: int
    """numbers from one member's A to the next"""
    stages: tuple[bool, ...]
    """stages whose sums something is added to that has to be scanned"""


@lru_cache(maxsize=1024)
def scan_jobs(schedule: Schedule, shape: ScanShape) -> ScanJobs:
    """The jobs of a launch; layouts as in params.cuh."""
    depth, matrices, each = len(schedule.stages), len(schedule.matrices), ceil_div(max(schedule.sizes), WARPS)
    pieces = each * max(len(matrix.pieces) for matrix in schedule.matrices)
    rows = shape.steps * shape.batch
    inputs = shape.members * matrices * pieces
    fields: list[int] = []
    data: list[tuple[int, int, int]] = []
    outs: list[tuple[int, int]] = []
    blocks = 0

    def add(
        strides: Sequence[int], size: Sequence[int], out: int, out_strides: Sequence[int], count: int
    ) -> None:
        nonlocal blocks
        outs.append((len(fields) + 6, 4 * out))
        fields.extend((0, *strides, *size, 0, *out_strides, blocks))
        blocks += count

    for j, matrix in enumerate(schedule.matrices):
        size = schedule.sizes[matrix.stage], schedule.sizes[matrix.source]
        for k, piece in enumerate(matrix.pieces):
            if piece is not None:
                add((0, 0, 0), size, j * pieces + k * each, (matrices * pieces, 0), each)
    width = schedule.cell.entry_width
    for s, stage in enumerate(schedule.stages):
        if not shape.stages[s]:
            continue
        entry = schedule.cell.stages[stage.cell_stage].preactivations[0].entry
        start = 0 if schedule.backward or entry is None else entry.start
        member, row = (rows * stage.size, stage.size) if schedule.backward else (shape.entry_member, width)
        data.append((len(fields), s, 4 * start))
        add((member, row, 1), (rows, stage.size), inputs + s, (rows * depth, depth), ceil_div(rows, WARPS))
    size = inputs + shape.members * rows * depth
    return ScanJobs(tuple(fields), tuple(data), tuple(outs), size, blocks, 4 * inputs)


@lru_cache(maxsize=64)
def load_kernel(jobs: int, device: int, arch: str) -> Kernel:
    """The compiled kernel for so many jobs."""
    return Kernel(
        nvrtc.cubin("recurrence/max_abs_scan.cu", {"JOBS": str(jobs)}, arch), "max_abs_scan", device
    )


def scanned_stages(
    plan: TensorCorePlan, schedule: Schedule, has_gradient: Sequence[bool]
) -> tuple[bool, ...]:
    """Stages to whose sums something is added that needs a scan; `has_gradient`: of each output."""
    if plan.ranges is None or (not schedule.backward and all(plan.ranges.bounded)):
        return (False,) * len(schedule.stages)
    if not schedule.backward:
        return (True,) * len(schedule.stages)
    places = dict(zip(schedule.cell.outputs, has_gradient, strict=True))
    return tuple(places[o] for stage in schedule.stages for o in places if o.stage == stage.cell_stage)


class MaxAbsScan:
    """A launch in two steps: all memory is taken here, `start` may use another stream.

    Memory taken later may be some that a loop gave back while it still runs. This object must outlive what is launched.
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: ScanShape,
        inputs: Inputs,
        rows: Sequence[Tensor | None],
        arch: str,
        like: Tensor,
    ) -> None:
        """`rows[s]`: what is added to the sums of stage s, A or the gradient of its output.

        Memory is taken where `like` lies.
        """
        self.jobs = jobs = scan_jobs(schedule, shape)
        self.device, self.members, self.keep = like.device, shape.members, (inputs, rows)
        pieces = [piece for matrix in schedule.matrices for piece in matrix.pieces]
        missing = None in pieces or len({len(matrix.pieces) for matrix in schedule.matrices}) > 1
        self.buffer = (like.new_zeros if missing else like.new_empty)((jobs.size,))
        fields, base = list(jobs.fields), self.buffer.data_ptr()
        for j, piece in enumerate(filter(None, pieces)):
            tensor = inputs.matrices[piece.matrix]
            *member, row, column = tensor.stride()
            start = tensor.data_ptr() + 4 * (piece.rows.start * row + piece.column * column)
            strides = (
                (column, row * piece.rows.step) if schedule.backward else (row * piece.rows.step, column)
            )
            fields[FIELDS * j : FIELDS * j + 4] = [start, member[0] if member else 0, *strides]
        for place, stage, offset in jobs.data:
            tensor = rows[stage]
            assert tensor is not None
            fields[place] = tensor.data_ptr() + offset
        for place, offset in jobs.outs:
            fields[place] = base + offset
        self.block = (ctypes.c_int64 * len(fields))(*fields)
        self.kernel = load_kernel(len(jobs.outs), like.device.index or 0, arch)
        self.addresses = [base, base + jobs.inputs]
        """of both parts of the results"""

    def start(self, stream: int | None = None) -> MaxAbsScan:
        """Launch, on the current stream or that at another address."""
        self.kernel.launch(self.jobs.blocks, 32 * WARPS, [self.block], self.device, self.members, stream)
        return self
