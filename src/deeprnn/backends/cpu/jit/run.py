"""Runs the compiled programs of `cpu_jit.py`: packs the weights, shares the work among threads.

Threads take members of a population, or rows of the batch; with few rows they may instead work in step on
the columns of every layer, which wins on idle cores and loses on busy ones, so the two are timed against
each other as training goes on. Sharing never changes a bit of the result.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.cpu.jit import compile as cpu_jit
from deeprnn.backends.cpu.jit import threads as cpu_threads
from deeprnn.backends.cpu.jit.plan import Plan

TALLEST = 8  # rows of a tile
WORK_PER_THREAD = 2_000_000  # multiplications below which a second thread costs more than it brings
ROWS_PER_THREAD = 6  # from here on rows alone reach the processor's peak


def forward(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    reset: Tensor | None,
    units: Sequence[str],
    shortcuts: Sequence[bool],
    h: Tensor,
    z: Tensor,
) -> None:
    """Fill h ([P,] T, B, H) and z ([P,] T, B, ΣM - H)."""
    Call(_plan(W, units, shortcuts, h, reset), False, (A, h0, h, z), W, S, reset, h).run()


def backward(
    dh: Tensor,
    dz: Tensor | None,
    h: Tensor,
    z: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    reset: Tensor | None,
    units: Sequence[str],
    shortcuts: Sequence[bool],
    dA: Tensor,
    dh0: Tensor,
) -> None:
    """Fill dA ([P,] T, B, ΣM) and dh0 ([P,] B, H)."""
    if h.shape[-3] == 0:
        dh0.zero_()
        return
    plan = _plan(W, units, shortcuts, h, reset, dz is not None)
    Call(plan, True, (dh, dz, h, z, dA, dh0), W, S, reset, h).run()


def _plan(
    W: Sequence[Tensor],
    units: Sequence[str],
    shortcuts: Sequence[bool],
    h: Tensor,
    reset: Tensor | None,
    z_gradient: bool = True,
) -> Plan:
    _, _, vector_bytes, registers = cpu_jit.machine()
    return Plan(
        sizes=tuple(w.shape[-2] for w in W),
        units=tuple(units),
        shortcuts=tuple(shortcuts),
        double=h.dtype == torch.float64,
        heights=(1,),
        parts=1,
        reset=reset is not None,
        z_gradient=z_gradient,
        lanes=vector_bytes // h.element_size(),
        registers=registers,
    )


class Race:
    """Which of several ways was fastest of late: each is tried twice, later again now and then."""

    AGAIN = 48  # calls between two looks at a slower way

    def __init__(self) -> None:
        self.times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))
        self.calls = 0

    def pick(self, ways: Sequence[str]) -> str:
        """The way to go this time."""
        self.calls += 1
        untried = [way for way in ways if len(self.times[way]) < 2]
        if untried:
            return untried[0]
        best = min(ways, key=lambda way: min(self.times[way]))
        others = [way for way in ways if way != best]
        if others and self.calls % self.AGAIN == 0:
            return others[self.calls // self.AGAIN % len(others)]
        return best


_RACES: defaultdict[Any, Race] = defaultdict(Race)


@dataclass
class Call:
    """One pass over all steps: the arguments, and how they are shared among threads."""

    plan: Plan
    backward: bool
    tensors: Sequence[Tensor | None]
    W: Sequence[Tensor]
    S: Sequence[Tensor]
    reset: Tensor | None
    h: Tensor

    def __post_init__(self) -> None:
        self.T, self.B = self.h.shape[-3:-1]
        self.P = self.h.shape[0] if self.h.dim() == 4 else 1

    def run(self) -> None:
        """Choose the threads and the way they share, and go."""
        if self.h.numel() == 0:
            return
        work = self.P * self.T * self.B * sum(w.shape[-1] * w.shape[-2] for w in (*self.W, *self.S))
        threads = min(torch.get_num_threads(), max(1, work // WORK_PER_THREAD))
        if threads == 1 or not cpu_threads.borrow():
            self._go("rows", 1)
            return
        try:
            if self.P > 1 or ROWS_PER_THREAD * threads <= self.B:
                self._go("rows", threads)
                return
            race = _RACES[self.plan, self.backward, self.B, threads]
            way = race.pick(("columns", "rows"))
            race.times[way].append(self._go(way, threads) / self.T)
        finally:
            cpu_threads.give_back()

    def _go(self, way: str, threads: int) -> float:
        """Cut the work by members and rows, or by columns; the seconds it took."""
        crews = 1 if way == "columns" or threads <= self.P else min(threads, self.B)
        cut = prepare(self.plan, self.backward, self.B, crews, threads if way == "columns" else 1)
        began = time.perf_counter()
        weights = pack(cut, self.W, self.S, self.P)
        scratch = torch.zeros(cut.plan.sizes[-1] + 16, dtype=torch.float64)  # a row of zeros and the counter

        def piece(member: int, first: int, rows: int, part: int) -> Callable[[], None]:
            pointers = [_address(x, member, self.P) for x in self.tensors]
            own_marks = self.reset is not None and self.reset.dim() == 3
            marks = _address(self.reset, member, self.P if own_marks else 1)
            places = (marks, _address(weights, member, self.P), scratch.data_ptr(), scratch[-8:].data_ptr())
            return partial(cut.function, *pointers, *places, self.T, self.B, first, *cut.tiles(rows), part)

        if way == "columns":
            cpu_threads.together([piece(0, 0, self.B, part) for part in range(threads)])
            return time.perf_counter() - began
        edges = [crew * self.B // crews for crew in range(crews + 1)]
        jobs = [
            piece(member, first, stop - first, 0)
            for member in range(self.P)
            for first, stop in pairwise(edges)
        ]
        threads = min(threads, len(jobs))
        cpu_threads.together([partial(_in_turn, jobs[i::threads]) for i in range(threads)])
        return time.perf_counter() - began


@dataclass(frozen=True)
class Cut:
    """What depends on shapes alone: the function, its tiles, and how each matrix is packed."""

    plan: Plan
    function: Any
    blocks: int
    packing: Any
    copies: tuple[tuple[str, int, int, tuple[int, ...]], ...]  # matrix, layer, place, numbers for packing
    size: int  # of the packed weights

    def tiles(self, rows: int) -> tuple[int, int]:
        """How many tall and how many short tiles make up these rows."""
        if len(self.plan.heights) == 1:
            return self.blocks, 0
        tall = rows - self.blocks * self.plan.heights[1]
        return tall, self.blocks - tall


@lru_cache(maxsize=512)
def prepare(plan: Plan, backward: bool, B: int, crews: int, parts: int) -> Cut:
    """Cut B rows for so many crews, or every layer's columns into parts, and compile for that."""
    blocks = math.ceil(math.ceil(B / crews) / TALLEST)
    short = max(1, B // crews // blocks)
    heights = (short,) if B % (crews * blocks) == 0 else (short + 1, short)
    plan = replace(plan, parts=parts, heights=heights)
    products = plan.products(backward)
    copies = []
    for product in products:
        panels, above = product.panels, 0
        for kind, layer, depth in product.terms:
            shape = (panels.columns, panels.count, panels.width, panels.wide, depth)
            copies.append((kind, layer, product.offset, (*shape, above, product.depth - above - depth)))
            above += depth
    packing = cpu_jit.packing(plan.double, plan.lanes, not backward)
    function = cpu_jit.compiled(plan, backward)
    return Cut(plan, function, blocks, packing, tuple(copies), sum(product.size for product in products))


def _in_turn(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _address(tensor: Tensor | None, member: int, members: int) -> int:
    if tensor is None:
        return 0
    skip = 0 if members == 1 else member * tensor.stride(0) * tensor.element_size()
    return tensor.data_ptr() + skip


def pack(cut: Cut, W: Sequence[Tensor], S: Sequence[Tensor], P: int) -> Tensor:
    """The weights of every member in the order the program reads them: product, panel, k, column."""
    matrices: dict[tuple[str, int], Tensor] = {("W", l): w for l, w in enumerate(W)}
    layers = [l for l, shortcut in enumerate(cut.plan.shortcuts) if shortcut]
    matrices |= {("S", l): s for l, s in zip(layers, S, strict=True)}
    packed = W[0].new_empty(P, cut.size)
    for member in range(P):
        start = _address(packed, member, P)
        for kind, layer, offset, numbers in cut.copies:
            matrix = matrices[kind, layer]
            source, target = _address(matrix, member, P), start + offset * packed.element_size()
            cut.packing(source, target, *numbers, matrix.shape[-1])
    return packed
