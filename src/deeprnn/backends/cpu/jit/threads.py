"""Threads that run machine code side by side: torch's own OpenMP threads where they can be had, else a few of ours.

After a product torch's OpenMP threads spin for some milliseconds in case there is more to do, on the very cores that
other threads would need. So the work goes to them, by the call that compilers emit for a parallel region
(`GOMP_parallel`), in the library that comes with torch. Ours, which wait in queues, serve where torch has another
OpenMP, and after a fork, which OpenMP's threads do not survive.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from deeprnn.backends.cpu.jit.tables import Call

_IN_USE = threading.Lock()
_WORKERS: list[_Worker] = []
_WORKERS_OF = _FIRST_PROCESS = os.getpid()


class _Worker(threading.Thread):
    """Takes jobs from its own queue, for ever."""

    def __init__(self) -> None:
        super().__init__(name="deeprnn-cpu", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self.jobs.get()()
            self.done.put(None)


def acquire() -> bool:
    """Take the threads if no other call has them; `release` must follow. Who does not get them computes alone."""
    return _IN_USE.acquire(blocking=False)


def release() -> None:
    """Let the next caller have the threads."""
    _IN_USE.release()


def in_openmp_region(region: int, call: Any, parts: int) -> bool:
    """Run machine code in as many of torch's threads; False where they cannot be had, and nothing has run."""
    library = openmp() if os.getpid() == _FIRST_PROCESS else None
    if library is None:
        return False
    call[Call.THREADS_MISSING] = 0
    call[Call.THREAD_COUNT], call[Call.THREAD_NUMBER] = _addresses(library)
    library.GOMP_parallel(region, ctypes.addressof(call), parts, 0)
    return not call[Call.THREADS_MISSING]


def in_own_threads(run: Callable[[int, int], None], call: Any, parts: int) -> None:
    """Run the parts of a call in threads of ours, the first in this one; machine code lets go of the interpreter."""
    address, workers = ctypes.addressof(call), _workers(parts - 1)
    for part, worker in enumerate(workers, start=1):
        worker.jobs.put(lambda part=part: run(address, part))
    run(address, 0)
    for worker in workers:
        worker.done.get()


def _workers(count: int) -> list[_Worker]:
    global _WORKERS_OF
    if os.getpid() != _WORKERS_OF:  # threads do not survive a fork
        _WORKERS.clear()
        _WORKERS_OF = os.getpid()
    while len(_WORKERS) < count:
        _WORKERS.append(_Worker())
    return _WORKERS[:count]


@lru_cache(maxsize=1)
def openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP that torch uses, None where it has another or none."""
    for path in _candidates():
        try:  # RTLD_NOLOAD: what is not loaded yet has no threads of torch's
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except (OSError, AttributeError):
            continue
        if hasattr(library, "GOMP_parallel"):
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            return library
    return None


def _candidates() -> Iterator[Path | str]:
    """Where torch's libgomp may lie: in its wheel, else wherever the system has it."""
    import torch

    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        yield from sorted(folder.glob("libgomp*.so*"))
    yield "libgomp.so.1"


@lru_cache(maxsize=1)
def _addresses(library: ctypes.CDLL) -> tuple[int, int]:
    """Of the functions that tell how many threads there are, and which one it is that asks."""
    count, number = (
        ctypes.cast(f, ctypes.c_void_p).value
        for f in (library.omp_get_num_threads, library.omp_get_thread_num)
    )
    assert count is not None
    assert number is not None
    return count, number


def _after_fork() -> None:
    """A child starts with the threads free, whoever held them in the parent."""
    global _IN_USE
    _IN_USE = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
