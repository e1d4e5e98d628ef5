"""Engines: where pieces of work run, on this machine or on an existing cluster.

An engine takes functions, runs so many at once and gives back futures. What they say meanwhile, and what is said to
them, goes over its board.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from deeprnn.errors import UserError

Name = Literal["local", "ray"]
INTERRUPT_POLL = 0.5
"""seconds between two questions over a wire whether everybody shall stop"""


class WorkerLost(Exception):
    """The worker or the machine that ran a piece of work is gone; the work itself did nothing wrong."""


class Board:
    """What workers tell, and whom of them shall stop: one object that all can reach."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[tuple[int, Sequence[Mapping[str, Any] | None]]] = []
        self._stops: dict[int, list[int]] = {}
        self._interrupted, self._why = False, ""

    def report(self, task: int, rows: Sequence[Mapping[str, Any] | None]) -> list[int]:
        """A worker's lines; the members of its task that shall stop."""
        with self._lock:
            self._lines.append((task, rows))
            return list(self._stops.get(task, ()))

    def drain(self) -> list[tuple[int, Sequence[Mapping[str, Any] | None]]]:
        """All that was told since the last time."""
        with self._lock:
            lines, self._lines = self._lines, []
            return lines

    def stop(self, task: int, members: Sequence[int]) -> None:
        """Let these members of a task stop when it next reports."""
        with self._lock:
            self._stops.setdefault(task, []).extend(members)

    def interrupt(self, why: str = "") -> None:
        """Let everybody save and stop."""
        self._why, self._interrupted = why, True

    def interrupted(self) -> bool:
        """Whether everybody shall stop."""
        return self._interrupted

    def why(self) -> str:
        """The reason given with `interrupt`."""
        return self._why


class InterruptFlag(Sequence[int]):
    """Whether everybody shall stop, as `RunSaver` reads it: empty, or a signal's number."""

    def __init__(self, interrupted: Callable[[], bool], pause: float = 0.0) -> None:
        self.interrupted, self.pause = interrupted, pause
        self.raised, self.next_poll = False, 0.0

    def __len__(self) -> int:
        now = time.monotonic()
        if not self.raised and now >= self.next_poll:
            self.raised, self.next_poll = self.interrupted(), now + self.pause
        return int(self.raised)

    def __getitem__(self, index: Any) -> Any:
        import signal

        return int(signal.SIGTERM)


class Engine(Protocol):
    """Runs pieces of work."""

    slots: int
    """how many run at once"""

    @property
    def board(self) -> Any:
        """A `Board`, or what stands for it here."""
        ...

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin with `work(board, device, *arguments)`; `WorkerLost` where its worker dies."""
        ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *error: object) -> None: ...


def make_engine(name: str, device: str, jobs: int | None = None, address: str = "") -> Engine:
    """The engine of that name."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {jobs}")
    if name == "ray":
        from deeprnn.sweeps.engines.on_ray import RayEngine

        return RayEngine(address, device, jobs)
    if address:
        raise UserError(f"--address {address} is for --engine ray")
    from deeprnn.sweeps.engines.local import LocalEngine

    return LocalEngine(device, jobs)
