"""Threads that run machine code side by side: torch's own where they can be had, else a few of ours.

`borrow` lends them to one call at a time: a second caller, or a process without a second core to use, is told so and
runs its work alone. Code run here has let go of the interpreter.

After a product torch's OpenMP threads spin for some milliseconds in case there is more to do, on the very cores that
other threads would need. So the work goes to them, by the call that compilers emit for a parallel region. Ours, which
wait in queues, serve without GNU's OpenMP and after a fork, which it does not survive.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

_LENT = threading.Lock()
_TEAM: list[_Worker] = []
_OWNER = _FIRST = os.getpid()
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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
    if len(jobs) == 1:
        jobs[0]()
    elif not _in_region(jobs):
        _in_queues(jobs)


def _in_region(jobs: Sequence[Callable[[], None]]) -> bool:
    """By torch's threads, one job each; False where they cannot be had, and nothing has run."""
    library = openmp() if os.getpid() == _FIRST else None
    if library is None:
        return False
    errors: list[BaseException] = []
    short: list[int] = []

    def run(_: int | None) -> None:
        if library.omp_get_num_threads() != len(jobs):  # jobs may wait for each other: all or none
            short.append(1)
            return
        try:
            jobs[library.omp_get_thread_num()]()
        except BaseException as error:  # noqa: BLE001  (no exception may leave this function: raised below)
            errors.append(error)

    library.GOMP_parallel(_Region(run), None, len(jobs), 0)
    if errors:
        raise errors[0]
    return not short


def _in_queues(jobs: Sequence[Callable[[], None]]) -> None:
    """By our threads."""
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


@lru_cache(maxsize=1)
def openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP that torch has loaded, None where it has another or none."""
    import torch

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    path = _own_copy(maps, Path(torch.__file__).parent)
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.GOMP_parallel.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    return library


def _own_copy(maps: str, torch: Path) -> str | None:
    """The library in torch's wheel, else the only one that is loaded: each copy has threads of its own."""
    paths = sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line})
    own = [path for path in paths if path.startswith((f"{torch}/", f"{torch}.libs/"))]
    found = own or paths
    return found[0] if len(found) == 1 else None


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
