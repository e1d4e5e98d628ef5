"""Weight noise and dropout: their statistics, and that they depend on (seed, purpose, update) alone."""

from __future__ import annotations

import pytest
import torch

from deeprnn.model.models import build, rnn
from deeprnn.model.specs import Dropout
from deeprnn.training import fused, rng
from deeprnn.training.flat import Layout
from deeprnn.training.noise import Noise, _hashed_masks, dropout_masks

CPU = torch.device("cpu")


def drawn(noise: Noise, parameters: torch.Tensor, update: int) -> torch.Tensor:
    noisy = torch.full_like(parameters, float("nan"))
    noise.add(parameters, noisy, slice(0, len(parameters)), torch.tensor(update))
    return noisy - parameters


def test_noise_has_its_standard_deviation_and_leaves_biases_alone():
    model = rnn(input_size=88, hidden_size=200, output_size=88, seed=0)
    layout = Layout.of(model)
    parameters = torch.zeros(1, layout.total)
    views = layout.views(drawn(Noise([0.075], [3], layout.matrices, CPU), parameters, 5)[0])
    matrices = torch.cat([v.flatten() for v in views.values() if v.dim() == 2])
    assert matrices.numel() == 88 * 200 + 200 * 200 + 200 * 88
    assert matrices.std().item() == pytest.approx(0.075, rel=0.02)
    assert abs(matrices.mean().item()) < 0.002
    assert (matrices.abs() > 3 * 0.075).float().mean().item() == pytest.approx(0.0027, abs=0.001)
    assert all((v == 0).all() for v in views.values() if v.dim() == 1)


def test_noise_is_fresh_for_every_update_and_member_and_the_same_in_any_company():
    parameters = torch.zeros(2, 50)
    both = Noise([1.0, 1.0], [1, 2], 40, CPU)
    first, second = drawn(both, parameters, 0), drawn(both, parameters, 1)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    alone = drawn(Noise([1.0], [2], 40, CPU), parameters[:1], 1)
    assert torch.equal(alone[0], second[1])


def test_the_gpus_normals_are_normal_and_uncorrelated():
    seeds = torch.tensor([1, 2])
    a = fused.plain_normal(seeds, torch.tensor(7), 100_001)
    b = fused.plain_normal(seeds, torch.tensor(8), 100_001)
    assert a.shape == (2, 100_001)
    for row in (a[0], a[1], b[0]):
        assert abs(row.mean().item()) < 0.015
        assert row.std().item() == pytest.approx(1.0, abs=0.01)
        assert (row**4).mean().item() == pytest.approx(3.0, abs=0.12)
        assert abs((row[1:] * row[:-1]).mean().item()) < 0.015
    assert abs((a[0] * a[1]).mean().item()) < 0.015
    assert abs((a[0] * b[0]).mean().item()) < 0.015
    alone = fused.plain_normal(seeds[1:], torch.tensor(7), 100_001)
    assert torch.equal(alone[0], a[1])


def test_mix_separates_its_arguments():
    values = {rng.mix(s, p, u) for s in range(20) for p in range(4) for u in range(50)}
    assert len(values) == 20 * 4 * 50


def test_masks_by_hashing_have_the_shapes_and_rates_of_the_models_own():
    drop = Dropout(input=0.1, state=0.25, intermediate=0.3, output=0.5)
    model = build(rnn(input_size=30, hidden_size=40, output_size=30, intermediate=20, output_hidden=50,
                      dropout=drop, seed=0).spec, seed=0)  # fmt: skip
    own = dropout_masks(model, 60, 8, torch.tensor([1, 2]), torch.tensor(3))
    hashed = _hashed_masks(model, 60, 8, torch.tensor([1, 2]), torch.tensor(3))
    assert own is not None
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in hashed.items()}
    rates = {"input": 0.1, "0.state": 0.25, "0.z1": 0.3, "out.h": 0.5, "out.y1": 0.5}
    assert rates.keys() == hashed.keys()
    for name, mask in hashed.items():
        p = rates[name]
        kept = mask.bool().float().mean().item()
        assert kept == pytest.approx(1 - p, abs=0.05), name
        assert own[name].bool().float().mean().item() == pytest.approx(1 - p, abs=0.05), name
        torch.testing.assert_close(mask.max().item(), 1 / (1 - p), rtol=1e-6, atol=0)


def test_no_dropout_means_no_masks():
    model = rnn(input_size=3, hidden_size=4, output_size=3, seed=0)
    assert dropout_masks(model, 5, 1, torch.tensor([1]), torch.tensor(0)) is None
