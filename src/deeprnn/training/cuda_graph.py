"""The update as one CUDA graph for each chunk length: an epoch runs without the host.

The epoch's order lies on the device: which rows of the table each step reads, and where each batch begins.
A graph takes the next beginning from a cursor, gathers its batch, updates, and moves the cursor on; the host
only says "replay the graph of this length" as often as there are updates.

Several trainers may share one GPU, each in a thread and on a stream of its own: a population of five at batch 1 fills
less than half of a large card, and a graph's replay leaves the host almost idle, so threads suffice. Capturing is the
delicate moment. A lock serialises it, on a stream of its own, in the mode that leaves other threads free to allocate.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deeprnn.data.plan import Batch, EpochPlan, bit_places, unpack
from deeprnn.training.updater import Updater

WARM_UP = 3
"""eager rounds before a capture: libraries choose algorithms and allocate then"""
SETUP = threading.Lock()
"""held while a trainer is built, warms up or captures: nothing of another thread's may be half captured then"""
_idle_streams: dict[int, list[torch.cuda.Stream]] = {}
"""by GPU: a stream belongs to one"""


@contextlib.contextmanager
def own_stream() -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else uses meanwhile.

    Streams are lent, not made anew: torch hands out the same 32 in turn, and the 33rd would be one on which
    another thread works, or worse, captures.
    """
    idle = _idle_streams.setdefault(torch.cuda.current_device(), [])
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream()
    try:
        yield stream
    finally:
        idle.append(stream)


@contextlib.contextmanager
def on_own_stream(device: torch.device | str) -> Iterator[None]:
    """Work of this thread on its own CUDA stream, so that small populations share the card; nothing on a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device.index or 0)
    with own_stream() as stream, torch.cuda.stream(stream):
        yield


def capture(
    work: Callable[[], Any], put_back: Callable[[], None] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Work as a CUDA graph, and the results that each replay overwrites.

    It is warmed up and captured on a stream of its own, in between `put_back` undoes what warming up changed.
    """
    current = torch.cuda.current_stream()
    with own_stream() as side:
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                work()
        current.wait_stream(side)
        put_back()
        current.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            results = work()
    return graph, results


class DevicePlan:
    """One plan in static buffers, so that graphs keep reading valid addresses from epoch to epoch.

    What `EpochPlan` makes of its rows batch by batch is made here once an epoch, so that a batch is few launches: at
    small batch sizes an update's time is the number of its kernels.
    """

    def __init__(self, plan: EpochPlan, device: torch.device) -> None:
        self.pitches = plan.pitches
        self.loaded: EpochPlan | None = None
        self.table = (plan.table if plan.pitches else plan.table.long()).to(device)
        room = plan.rows.shape[0] + 4 * max(plan.lengths)  # lanes end differently in another order
        self.index = torch.zeros(
            2, room, plan.lanes, dtype=torch.int32, device=device
        )  # rows of input and target
        self.marks = torch.zeros(2, room, plan.lanes, dtype=torch.bool, device=device)  # mask, reset
        self.starts = torch.zeros(len(plan) + 64, dtype=torch.int64, device=device)
        self.steps = torch.arange(max(plan.lengths), device=device)
        self.shifts = bit_places(device)
        self.load(plan)

    def fits(self, plan: EpochPlan) -> bool:
        """Whether another epoch's plan fits the buffers."""
        return plan.rows.shape[0] <= self.index.shape[1] and len(plan) <= len(self.starts)

    def load(self, plan: EpochPlan) -> None:
        """Take an epoch's order, and its table: songs may stand in other keys than before."""
        if plan is self.loaded:  # a text's, which is the same in every epoch
            return
        self.loaded = plan
        self.table.copy_(plan.table, non_blocking=True)
        rows = plan.rows.to(torch.int32)
        index = torch.stack([plan.inputs(rows, plan.reset), rows])
        self.index[:, : len(rows)].copy_(index, non_blocking=True)
        self.marks[:, : len(rows)].copy_(torch.stack([plan.mask, plan.reset]), non_blocking=True)
        self.starts[: len(plan)].copy_(torch.tensor(plan.starts), non_blocking=True)

    def batch(self, cursor: Tensor, length: int) -> Batch:
        """The batch at the cursor, gathered on the device: as `plan[i]` has it."""
        steps = self.starts.index_select(0, cursor.view(1)) + self.steps[:length]
        mask, reset = self.marks.index_select(1, steps)
        gathered = self.table[self.index.index_select(1, steps)]  # (2, length, B, ...)
        x, y = unpack(gathered, self.pitches, self.shifts) if self.pitches else gathered
        return Batch(x, y, mask, reset)


class GraphEngine:
    """Replays captured updates; a `training.engine.Engine`."""

    def __init__(self, updater: Updater) -> None:
        self.updater = updater
        self.plans: list[DevicePlan] = []
        self.lengths: tuple[int, ...] = ()
        self.cursor = torch.zeros((), dtype=torch.int64, device=updater.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.at = -1

    @property
    def length(self) -> int:
        """Updates of the epoch that is loaded."""
        return len(self.lengths)

    def load(self, plans: list[EpochPlan]) -> None:
        """Take an epoch's batches; buffers that have become too small are made anew, and graphs with them."""
        self.lengths = plans[0].lengths
        if not self.plans or not all(d.fits(p) for d, p in zip(self.plans, plans, strict=True)):
            self.graphs.clear()
            self.plans = [DevicePlan(plan, self.updater.device) for plan in plans]
        for device_plan, plan in zip(self.plans, plans, strict=True):
            device_plan.load(plan)
        self.at = -1

    def step(self, index: int) -> None:
        """One update of every member."""
        if index != self.at:  # the first update of an epoch, or of a resumed one
            self.cursor.fill_(index)
        length = self.lengths[index]
        if length not in self.graphs:
            self.graphs[length] = self._capture(length)
        self.graphs[length].replay()
        self.at = index + 1

    def _body(self, length: int) -> None:
        batches = [plan.batch(self.cursor, length) for plan in self.plans]
        if len(batches) > 1:  # each member its own songs: one batch with a leading population dimension
            batches = [Batch(*(torch.stack(parts) for parts in zip(*batches, strict=True)))]
        self.updater.update(batches)
        self.cursor.add_(1)

    def _capture(self, length: int) -> torch.cuda.CUDAGraph:
        """The update as a graph; no other thread captures or sets up meanwhile."""
        with SETUP:
            tensors = [*self.updater.tensors().values(), self.cursor]
            before = [t.clone() for t in tensors]

            def put_back() -> None:
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)

            return capture(lambda: self._body(length), put_back)[0]
