"""The number of threads: chosen by what work takes, without a trace in what is trained."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training import threads
from deeprnn.training.loop import Trainer
from tests.training.toys import DEEP, music, recipe, text

IDLE = {1: 1.0, 2: 0.55, 4: 0.5, 8: 0.6}
BUSY = {1: 1.0, 2: 5.0, 4: 9.0, 8: 9.0}
LARGE = {1: 1.0, 2: 0.5, 4: 0.26, 8: 0.14}


@pytest.mark.parametrize(("took", "chosen"), [(IDLE, 2), (BUSY, 1), (LARGE, 8)])
def test_more_threads_are_used_where_they_pay(took, chosen):
    assert threads.fastest(list(took), took.__getitem__) == chosen


def test_the_first_call_of_a_count_does_not_count():
    """It compiles, and wakes threads."""
    seen: list[int] = []

    def seconds(count: int) -> float:
        seen.append(count)
        return 100.0 if seen.count(count) == 1 else {1: 1.0, 2: 0.5}[count]

    assert threads.fastest([1, 2], seconds) == 2


def test_a_hopeless_count_is_given_up_at_once():
    calls: list[int] = []

    def seconds(count: int) -> float:
        calls.append(count)
        return 1.0 if count == 1 else 50.0

    threads.fastest([1, 2], seconds)
    assert calls.count(2) == 2


@pytest.mark.parametrize(
    ("most", "cores", "expected"), [(1, 8, [1]), (8, 6, [1, 2, 4, 6]), (4, 64, [1, 2, 4])]
)
def test_counts_go_up_to_the_cores(monkeypatch, most, cores, expected):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert threads.candidates(most) == expected


@pytest.mark.parametrize("data", [music, text])
def test_measuring_leaves_no_trace(data, monkeypatch):
    """Parameters, optimiser, carried state, averages and sums are as before, and so is all that follows."""
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    settings = recipe(
        optimiser__name="adam", optimiser__rate=0.01, optimiser__average="ema", seeds=[1, 2], **DEEP
    )
    measured, plain = Trainer(settings, data()), Trainer(settings, data())
    before = torch.get_num_threads()
    updates = []
    real = measured.updater.update
    measured.updater.update = lambda batches: (updates.append(torch.get_num_threads()), real(batches))  # type: ignore
    assert threads.measure(measured, 2) in (1, 2)
    assert {1, 2} == set(updates)
    measured.updater.update = real  # type: ignore[method-assign]
    assert torch.get_num_threads() == before
    for trainer in (measured, plain):
        trainer.train()
    for name, value in plain.updater.tensors().items():
        assert torch.equal(value, measured.updater.tensors()[name]), name
    assert measured.results() == plain.results()
