"""Losses: sums and counts, masks that mask, and populations by vmap."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Bernoulli, Categorical

from deeprnn.model.losses import bernoulli_nats, bernoulli_nll, categorical_nats, categorical_nll, nats, nll

T, B, O = 7, 3, 11


def example(kind: str, population: int | None = None):
    generator = torch.Generator().manual_seed(0)
    leading = () if population is None else (population,)
    logits = torch.randn(*leading, T, B, O, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (T, B, O), generator=generator, dtype=torch.uint8)
    if kind == "categorical":
        y = torch.randint(0, O, (T, B), generator=generator)
    mask = torch.rand(T, B, generator=generator) < 0.7
    return logits, y, mask


def expected(kind: str, logits, y, mask):
    if kind == "bernoulli":
        steps = -Bernoulli(logits=logits).log_prob(y.double()).sum(-1)
    else:
        steps = -Categorical(logits=logits).log_prob(y)
    return steps[mask].sum()


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_sum_equals_the_distribution(kind):
    logits, y, mask = example(kind)
    total, count = nll(kind, logits, y, mask)
    torch.testing.assert_close(total, expected(kind, logits, y, mask))
    assert int(count) == int(mask.sum())


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_masked_steps_change_neither_loss_nor_gradient(kind):
    logits, y, mask = example(kind)
    other = torch.where(mask[..., None], logits, 100.0 * torch.ones_like(logits))
    gradients = []
    for values in (logits, other):
        leaf = values.clone().requires_grad_()
        total, _ = nll(kind, leaf, y, mask)
        total.backward()
        gradients.append((total.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1][mask], gradients[1][1][mask])
    assert (gradients[1][1][~mask] == 0).all()


@pytest.mark.parametrize("loss", [bernoulli_nll, categorical_nll])
def test_population_member_equals_the_member_alone(loss):
    kind = loss.__name__.partition("_")[0]
    logits, y, mask = example(kind, population=4)
    sums, counts = torch.func.vmap(loss, in_dims=(0, None, None))(logits, y, mask)
    leading, _ = loss(logits, y, mask)
    alone = torch.stack([loss(member, y, mask)[0] for member in logits])
    torch.testing.assert_close(sums, alone)
    torch.testing.assert_close(leading, alone)
    assert counts.tolist() == [int(mask.sum())] * 4


@pytest.mark.parametrize("loss", [bernoulli_nll, categorical_nll])
def test_gradients_through_vmap(loss):
    kind = loss.__name__.partition("_")[0]
    logits, y, mask = example(kind, population=2)
    together, apart = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    torch.func.vmap(loss, in_dims=(0, None, None))(together, y, mask)[0].sum().backward()
    sum(loss(member, y, mask)[0] for member in apart).backward()
    torch.testing.assert_close(together.grad, apart.grad)


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_nats_per_step_sum_to_the_loss(kind):
    logits, y, mask = example(kind, population=3)
    steps = nats(kind, logits, y)
    assert steps.shape == (3, T, B)
    torch.testing.assert_close(steps[:, mask].sum(-1), nll(kind, logits, y, mask)[0])


def test_confident_logits_stay_finite_and_exact():
    y = torch.ones(1, 1, 1)
    assert bernoulli_nats(torch.full((1, 1, 1), 200.0), y).item() == 0.0
    assert bernoulli_nats(torch.full((1, 1, 1), -200.0), y).item() == 200.0
    sure = torch.tensor([[[0.0, 500.0]]])
    assert categorical_nats(sure, torch.tensor([[0]])).item() == 500.0


def test_nothing_to_score_is_zero():
    for kind in ("bernoulli", "categorical"):
        logits, y, mask = example(kind)
        total, count = nll(kind, logits, y, torch.zeros_like(mask))
        assert total.item() == 0.0
        assert count.item() == 0


def test_categorical_keeps_one_tensor_of_the_logits_size():
    logits = torch.randn(4, 2, 1000, requires_grad=True)
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        categorical_nll(logits, torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2, dtype=torch.bool))
    large = {t.data_ptr() for t in saved if t.numel() >= logits.numel()}
    assert len(large) == 1


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match="gaussian"):
        nll("gaussian", torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
