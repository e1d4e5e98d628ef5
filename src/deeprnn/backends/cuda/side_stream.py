"""Work on a second stream, beside a kernel that leaves processors idle."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class _Stream(NamedTuple):
    stream: torch.cuda.Stream
    fork: torch.cuda.Event
    place: torch.cuda.Event
    join: torch.cuda.Event


@lru_cache(maxsize=64)
def _stream(device: int, main: int) -> _Stream:
    """One for each main stream: that of another thread may be in the middle of a capture."""
    return _Stream(torch.cuda.Stream(device), *(torch.cuda.Event() for _ in range(3)))


class SideStream:
    """Work that may begin where this is made although it is launched later; `join` makes the main stream wait for it.

    So a persistent kernel is launched first and takes the processors it needs. Tensors must outlive the work.
    """

    def __init__(self, device: torch.device):
        self.side = None
        if device.type == "cuda":
            self.main = torch.cuda.current_stream(device)
            self.side = _stream(self.main.device_index, self.main.cuda_stream)
            self.side.fork.record(self.main)

    def fork(self) -> int | None:
        """The address of the stream on which to launch; None without a GPU."""
        if self.side is None:
            return None
        self.side.stream.wait_event(self.side.fork)
        return self.side.stream.cuda_stream

    def mark(self) -> None:
        """Remember how far the side stream is."""
        if self.side is not None:
            self.side.place.record(self.side.stream)

    def wait_for_mark(self) -> None:
        """What is launched on the main stream from here on waits for what was launched before the mark."""
        if self.side is not None:
            self.main.wait_event(self.side.place)

    def join(self) -> None:
        """What is launched on the main stream from here on waits for all of it."""
        if self.side is not None:
            self.side.join.record(self.side.stream)
            self.main.wait_event(self.side.join)
