"""Steps that write into what they are given: as a loop by hand that gives them copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deeprnn

T, B, I, H = 5, 2, 3, 4


def scaled_state(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    h.mul_(0.5)
    h += cell.U(x)
    return h, c + h


def scaled_state_left_behind(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    c.mul_(0.5)
    return torch.tanh(cell.U(x) + h), h + c


def accumulated(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    c += torch.tanh(cell.U(x))
    return torch.tanh(c) + 0.1 * h, c


def scaled_input(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    x.mul_(2.0)
    return torch.tanh(cell.U(x) + h), h


def scaled_where_large(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    if h.abs().max() > 0.3:  # so that the step is not read to its end
        h.mul_(0.5)
    return h + torch.tanh(cell.U(x)), c


def swapped(cell: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> Any:
    h[:, 0] = 0.0
    return c + cell.U(x), h


RULES = [scaled_state, scaled_state_left_behind, accumulated, scaled_input, scaled_where_large, swapped]


class Writing(deeprnn.Cell):
    def __init__(self, rule: Callable[..., Any]) -> None:
        super().__init__()
        self.input_size, self.state_sizes = I, (H, H)
        self.rule, self.U = rule, nn.Linear(I, H)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.rule(self, x, h, c)


@pytest.fixture
def given() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*n, generator=generator) for n in ((T, B, I), (1, B, H), (1, B, H))]


def by_hand(cell: Writing, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    steps = []
    for row in x:
        h, c = (a.clone() for a in cell(row.clone(), h.clone(), c.clone()))
        steps.append((h, c))
    return tuple(torch.stack(s) for s in zip(*steps, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_outputs_gradients_and_what_was_given(rule, compiled, given):
    if compiled and rule is scaled_where_large:
        pytest.skip("a compiler cannot follow values")
    cell = Writing(rule)
    layer = deeprnn.Recurrent(cell)
    if compiled:
        torch._dynamo.reset()
    run = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    x, h, c = (a.clone().requires_grad_() for a in given)
    kept = [x, h, c, *cell.parameters()]
    output, last, inside = run(x, (h, c), return_all_states=True)
    truth = by_hand(cell, x, h[0], c[0])
    torch.testing.assert_close(output, truth[0])
    torch.testing.assert_close(inside[0], list(truth))
    torch.testing.assert_close([a[0] for a in last], [a[-1] for a in truth])
    gradients = torch.autograd.grad((output.sin() + inside[0][1]).sum(), kept, allow_unused=True)
    wanted = torch.autograd.grad((truth[0].sin() + truth[1]).sum(), kept, allow_unused=True)
    for found, true in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, true)
    for now, before in zip((x, h, c), given, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_single_steps_leave_what_they_are_given(rule, given):
    cell = Writing(rule)
    layer = deeprnn.Recurrent(cell)
    x, h, c = (a.clone() for a in given)
    with torch.no_grad():
        wanted = by_hand(cell, x[:1], h[0], c[0])[0]
        torch.testing.assert_close(layer.step(x[0], (h, c))[0], wanted[0])
        torch.testing.assert_close(layer(x[:1], (h, c))[0], wanted)
    for now, before in zip((x, h, c), given, strict=True):
        assert torch.equal(now, before)
