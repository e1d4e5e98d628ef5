"""The paper's equations, computed again by hand in NumPy or on paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deeprnn.model import equations
from deeprnn.model.equations import Layer

DOUBLE = {"dtype": torch.float64}
B, I, H, M, O = 2, 3, 4, 5, 6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def sigma(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def same(mine: torch.Tensor, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-13, atol=1e-14)


x, h = draw(B, I, seed=1), draw(B, H, seed=2)


def layers(shortcut: bool, everywhere: bool) -> list[Layer]:
    return [
        Layer(draw(H, M, seed=5), draw(I, M, seed=6), None, draw(M, seed=7)),
        Layer(
            draw(M, H, seed=8),
            draw(I, H, seed=9) if everywhere else None,
            draw(H, H, seed=10) if shortcut else None,
        ),
    ]


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("shortcut", [False, True])
def test_deep_transition(shortcut, everywhere):
    one, two = (Layer(*(None if t is None else t.numpy() for t in p)) for p in layers(shortcut, everywhere))
    z = np.tanh(h.numpy() @ one.W + x.numpy() @ one.U + one.b)
    a = z @ two.W
    a = a + h.numpy() @ two.S if shortcut else a
    a = a + x.numpy() @ two.U if everywhere else a
    got = equations.deep_transition(x, h, layers(shortcut, everywhere), [torch.tanh, torch.sigmoid])
    same(got, sigma(a))


def test_deep_transition_of_one_layer_is_the_rnn():
    W, U = draw(H, H, seed=3), draw(I, H, seed=4)
    got = equations.deep_transition(x, h, [Layer(W, U)], [torch.tanh])
    for b in range(B):  # the paper's column vectors
        same(got[b], np.tanh(W.numpy().T @ h[b].numpy() + U.numpy().T @ x[b].numpy()))


def test_what_enters_a_layer_may_be_nothing():
    assert equations.enter(x, None, None) == 0.0
    b = draw(H)
    assert equations.enter(x, None, b) is not None
    same(torch.as_tensor(equations.enter(x, None, b)), b.numpy())


def test_transition_mlp_returns_every_layer_and_masks_the_inner_ones():
    p = layers(True, False)
    entered = [equations.enter(x, q.U, q.b) for q in p]
    W, S = [q.W for q in p], [q.S for q in p]
    zs = equations.transition_mlp(entered, h, W, S, [torch.tanh, torch.tanh])
    assert [z.shape for z in zs] == [(B, M), (B, H)]
    masked = equations.transition_mlp(entered, h, W, S, [torch.tanh] * 2, [torch.zeros(B, M, **DOUBLE), None])
    assert masked[0].abs().sum() == 0
    assert S[1] is not None
    same(masked[1], np.tanh(h.numpy() @ S[1].numpy()))


def test_deep_output():
    V, b = [draw(H, M, seed=3), draw(M, O, seed=4)], [draw(M, seed=5), None]
    want = np.maximum(h.numpy() @ V[0].numpy() + b[0].numpy(), 0) @ V[1].numpy()  # type: ignore[union-attr]
    same(equations.deep_output(h, V, [torch.relu, lambda a: a], b), want)


def test_deep_output_of_one_layer_is_the_rnns():
    V = draw(H, O, seed=3)
    same(equations.deep_output(h, [V], [torch.sigmoid]), sigma(h.numpy() @ V.numpy()))


def test_commutativity_penalty_is_zero_just_for_what_commutes():
    a, b = draw(B, H, seed=1), draw(B, H, seed=2)
    assert equations.commutativity_penalty(a, b, torch.add) == 0
    got = equations.commutativity_penalty(a, b, torch.sub)
    assert got.item() == pytest.approx(np.sum((2 * (a - b).numpy()) ** 2, -1).mean())


@pytest.mark.parametrize(("tau", "rate"), [(0, 1.0), (100, 1.0), (100 + 2330, 0.5), (100 + 3 * 2330, 0.25)])
def test_learning_rate(tau, rate):
    now, tau_0 = torch.tensor(float(tau)), torch.tensor(100.0)
    assert equations.learning_rate(now, tau_0, beta=2330).item() == pytest.approx(rate)
    assert equations.learning_rate(now, tau_0, beta=2330, eta=3.0).item() == pytest.approx(3 * rate)
