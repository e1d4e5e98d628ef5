"""Steps and clipping against torch.optim and by hand."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training.optimiser import Optimiser, clip_scale, thresholds
from deeprnn.training.recipe import OptimiserPart

PEERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-12),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.05, eps=1e-12),
}


@pytest.mark.parametrize("name", PEERS)
def test_ten_steps_equal_torchs(name):
    torch.manual_seed(0)
    own = torch.randn(1, 30, dtype=torch.float64)
    theirs = own[0].clone().requires_grad_()
    peer = PEERS[name]([theirs])
    part = OptimiserPart(
        name=name, momentum=0.9, weight_decay=0.05 if name == "adamw" else 0.0, epsilon=1e-12
    )
    optimiser = Optimiser(part, own)
    for step in range(10):
        gradient = torch.randn(1, 30, dtype=torch.float64)
        theirs.grad = gradient[0].clone()
        peer.step()
        optimiser.step(
            slice(0, 1), own, gradient, torch.tensor([0.1], dtype=torch.float64), torch.tensor(step)
        )
    torch.testing.assert_close(own[0], theirs.detach(), rtol=1e-9, atol=1e-9)


def test_members_have_their_own_rates_and_parameters_their_multipliers():
    parameters = torch.zeros(2, 4)
    multipliers = torch.tensor([1.0, 1.0, 0.1, 0.1])
    optimiser = Optimiser(OptimiserPart(name="sgd"), parameters, multipliers)
    rates = torch.tensor([1.0, 0.5], dtype=torch.float64)
    optimiser.step(slice(0, 2), parameters, torch.ones(2, 4), rates, torch.tensor(0))
    expected = torch.tensor([[-1.0, -1.0, -0.1, -0.1], [-0.5, -0.5, -0.05, -0.05]])
    torch.testing.assert_close(parameters, expected)


def test_clipping_scales_each_member_by_its_own_norm():
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    scale = clip_scale(torch.linalg.vector_norm(gradient, dim=1), thresholds([1.0] * len(gradient)))
    torch.testing.assert_close(scale, torch.tensor([0.2, 1.0, 1.0]))
    assert clip_scale(torch.tensor([50.0]), thresholds([0.0])).tolist() == [1.0]


def test_forgetting_clears_one_member_only():
    parameters = torch.zeros(2, 3)
    optimiser = Optimiser(OptimiserPart(name="momentum"), parameters)
    optimiser.step(slice(0, 2), parameters, torch.ones(2, 3), torch.ones(2), torch.tensor(0))
    optimiser.forget(0)
    assert optimiser.buffers["velocity"][0].abs().sum() == 0
    assert optimiser.buffers["velocity"][1].abs().sum() == 3


def test_adam_goes_on_at_its_rate_after_forgetting():
    parameters = torch.zeros(2, 3)
    optimiser = Optimiser(OptimiserPart(name="adam"), parameters)
    rate, gradient = torch.full((2,), 0.1), torch.tensor([1.0, -2.0, 3.0]).expand(2, 3)
    for update in range(5000):
        if update == 4990:
            optimiser.forget(0)
        before = parameters.clone()
        optimiser.step(slice(0, 2), parameters, gradient, rate, torch.tensor(update))
        moved = (parameters - before).abs()
        torch.testing.assert_close(moved, torch.full((2, 3), 0.1), rtol=1e-3, atol=1e-3)
