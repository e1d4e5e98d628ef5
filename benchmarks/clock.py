"""What a call takes: the host's clock, the card's, and a CUDA graph of the call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


class Clock:
    """The card's clock; `dry`: the host's in its place, and nothing is captured or compared."""

    def __init__(self, dry: bool, calls: int = 15, seconds: float = 0.5):
        self.dry, self.calls, self.seconds = dry, calls, seconds

    def synchronize(self) -> None:
        import torch

        if not self.dry:
            torch.cuda.synchronize()

    def repeats(self, call: Callable[[], Any], most: int) -> int:
        """As many calls as fit the time, three at least."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return max(3, min(most, int(self.seconds / (time.perf_counter() - start))))

    def host(self, call: Callable[[], Any], after: Callable[[], None]) -> float:
        """µs of the host's for one call, with nothing in the queue before it."""
        times = []
        for _ in range(self.repeats(call, self.calls)):
            after()
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.synchronize()
        return round(1e6 * statistics.median(times), 1)

    def device(self, call: Callable[[], Any], after: Callable[[], None]) -> float:
        """µs by events for one of several calls in a row."""
        import torch

        times, calls = [], -(-self.repeats(call, self.calls) // 3)
        for _ in range(5 if calls == 5 else 3):
            after()
            self.synchronize()
            if self.dry:
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                times.append(1e6 * (time.perf_counter() - start) / calls)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / calls)
        return round(statistics.median(times), 1)

    def graph(self, call: Callable[[], Any]) -> Callable[[], None]:
        """The call, captured."""
        from deeprnn.training.cuda_graph import capture

        return call if self.dry else capture(call)[0].replay
