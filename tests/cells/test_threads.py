"""Threads that use one layer at the same time: first calls, in which the step is read, change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deeprnn
from deeprnn.cells.library import GRU

THREADS, ROUNDS = 4, 6


class Own(deeprnn.Cell):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.U, self.W = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.pace = nn.Parameter(torch.rand(hidden_size))

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())


def outcomes(work: Callable[[], Any]) -> list[Any]:
    """What several threads get that begin together: results or exceptions."""
    found: list[Any] = []
    barrier = threading.Barrier(THREADS)

    def run() -> None:
        barrier.wait()
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    "build",
    [
        lambda: deeprnn.Recurrent(Own(5, 7)),
        lambda: deeprnn.Recurrent(GRU(5, 7)),
        lambda: deeprnn.GRU(5, 7),
        lambda: deeprnn.GRU(5, 7, intermediate_sizes=4),
    ],
    ids=["own cell", "shipped cell", "nn.GRU's place", "deep GRU"],
)
def test_first_calls_from_several_threads(build):
    x = torch.randn(6, 3, 5)
    for _ in range(ROUNDS):
        layer = build()
        own = list(layer.parameters())
        results = outcomes(lambda layer=layer: torch.autograd.grad(layer(x)[0].sum(), layer.parameters()))
        truth = torch.autograd.grad(layer(x)[0].sum(), own)
        for gradients in results:
            assert isinstance(gradients, tuple), gradients
            torch.testing.assert_close(gradients, truth)
        assert [id(p) for p in layer.parameters()] == [id(p) for p in own]


def test_single_steps_from_several_threads():
    """A deep GRU's step calls its cell with the layer's parameters."""
    layer = deeprnn.GRU(5, 7, intermediate_sizes=4)
    x = torch.randn(3, 5)
    with torch.no_grad():
        truth = layer.step(x)[0]
        for steps in outcomes(lambda: [layer.step(x)[0] for _ in range(20)]):
            assert isinstance(steps, list), steps
            assert all(torch.equal(y, truth) for y in steps)


def test_a_step_is_read_with_the_module_as_it_is():
    seen = []

    class Looking(Own):
        def step(self, x: Tensor, h: Tensor) -> Tensor:
            seen.append(self.U._parameters["weight"])
            return super().step(x, h)

    cell = Looking(5, 7)
    deeprnn.Recurrent(cell)(torch.randn(2, 3, 5))
    assert len(seen) > 1
    assert all(weight is cell.U.weight for weight in seen)
