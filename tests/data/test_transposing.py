"""Songs moved at random: whole, within the range, and by the seed alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.data.music import Songs
from deeprnn.data.transposing import randomly_transposed, transpose


def songs(seed: int = 0, pitches: int = 30) -> Songs:
    rng = np.random.default_rng(seed)
    rolls = []
    for length in (5, 0, 9, 4):
        roll = np.zeros((length, pitches), np.uint8)
        low, high = sorted(rng.integers(0, pitches, 2))
        roll[:, low : high + 1] = rng.random((length, high - low + 1)) < 0.3
        rolls.append(roll)
    return Songs.pack([*rolls, np.zeros((3, pitches))], pitches)  # the last is silent


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(0, 2**64 - 1), st.integers(0, 12))
def test_a_song_is_moved_whole_and_no_further_than_asked(data_seed, seed, most):
    before = songs(data_seed)
    after = randomly_transposed(before, most, seed)
    assert (after.lengths == before.lengths).all()
    for old, new in zip(before, after, strict=True):
        assert any((transpose(old, by)[0] == new).all() for by in range(-most, most + 1))
        assert old.sum() == new.sum()


def test_the_seed_decides():
    first, again, other = (randomly_transposed(songs(), 5, seed) for seed in (3, 3, 4))
    assert (first.packed == again.packed).all()
    assert (first.packed != other.packed).any()


def test_all_intervals_occur():
    roll = np.zeros((1, 30))
    roll[0, 15] = 1
    moved = randomly_transposed(Songs.pack([roll] * 200, 30), 3, 1)
    assert {int(song.argmax()) for song in moved} == set(range(12, 19))
