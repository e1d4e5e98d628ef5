"""This machine: threads that share the GPUs, or processes that share the CPU's cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from multiprocessing.managers import BaseManager
from typing import Any

from deeprnn.sweeps.engines import Board, Lost
from deeprnn.training import threads

SWITCH = 2e-4
"""seconds between turns: a thread that only replays graphs must not wait long for one that computes"""
WATCH = 0.5
"""seconds between two looks whether the parent still lives"""


class _Manager(BaseManager):
    """Keeps the board for worker processes."""


_Manager.register("Board", Board)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalEngine:
    """Work in this process where it runs one at a time or on GPUs, else in processes of a share of the cores each.

    On GPUs work runs in threads, each on a stream of its own: what is replayed there leaves the host almost idle, and
    processes would take turns at a card.
    """

    def __init__(self, device: str, jobs: int | None = None) -> None:
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.devices = _gpus(device) if self.on_gpu else [device]
        self.slots = jobs or (2 * len(self.devices) if self.on_gpu else cores())
        self.processes = self.slots > 1 and not self.on_gpu
        self.turn = count()
        self.pool: Executor | None = None
        self.manager: _Manager | None = None
        self.board: Any = Board()

    def __enter__(self) -> LocalEngine:
        self.switch = sys.getswitchinterval()
        if self.on_gpu:
            sys.setswitchinterval(SWITCH)
        if self.processes:
            self.manager = _Manager(ctx=multiprocessing.get_context("spawn"))
            self.manager.start(_follow_parent, (os.getpid(),))
            self.board = self.manager.Board()  # type: ignore[attr-defined]
        return self

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """In the next free thread or process."""
        if self.pool is None:
            self.pool = self._new_pool()
        device = self.devices[next(self.turn) % len(self.devices)]
        try:
            inner = self.pool.submit(work, self.board, device, *arguments)
        except BrokenProcessPool:  # a worker died: a new pool for what comes
            self.pool.shutdown(wait=False)
            self.pool = self._new_pool()
            inner = self.pool.submit(work, self.board, device, *arguments)
        return _explained(inner)

    def _new_pool(self) -> Executor:
        if not self.processes:
            return ThreadPoolExecutor(self.slots, thread_name_prefix="pack")
        return ProcessPoolExecutor(
            self.slots,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_enter,
            initargs=(os.getpid(), max(1, cores() // self.slots)),
        )

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        if self.manager is not None:
            self.manager.shutdown()
        sys.setswitchinterval(self.switch)


def _gpus(device: str) -> list[str]:
    """One GPU where one is named, all of them otherwise."""
    import torch

    if ":" in device:
        return [device]
    return [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]


def _explained(inner: Future[Any]) -> Future[Any]:
    """The same future, but a worker's death is `Lost`."""
    outer: Future[Any] = Future()
    outer.set_running_or_notify_cancel()

    def pass_on(done: Future[Any]) -> None:
        if done.cancelled():
            outer.set_exception(Lost("cancelled"))
            return
        error = done.exception()
        if isinstance(error, BrokenProcessPool):
            outer.set_exception(Lost("a worker process died: it was killed, or memory ran out"))
        elif error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())

    inner.add_done_callback(pass_on)
    return outer


# ---- in a process of its own


def _enter(parent: int, thread_count: int) -> None:
    _follow_parent(parent)
    threads.limit(thread_count)


def _follow_parent(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it, even where it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
