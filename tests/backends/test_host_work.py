"""How much the host does for a call on a GPU: counted without one, launches doing nothing (benchmarks/rehearsal.py)."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter

import pytest
import torch
from benchmarks.rehearsal import rehearsal
from torch.utils._python_dispatch import TorchDispatchMode

import deeprnn
from deeprnn.backends import direct, transformations, unrolling


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def counted(layer: torch.nn.Module, steps: int, batch: int, monkeypatch) -> dict[str, int]:
    """Operators, launches and Python calls of a forward and backward pass that is none of a shape's first."""
    launches: list[int] = []
    x = torch.randn(steps, batch, 128)

    def call() -> None:
        y = layer(x)[0]
        torch.autograd.backward(y, torch.ones_like(y))

    with rehearsal(launched=lambda: launches.append(1)):
        for _ in range(2):
            call()
        launches.clear()
        call()
        count = len(launches)
        profiler = cProfile.Profile()
        profiler.enable()
        call()
        profiler.disable()
        # A mode that watches operators has them apart; here it is to see what runs without it.
        monkeypatch.setattr(transformations, "_len_torch_dispatch_stack", lambda: 0)
        with Operators() as operators:
            call()
    calls: int = pstats.Stats(profiler).total_calls  # type: ignore[attr-defined]
    return {"operators": operators.found.total(), "launches": count, "calls": calls}


# kind, batch, most operators, launches with copies, most Python calls: a tenth above what was counted
CALLS = [
    (deeprnn.DeepRNN, 16, 22, 8, 255),
    (deeprnn.DeepRNN, 1, 22, 8, 255),
    (deeprnn.GRU, 16, 24, 8, 275),
    (deeprnn.LSTM, 1, 25, 9, 285),
]


@pytest.mark.parametrize(("kind", "batch", "operators", "launches", "calls"), CALLS)
def test_a_call_costs_the_host_no_more_than_it_did(kind, batch, operators, launches, calls, monkeypatch):
    found = counted(kind(128, 128), 128, batch, monkeypatch)
    assert found["launches"] == launches
    assert found["operators"] <= operators, found
    assert found["calls"] <= calls, found


def test_what_was_decided_for_the_double_is_forgotten():
    layer, x = deeprnn.DeepRNN(4, 3), torch.randn(2, 1, 4)
    with rehearsal():
        for _ in range(2):
            layer(x)
        assert unrolling._projection_cases
        assert direct._calls
    assert not unrolling._projection_cases
    assert not direct._calls
    truth = torch.nn.RNN(4, 3)
    truth.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], truth(x)[0])


def test_shapes_alike_are_decided_once_and_others_anew(monkeypatch):
    layer, examined = deeprnn.DeepRNN(4, 3), []
    right = unrolling.check
    monkeypatch.setattr(unrolling, "check", lambda *given: examined.append(1) or right(*given))
    with rehearsal():
        for steps in (2, 2, 5, 2, 5):
            layer(torch.randn(steps, 1, 4))
        assert len(examined) == 2
        layer(torch.randn(2, 3, 4))
        assert len(examined) == 3
        layer.weight_hh_l0 = torch.nn.Parameter(torch.randn(3, 4))
        with pytest.raises(deeprnn.errors.UserError, match="matrices"):
            layer(torch.randn(2, 3, 4))
