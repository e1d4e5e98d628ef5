"""How many CPU threads train: measured on the machine as it is when a run begins, and kept for the whole run.

Threads that work in step wait for the slowest of them. On an idle machine two can be nearly twice as fast as one,
beside another process that takes a core five times slower. So each further thread has to earn its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

GAIN = 1.25
"""how many times faster more threads must be than fewer: the machine may be busier later"""
ROUNDS = 3
SECONDS = 2.0
"""after which no further round is begun"""


def limit(threads: int) -> None:
    """Let torch, and numpy's products where that can be done, use so many CPU threads."""
    torch.set_num_threads(threads)
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:  # then numpy keeps to the environment; the command sets that before numpy is loaded
        return
    threadpool_limits(threads, user_api="blas")


def measure(trainer: Trainer, most: int) -> int:
    """Choose up to `most` threads for a trainer on the CPU by some of its own updates, which leave no trace."""
    counts = candidates(most)
    if len(counts) == 1:
        return counts[0]
    plans = trainer.plans(trainer.epoch)
    batches = [plan[min(trainer.index, len(plan) - 1)] for plan in plans]

    def update(threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        trainer.updater.update(batches)
        return time.perf_counter() - began

    before = torch.get_num_threads()
    saved = [(tensor, tensor.clone()) for tensor in trainer.updater.tensors().values()]
    try:
        return fastest(counts, update)
    finally:
        torch.set_num_threads(before)
        for tensor, value in saved:
            tensor.copy_(value)


def of_several(most: int, processes: int) -> int:
    """The threads of each of several processes on a machine: no more than its share of the cores."""
    return max(1, min(most, candidates(most)[-1] // processes))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def candidates(most: int) -> list[int]:
    """1, 2, 4, … up to `most`, or to the cores this process may use if they are fewer."""
    most = max(1, min(cores(), most))
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


def fastest(counts: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The least count that no larger one beats by `GAIN`; `seconds` does a piece of work with so many threads."""
    chosen, best = counts[0], _mean(counts[0], seconds)
    for count in counts[1:]:
        took = _mean(count, seconds, hopeless=2 * best)
        if took * GAIN < best:
            chosen, best = count, took
    return chosen


def _mean(count: int, seconds: Callable[[int], float], hopeless: float = float("inf")) -> float:
    """Seconds that the work takes on average; the first time, which may compile or wake threads, does not count."""
    seconds(count)
    times: list[float] = []
    while len(times) < ROUNDS and sum(times) < SECONDS:
        times.append(seconds(count))
        if times[-1] > hopeless:
            break
    return sum(times) / len(times)
