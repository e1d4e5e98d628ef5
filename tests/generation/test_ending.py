"""Endings: a piece comes to rest on a chord, near where it was to stop."""

from __future__ import annotations

import numpy as np
import pytest

from deeprnn.data.music import Grid
from deeprnn.generation.ending import end_at_cadence, rest

GRID = Grid(steps_per_beat=2, low=48, high=84)
BAR = 8
C, F, G, G7, DM = (48, 64, 67), (53, 60, 69), (55, 62, 71), (55, 65, 71, 74), (50, 65, 69)


def piece(*chords: tuple[int, ...], frames: int = 2) -> np.ndarray:
    """Each chord for so many frames."""
    roll = np.zeros((len(chords) * frames, GRID.size), np.uint8)
    for number, chord in enumerate(chords):
        roll[number * frames : (number + 1) * frames, np.array(chord) - GRID.low] = 1
    return roll


def bars(*last: tuple[int, ...]) -> np.ndarray:
    """Twelve bars in C major, then four with the given chords, a beat each."""
    return piece(*(C, F, G, C) * 12, *last)


def test_a_piece_ends_on_the_tonic_after_the_dominant_and_holds_it_for_a_bar():
    roll = bars(F, DM, F, G7, C, DM, F, DM, F, DM, F, DM, F, DM, F, DM)
    ended, place = end_at_cadence(roll, GRID)
    assert place == 13 * BAR
    assert len(ended) == 14 * BAR
    assert (ended[:place] == roll[:place]).all()
    assert (ended[place:] == roll[place]).all()
    assert set(np.flatnonzero(ended[-1]) + GRID.low) == set(C)


def test_the_later_of_two_alike_is_taken():
    roll = bars(F, DM, F, G7, C, DM, F, DM, F, DM, F, G7, C, DM, F, DM)
    assert end_at_cadence(roll, GRID)[1] == 15 * BAR


def test_a_bar_that_a_chord_begins_in_the_middle_of_is_filled():
    roll = bars(*(F, DM, F, DM) * 3, F, DM, C, DM)
    ended, place = end_at_cadence(roll, GRID)
    assert (place, len(ended)) == (15 * BAR + 4, 16 * BAR)


def test_without_a_chord_of_rest_nothing_is_changed():
    clash = (48, 49, 55)
    roll = bars(*(clash, (50, 51, 60)) * 8)
    ended, place = end_at_cadence(roll, GRID)
    assert (len(ended), place) == (16 * BAR, 16 * BAR)
    assert (ended == roll).all()
    silence = np.zeros_like(roll)
    assert (end_at_cadence(silence, GRID)[0] == silence).all()


def test_a_fragment_and_what_was_given_are_left_alone():
    short = piece(*(C, F, G7, C) * 3)
    assert end_at_cadence(short, GRID)[0] is short
    whole = piece(*(C, F, G7, C) * 8)
    place = end_at_cadence(whole, GRID, primer=16)[1]
    assert place > len(whole) - max(BAR, (len(whole) - 16) // 4) - 1
    assert end_at_cadence(whole, GRID, primer=len(whole) - 3 * BAR)[0] is whole


@pytest.mark.parametrize(("better", "worse"), [(C, G), (C, (48, 64)), (G, G7), (DM, (48, 60, 62))])
def test_rest_is_rated_as_a_listener_would(better, worse):
    one, other = piece(*(F,) * 4, better), piece(*(F,) * 4, worse)
    assert rest(one, 8, 0, GRID) > rest(other, 8, 0, GRID) >= 0


def test_a_melody_alone_ends_too():
    tune = [60, 62, 64, 65, 67, 65, 64, 60] * 6 + [62, 65, 67, 71, 60, 62, 65, 62] * 2
    ended, place = end_at_cadence(piece(*((note,) for note in tune)), GRID)
    assert np.flatnonzero(ended[-1]).tolist() == [12]
    assert place % BAR == 0
