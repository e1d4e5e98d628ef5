"""Frames: the number of notes keeps to what the model expects, at every temperature and in every draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.errors import UserError
from deeprnn.generation.frames import SAMPLERS, FrameOptions, frame_sampler, offset, systematic, tempered

TEMPERATURES = (1e-8, 0.01, 0.3, 0.9, 1.0, 1.1, 3.0, 100.0, 1e6)


def plain(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=20), st.sampled_from(TEMPERATURES))
def test_temperature_keeps_the_expected_number_of_notes_and_their_order(row: list[float], temperature: float):
    logits = np.array([row])
    p = tempered(logits, temperature)
    assert ((p >= 0) & (p <= 1)).all()
    if temperature >= 0.01:  # colder, one note more or less is all that can be had
        assert p.sum() == pytest.approx(plain(logits).sum(), abs=2e-3)
    assert (np.diff(p[0, logits[0].argsort()]) >= -1e-6).all()


def test_temperature_sharpens_below_one_and_flattens_above():
    logits = np.array([[3.0, 1.0, -1.0, -3.0, -5.0]])
    spread = [tempered(logits, t).std() for t in (0.2, 0.5, 1.0, 2.0, 5.0)]
    assert spread == sorted(spread, reverse=True)
    assert np.allclose(tempered(logits, 1.0), plain(logits), rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1e-60])
def test_at_zero_as_many_notes_as_expected_sound(temperature: float):
    logits = np.array([[-0.2, -0.3, -0.4, -0.5, -9.0]])  # none is likelier than not, but 1.65 are expected
    assert tempered(logits, temperature).tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]


def test_each_row_has_its_own_offset():
    logits = np.array([[2.0, 0.0, -4.0], [-6.0, -3.0, -5.0]])
    wanted = np.array([[2.5], [0.2]])
    assert np.allclose(plain(logits + offset(logits, wanted)).sum(1, keepdims=True), wanted, atol=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_a_systematic_draw_has_the_expected_number_and_every_note_its_probability(p: list[float]):
    points = (np.arange(2000)[:, None] + 0.5) / 2000  # instead of chance
    on = systematic(np.tile(p, (2000, 1)), points)
    total = float(np.cumsum(p)[-1])
    assert {int(n) for n in on.sum(1)} <= {int(np.floor(total - 1e-9)), int(total), int(np.ceil(total))}
    assert np.allclose(on.mean(0), p, atol=2e-3)


def test_of_near_pitches_that_share_one_voice_one_sounds():
    p = np.tile([0.0, 0.5, 0.5, 0.0, 0.25, 0.75], (200, 1))
    on = systematic(p, np.random.default_rng(0).random((200, 1)))
    assert set(map(tuple, on[:, [1, 2]].tolist())) == {(True, False), (False, True)}
    assert (on.sum(1) == 2).all()


def test_coins_scatter_the_number_of_notes_where_systematic_draws_do_not():
    logits = torch.full((500, 20), -1.4)  # 4.0 notes expected
    counts = {}
    for independent in (False, True):
        sampler = frame_sampler("bernoulli", 20, FrameOptions(independent=independent))
        u = torch.rand(500, sampler.draws, generator=torch.Generator().manual_seed(0))
        counts[independent] = sampler.pick(logits, u)[0].sum(1)
    assert set(counts[False].tolist()) <= {3.0, 4.0}
    assert float(counts[True].std()) > 1.5
    assert float(counts[True].mean()) == pytest.approx(float(counts[False].mean()), abs=0.3)


def test_the_kind_of_output_decides_how_a_frame_is_drawn(monkeypatch):
    with pytest.raises(UserError, match="sample text from it"):
        frame_sampler("categorical", 12, FrameOptions())
    with pytest.raises(UserError, match="max_notes=0"):
        frame_sampler("bernoulli", 12, FrameOptions(max_notes=0))
    monkeypatch.setitem(SAMPLERS, "chords", lambda keys, options: (keys, options.temperature))
    assert frame_sampler("chords", 12, FrameOptions(0.5)) == (12, 0.5)
