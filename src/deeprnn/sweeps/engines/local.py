"""This machine: threads that share the GPUs, or processes that share the CPU's cores."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from multiprocessing.managers import BaseManager
from typing import Any

from deeprnn.sweeps.engines import Board, WorkerLost
from deeprnn.training import threads

SWITCH = 2e-4
"""seconds between turns: a thread that only replays graphs must not wait long for one that computes"""
WATCH = 0.5
"""seconds between two looks whether the parent still lives"""


class _Manager(BaseManager):
    """Keeps the board for worker processes."""


_Manager.register("Board", Board)


class LocalEngine:
    """Work in this process where it runs one at a time or on GPUs, else in processes of a share of the cores each.

    On GPUs work runs in threads, each on a stream of its own: what is replayed there leaves the host almost idle, and
    processes would take turns at a card.
    """

    def __init__(self, device: str, jobs: int | None = None) -> None:
        self.device = device
        self.on_gpu = device.startswith("cuda")
        self.devices = _gpus(device) if self.on_gpu else [device]
        self.slots = jobs or (2 * len(self.devices) if self.on_gpu else threads.cores())
        self.processes = self.slots > 1 and not self.on_gpu
        self.turn = count()
        self.pool: ThreadPoolExecutor | None = None
        self.idle: list[ProcessPoolExecutor] = []
        self.workers: dict[ProcessPoolExecutor, Future[int]] = {}
        """one process each, and its number: the death of one is then nobody else's"""
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
        device = self.devices[next(self.turn) % len(self.devices)]
        if self.processes:
            return self._in_process(work, self.board, device, *arguments)
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.slots, thread_name_prefix="pack")
        return self.pool.submit(work, self.board, device, *arguments)

    def _in_process(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        while True:
            worker = self.idle.pop() if self.idle else self._new_worker()
            try:
                inner = worker.submit(work, *arguments)
                break
            except BrokenProcessPool:  # it was killed while it had nothing to do
                self.workers.pop(worker, None)
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()

        def ended(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, BrokenProcessPool):
                self.workers.pop(worker, None)
                outer.set_exception(WorkerLost("a worker process died: it was killed, or memory ran out"))
                return
            self.idle.append(worker)
            if error is not None:
                outer.set_exception(error)
            else:
                outer.set_result(done.result())

        inner.add_done_callback(ended)
        return outer

    def _new_worker(self) -> ProcessPoolExecutor:
        worker = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_enter,
            initargs=(os.getpid(), max(1, threads.cores() // self.slots)),
        )
        self.workers[worker] = worker.submit(os.getpid)
        return worker

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], KeyboardInterrupt):
            self._kill()
        for pool in (*self.workers, *([self.pool] if self.pool else [])):
            pool.shutdown(wait=True)
        if self.manager is not None:
            self.manager.shutdown()
        sys.setswitchinterval(self.switch)

    def _kill(self) -> None:
        """End workers that were asked to save and stop, and hang: nobody waits for them any more."""
        for number in [*self.workers.values()]:
            if number.done() and number.exception() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number.result(), signal.SIGKILL)


def _gpus(device: str) -> list[str]:
    """One GPU where one is named, all of them otherwise."""
    import torch

    if ":" in device:
        return [device]
    return [f"cuda:{index}" for index in range(max(1, torch.cuda.device_count()))]


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
