"""Backward in chunks of the sequence: sums over the rows of one chunk are taken beside the loop over the next.

Seven clusters of 13 leave 41 of an H200's 132 processors idle. The loop goes from the last chunk to the first, each
a launch of its own that begins with what the one before it left in delta, so delta is that of one launch but for
rounding. The sums follow on a side stream, in one wave of blocks, so that none waits for a processor that the loop is
about to take. For large batches alone: every launch costs time. It costs the host's too, unless a CUDA graph is
captured: then smaller batches gain as well.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.planning import make_plan
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan
from deeprnn.backends.gradients import merged_products
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import CellDescription

if TYPE_CHECKING:
    from collections.abc import Sequence

Chunk = tuple[int, int]  # first step, one past the last
MOST_CHUNKS = 3
LEAST_FREE = 24  # processors: beside fewer the sums would outlast the loop
CLOCK = 1980  # cycles a µs
WORTHWHILE = 250.0  # µs of sums from which on it pays without a graph
LAUNCH = 34.0  # µs of a further launch, at most
SUM = 7.9e-9  # µs (H200) for each number of a gradient and row
SPLIT = 2.05e-6  # µs for splitting a number of delta


class Chunks(NamedTuple):
    """Chunks in the order of time, and the processors that are idle beside the loop."""

    chunks: tuple[Chunk, ...]
    free_processors: int


@lru_cache(maxsize=1024)
def time_chunks(
    cell: CellDescription, steps: int, batch: int, inner: int, bf16: bool, device: Device, captured: bool
) -> Chunks:
    """As many chunks as pay; each as long as the sums of the one before it in the loop take beside it."""
    whole, plan = Chunks(((0, steps),), 0), make_plan(schedule(cell, True), batch, 1, bf16, device)
    if not isinstance(plan, TensorCorePlan):
        return whole
    adjoint, clusters = adjoint_of(cell), -(-batch // plan.rows)
    free = device.sm_count - clusters * plan.cluster
    area = cell.entry_width * (inner + 1)
    area += sum(p.width * cell.size_of(p.vector) for p in merged_products(adjoint))
    work = steps * batch * (area * SUM + adjoint.width * SPLIT)
    if clusters > device.resident(plan.cluster) or free < LEAST_FREE or (work < WORTHWHILE and not captured):
        return whole
    ratio = max(0.5, work * device.sm_count / free / (steps * plan.cost / CLOCK))
    if ratio > 1.5:
        return whole

    def cost(n: int) -> float:
        return work * ratio ** (n - 1) / sum(ratio**i for i in range(n)) + (n - 1) * LAUNCH

    best = min(range(1, min(MOST_CHUNKS, steps) + 1), key=cost)
    return Chunks(in_proportion(steps, [ratio**i for i in reversed(range(best))]), free)


def in_proportion(steps: int, parts: Sequence[float]) -> tuple[Chunk, ...]:
    """Whole steps in these proportions, at least one each."""
    ends, at = [], 0.0
    for i, part in enumerate(parts):
        at += part
        ends.append(min(max(round(steps * at / sum(parts)), i + 1), steps - (len(parts) - 1 - i)))
    return tuple(pairwise([0, *ends]))
