"""What runs an epoch's updates: plain calls on a CPU, CUDA graphs on a GPU (`cuda_graph.py`)."""

from __future__ import annotations

from typing import Protocol

from deeprnn.data.batching import EpochPlan
from deeprnn.training.updater import Updater


class Engine(Protocol):
    """What runs an epoch's updates."""

    @property
    def length(self) -> int:
        """Updates of the epoch that is loaded."""
        ...

    def load(self, plans: list[EpochPlan]) -> None:
        """Take an epoch's batches."""

    def step(self, index: int) -> None:
        """One update of every member."""


def engine_for(updater: Updater) -> Engine:
    """CUDA graphs on a GPU, plain calls elsewhere."""
    if updater.device.type == "cuda":
        from deeprnn.training.cuda_graph import GraphEngine

        return GraphEngine(updater)
    return Eager(updater)


class Eager:
    """Updates straight from the plan: the CPU's engine."""

    def __init__(self, updater: Updater) -> None:
        self.updater = updater
        self.plans: list[EpochPlan] = []

    @property
    def length(self) -> int:
        """Updates of the epoch that is loaded."""
        return len(self.plans[0])

    def load(self, plans: list[EpochPlan]) -> None:
        """Take an epoch's batches."""
        self.plans = plans

    def step(self, index: int) -> None:
        """One update of every member."""
        self.updater.update([plan[index] for plan in self.plans])
