"""Backward in stretches of the sequence: sums over the rows of one stretch are taken beside the loop over the next.

Seven clusters of 13 leave 41 of an H200's 132 processors idle. The loop goes from the last stretch to the first, each
a launch of its own that begins with what the one before it left in dA, so dA is that of one launch but for rounding.
The sums follow on a second stream, in one wave of blocks, so that none waits for a processor that the loop is about to
take. For large batches alone: every launch costs time. It costs the host's too, unless a CUDA graph is captured: then
smaller batches gain as well.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from deeprnn.backends.cuda.planning import Device, make_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeprnn.backends import TransitionSpec

Stretch = tuple[int, int]  # first step, one past the last
MOST = 3  # stretches
LEAST_FREE = 24  # processors: beside fewer the sums would outlast the loop
CLOCK = 1980  # cycles a µs
WORTH = 250.0  # µs of sums from which on it pays without a graph
START = 34.0  # µs of a further launch, at most: measured when a look of its own came before it
SUM, CUT = 7.9e-9, 2.05e-6  # µs (H200) for each number of a gradient and row, and for cutting a number of dA


class Cutting(NamedTuple):
    """Stretches in the order of time, and the processors that are idle beside the loop."""

    stretches: tuple[Stretch, ...]
    free: int


@lru_cache(maxsize=1024)
def cutting(
    spec: TransitionSpec, steps: int, batch: int, inner: int, bf16: bool, device: Device, captured: bool
) -> Cutting:
    """As many stretches as pay; each as long as the sums of the one before it in the loop take beside it."""
    plan, whole = make_plan(spec, batch, 1, bf16, True, device), Cutting(((0, steps),), 0)
    clusters = -(-batch // plan.rows)
    free = device.processors - clusters * plan.cluster
    seen = sum(m for l, m in enumerate(spec.sizes) if l == 0 or spec.shortcuts[l])
    area = spec.total * (inner + 1) + seen * spec.hidden_size + sum(a * b for a, b in pairwise(spec.sizes))
    work = steps * batch * (area * SUM + spec.total * CUT)
    if plan.path != "mma" or clusters > device.resident(plan.cluster) or free < LEAST_FREE:
        return whole
    if work < WORTH and not captured:
        return whole
    ratio = max(0.5, work * device.processors / free / (steps * plan.cost / CLOCK))
    if ratio > 1.5:
        return whole

    def cost(n: int) -> float:
        return work * ratio ** (n - 1) / sum(ratio**i for i in range(n)) + (n - 1) * START

    best = min(range(1, min(MOST, steps) + 1), key=cost)
    return Cutting(in_parts(steps, [ratio**i for i in reversed(range(best))]), free)


def in_parts(steps: int, parts: Sequence[float]) -> tuple[Stretch, ...]:
    """Whole steps in these proportions, at least one each."""
    ends, at = [], 0.0
    for i, part in enumerate(parts):
        at += part
        ends.append(min(max(round(steps * at / sum(parts)), i + 1), steps - (len(parts) - 1 - i)))
    return tuple(pairwise([0, *ends]))
