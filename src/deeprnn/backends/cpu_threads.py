"""A few waiting threads that run machine code side by side.

`team(n)` lends n threads (the caller is one of them) to one call at a time: a second caller, or a process
without a second core to use, is told so and runs its work alone. Code run here has let go of the
interpreter, so that ordinary Python threads do.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

_LENT = threading.Lock()
_TEAM: list[_Worker] = []
_OWNER = os.getpid()


class _Worker(threading.Thread):
    """Takes jobs from its own queue, for ever."""

    def __init__(self) -> None:
        super().__init__(name="deeprnn-cpu", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            try:
                job()
            except BaseException as error:  # noqa: BLE001  (handed to the caller, who raises it)
                self.done.put(error)
            else:
                self.done.put(None)


def borrow() -> bool:
    """Take the team if nobody has it; `give_back` must follow."""
    return _LENT.acquire(blocking=False)


def give_back() -> None:
    """Let the next caller have the team."""
    _LENT.release()


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs at the same time, the first one on this thread. The team must be borrowed."""
    workers = _workers(len(jobs) - 1)
    for worker, job in zip(workers, jobs[1:], strict=True):
        worker.jobs.put(job)
    try:
        jobs[0]()
    finally:
        errors = [worker.done.get() for worker in workers]
    for error in errors:
        if error is not None:
            raise error


def _workers(count: int) -> list[_Worker]:
    global _OWNER
    if os.getpid() != _OWNER:  # threads do not survive a fork
        _TEAM.clear()
        _OWNER = os.getpid()
    while len(_TEAM) < count:
        _TEAM.append(_Worker())
    return _TEAM[:count]


def _after_fork() -> None:
    """A child starts with the team free, whoever held it in the parent."""
    global _LENT
    _LENT = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
