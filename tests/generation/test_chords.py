"""Chords from a NADE: streams that repeat, limits, refusals, and models whose `draw` is a user's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import deeprnn
from deeprnn.errors import UserError
from deeprnn.generation.chords import note_probabilities
from deeprnn.generation.generate import sample_rolls, stream_music
from deeprnn.generation.one_step import FewRows, can_serve


def net(**settings):
    sizes = {"input_size": 14, "hidden_size": 9, "output_hidden_size": 7, "output_size": 14}
    model = deeprnn.do_rnn(**sizes, output="nade", nade_size=8, seed=1, **settings)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model.eval()


def test_a_sample_is_the_same_alone_or_among_many():
    model = net()
    alone, p = sample_rolls(model, 12, seed=3)
    many, _ = sample_rolls(model, 12, count=6, seed=3)
    assert np.array_equal(alone[0], many[0])
    assert not np.array_equal(many[0], many[5])
    assert ((p[0] >= 0) & (p[0] <= 1)).all()


@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_quick_step_gives_both_biases(shortcut, bias):
    model = net(output_shortcut=shortcut, bias=bias)
    assert can_serve(model)
    x = torch.randint(2, (4, 14)).float()
    found, _ = FewRows(model)(x, model.initial_state(4))
    torch.testing.assert_close(found, model.step(x)[0], atol=1e-5, rtol=1e-5)


def test_the_limit_keeps_the_likeliest_notes_and_primers_are_heard():
    model, primer = net(), np.eye(14, dtype=np.uint8)[:5]
    rolls, p = sample_rolls(model, 20, max_notes=2, primer=primer)
    assert np.array_equal(rolls[0][:5], primer)
    assert rolls[0][5:].sum(1).max() == 2
    _, q = sample_rolls(model, 20, max_notes=2, primer=primer[::-1])
    assert not np.allclose(p[0][5], q[0][5])


def test_the_likeliest_chain_does_not_depend_on_the_seed():
    model = net()
    assert np.array_equal(*(sample_rolls(model, 6, seed=s, temperature=0.0)[0][0] for s in (1, 2)))


def test_independent_notes_are_refused():
    with pytest.raises(UserError, match="depend on each other"):
        next(stream_music(net(), length=2, independent=True))


def test_a_draw_of_ones_own_is_honoured():
    model = net()
    model.predict.draw = lambda out, u, temperature: (torch.ones(len(out), 14), torch.ones(len(out), 14))
    rolls, _ = sample_rolls(model, 3)
    assert rolls[0].all()


def test_probabilities_of_single_notes_are_near_their_marginals():
    model = net()
    out = model(torch.zeros(1, 1, 14))[0][0, 0].detach()
    u = torch.rand(20_000, 14, generator=torch.Generator().manual_seed(5))
    share = model.predict.draw(out.expand(20_000, -1), u)[0].mean(0).numpy()
    found = note_probabilities(model.predict, out, samples=4000)
    assert np.abs(found - share).max() < 0.03
