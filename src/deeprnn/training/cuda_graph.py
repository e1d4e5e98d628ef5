"""The update as one CUDA graph for each chunk length: an epoch runs without the host.

The epoch's order lies on the device: which rows of the table each step reads, and where each batch begins.
A graph takes the next beginning from a cursor, gathers its batch, updates, and moves the cursor on; the host
only says "replay the graph of this length" as often as there are updates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeprnn.data.batching import Batch, Plan
from deeprnn.training.updater import Updater

WARM_UP = 3
"""eager rounds before a capture: libraries choose algorithms and allocate then"""


class DevicePlan:
    """One plan in static buffers, so that graphs keep reading valid addresses from epoch to epoch."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.pitches = plan.pitches
        self.table = plan.table.to(device)
        room = plan.rows.shape[0] + 4 * max(plan.lengths)  # lanes end differently in another order
        self.rows = torch.zeros(room, plan.lanes, dtype=plan.rows.dtype, device=device)
        self.mask = torch.zeros(room, plan.lanes, dtype=torch.bool, device=device)
        self.reset = torch.zeros(room, plan.lanes, dtype=torch.bool, device=device)
        self.starts = torch.zeros(len(plan) + 64, dtype=torch.int64, device=device)
        self.load(plan)

    def fits(self, plan: Plan) -> bool:
        """Whether another epoch's plan fits the buffers."""
        return plan.rows.shape[0] <= len(self.rows) and len(plan) <= len(self.starts)

    def load(self, plan: Plan) -> None:
        """Take an epoch's order."""
        steps = plan.rows.shape[0]
        for name in ("rows", "mask", "reset"):
            getattr(self, name)[:steps].copy_(getattr(plan, name), non_blocking=True)
        self.starts[: len(plan)].copy_(torch.tensor(plan.starts), non_blocking=True)

    def batch(self, cursor: Tensor, length: int) -> Batch:
        """The batch at the cursor, gathered on the device."""
        steps = self.starts.index_select(0, cursor.view(1)) + torch.arange(length, device=cursor.device)
        rows, mask, reset = self.rows[steps], self.mask[steps], self.reset[steps]
        view = Plan(self.table, rows, mask, reset, (0,), (length,), self.pitches)
        return view[0]


class GraphEngine:
    """Replays captured updates; has the interface of `loop.Eager`."""

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

    def load(self, plans: list[Plan]) -> None:
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
        """Warm up on a side stream, put back what that changed, then capture."""
        tensors = [*self.updater.tensors().values(), self.cursor]
        before = [t.clone() for t in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._body(length)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body(length)
        return graph
