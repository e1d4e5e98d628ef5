"""How a call's work is shared among threads: members and rows, or the units of every stage.

Threads that take rows never wait for each other, but each reads all the weights. Threads that take units read only
their share, which may stay in their own cache, and meet at a barrier after each stage: that wins with few rows on idle
cores and loses on busy ones, so the two are timed against each other. Sharing never changes a bit of a result.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from deeprnn.backends.cpu.jit import threads
from deeprnn.backends.cpu.jit.tables import TALLEST

WORK_PER_THREAD = 4_000_000
"""multiplications, some 80 µs at a core's peak, below which a second thread costs more than it brings: where other
programs keep the cores busy, waiting for it takes milliseconds"""
ROWS_PER_THREAD = 6
"""from here on threads that take rows reach the processor's peak"""
UNPACKED_PASSES = 3
"""passes over the weights up to which it is cheaper to read them as they are than to pack them first"""


class WorkSplit(NamedTuple):
    """How the work of a call is shared."""

    batch: int
    parts: int = 1
    """threads"""
    by_columns: bool = False
    """whether threads share the units of every stage, else members and rows"""
    row_parts: int = 1
    unpacked: bool = False
    """whether matrices are read as they are"""

    @property
    def blocks(self) -> int:
        """Row blocks of a share."""
        return math.ceil(math.ceil(self.batch / self.row_parts) / TALLEST)

    @property
    def height(self) -> int:
        """Rows of a block; some blocks may be one row taller."""
        return max(1, self.batch // self.row_parts // self.blocks)

    @property
    def heights(self) -> list[int]:
        """The heights that occur, the taller first."""
        exact = self.batch % (self.row_parts * self.blocks) == 0
        return [self.height] if exact else [self.height + 1, self.height]


class MeasuredChoice:
    """Which of several ways was fastest of late: each is tried twice, the slower ones again now and then."""

    RETRY_AFTER = 48
    """calls"""

    def __init__(self) -> None:
        self.times: defaultdict[WorkSplit, deque[float]] = defaultdict(lambda: deque(maxlen=3))
        self.calls = 0

    def pick(self, ways: Sequence[WorkSplit]) -> WorkSplit:
        """The way to take this time."""
        self.calls += 1
        untried = [way for way in ways if len(self.times[way]) < 2]
        if untried:
            return untried[0]
        best = min(ways, key=lambda way: min(self.times[way]))
        others = [way for way in ways if way != best]
        if self.calls % self.RETRY_AFTER == 0:
            return others[self.calls // self.RETRY_AFTER % len(others)]
        return best


_CHOICES: defaultdict[Hashable, MeasuredChoice] = defaultdict(MeasuredChoice)


def threads_that_pay(work: int) -> int:
    """Threads for so many multiplications; one or less: no second one."""
    return min(torch.get_num_threads(), work // WORK_PER_THREAD)


def share(
    case: Hashable, batch: int, members: int, work: int, passes: int, run: Callable[[WorkSplit], None]
) -> None:
    """Run a call, by as many threads as pay.

    `work` is its multiplications, `passes` how often it would read unpacked weights (0: it cannot), and `case` what
    besides the batch decides which way is faster.
    """
    unpacked = 0 < passes * -(-batch // TALLEST) <= UNPACKED_PASSES
    count = threads_that_pay(work)
    if count < 2 or not threads.acquire():
        run(WorkSplit(batch, unpacked=unpacked))
        return
    try:
        ways = sharings(batch, members, count, unpacked)
        if len(ways) == 1:
            run(ways[0])
            return
        choice = _CHOICES[case, batch, count]
        way = choice.pick(ways)
        began = time.perf_counter()
        run(way)
        choice.times[way].append((time.perf_counter() - began) / work)
    finally:
        threads.release()


def share_freely(work: int, run: Callable[[int], None]) -> None:
    """Run a call whose parts do not wait for each other, by as many threads as pay; `work` as in `share`."""
    count = threads_that_pay(work)
    if count < 2 or not threads.acquire():
        run(1)
        return
    try:
        run(count)
    finally:
        threads.release()


def sharings(batch: int, members: int, count: int, unpacked: bool) -> list[WorkSplit]:
    """The ways that may be fastest."""
    shares = 1 if count <= members else min(count, batch)
    by_rows = WorkSplit(batch, min(count, members * shares), row_parts=shares, unpacked=unpacked)
    if members > 1 or ROWS_PER_THREAD * count <= batch:
        return [by_rows]
    return [WorkSplit(batch, count, by_columns=True, unpacked=unpacked), by_rows]
