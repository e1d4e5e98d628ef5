"""Several populations on one GPU at once: each in a thread, on its own stream, with its own CUDA graphs.

A population of five at batch 1 fills less than half of a large card, and a graph's replay leaves the host
almost idle, so threads suffice. Capturing is the delicate moment: it is serialised by a lock, on a stream
of its own, in the mode that leaves the other threads free to allocate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deeprnn.training.cuda_graph import WARM_UP, GraphEngine
from deeprnn.training.updater import Updater

_IDLE: dict[int, list[torch.cuda.Stream]] = {}
"""by GPU: a stream belongs to one"""


@contextmanager
def own_stream() -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else uses meanwhile.

    Streams are lent, not made anew: torch hands out the same 32 in turn, and the 33rd would be one on which
    another thread works, or worse, captures.
    """
    idle = _IDLE.setdefault(torch.cuda.current_device(), [])
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.cuda.Stream()
    try:
        yield stream
    finally:
        idle.append(stream)


class ConcurrentEngine(GraphEngine):
    """A graph engine that captures beside other threads."""

    def __init__(self, updater: Updater, setup: threading.Lock) -> None:
        super().__init__(updater)
        self.setup = setup

    def _capture(self, length: int) -> torch.cuda.CUDAGraph:
        """Warm up, put back what that changed, then capture: all of it while no other thread does."""
        current = torch.cuda.current_stream()
        with self.setup, own_stream() as side:
            tensors = [*self.updater.tensors().values(), self.cursor]
            before = [t.clone() for t in tensors]
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._body(length)
            current.wait_stream(side)
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            current.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._body(length)
        return graph
