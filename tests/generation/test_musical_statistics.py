"""Musical statistics, each against a piece small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from deeprnn.data.music import Grid
from deeprnn.generation.copy_check import Corpus
from deeprnn.generation.musical_statistics import COPIED_BEATS, MusicalStatistics, musical_statistics

EIGHTHS = Grid(steps_per_beat=2)


def roll(*frames: tuple[int, ...]) -> np.ndarray:
    """A roll from the keys that sound in each frame."""
    piece = np.zeros((len(frames), 88), np.uint8)
    for t, keys in enumerate(frames):
        piece[t, list(keys)] = 1
    return piece


def test_notes_are_counted_where_something_sounds():
    counted = musical_statistics([roll((40, 44, 47), (), (40,), ())], EIGHTHS)
    assert counted.notes_at_once == 2.0
    assert counted.silence == 0.5


def test_a_note_lasts_until_its_key_is_let_go():
    held = roll((40,), (40,), (40, 50), (), (40,))  # three frames, one, one
    assert musical_statistics([held], EIGHTHS).short_notes == pytest.approx(2 / 3)
    assert musical_statistics([held], Grid(steps_per_beat=4)).short_notes == pytest.approx(2 / 3)
    assert musical_statistics([held], Grid(steps_per_beat=6)).short_notes == 1.0, (
        "three of twelve make an eighth"
    )
    assert musical_statistics([held], Grid(steps_per_beat=1)).short_notes == 0.0, "no frame is that short"


def test_a_note_does_not_go_on_in_the_next_piece():
    counted = musical_statistics([roll((), (40,)), roll((40,), ())], EIGHTHS)
    assert counted.short_notes == 1.0


@pytest.mark.parametrize(
    ("chord", "share"),
    [
        ((40, 44, 47), 1.0),
        ((40, 41), 0.0),
        ((40, 52), 1.0),
        ((40, 46), 0.0),
        ((40, 44, 46), 0.5),
        ((40, 54), 0.0),
    ],
    ids=["triad", "second", "octave", "tritone", "third and second", "ninth"],
)
def test_intervals_are_between_neighbouring_voices(chord, share):
    assert musical_statistics([roll(chord)], EIGHTHS).consonant == share


def test_a_lone_voice_has_no_interval():
    assert musical_statistics([roll((40,), (44,))], EIGHTHS).consonant is None


def test_chords_are_compared_from_beat_to_beat():
    a, b = (40, 44), (41, 45)
    piece = roll(a, b, a, a, b, b, (), (), b, b)  # at the beats: a a b silence b
    assert musical_statistics([piece], EIGHTHS).repeated_chords == pytest.approx(1 / 3)


def test_frames_inside_a_passage_of_the_training_data_are_copied():
    chance = np.random.default_rng(0)
    training, own = (chance.random((60, 88)) < 0.1 for _ in range(2))
    length = COPIED_BEATS * EIGHTHS.steps_per_beat
    copied = np.concatenate([own[:10], training[5 : 5 + length + 4], own[10:20]])
    almost = np.concatenate([own[:10], training[5 : 5 + length - 1], own[10:20]])
    corpus = Corpus([training.astype(np.uint8)])
    assert musical_statistics([copied], EIGHTHS, corpus).copied == pytest.approx((length + 4) / len(copied))
    assert musical_statistics([almost], EIGHTHS, corpus).copied == 0.0
    assert musical_statistics([own], EIGHTHS).copied is None


def test_nothing_to_count_is_no_number():
    for pieces in ([], [np.zeros((0, 88), np.uint8)]):
        counted = musical_statistics(pieces, EIGHTHS)
        assert counted == MusicalStatistics(None, None, None, None, None)
        assert counted.text("silence") == "-"


def test_numbers_for_a_person():
    counted = musical_statistics([roll((40, 44), ())], EIGHTHS)
    assert (counted.text("notes_at_once"), counted.text("silence")) == ("2.00", "50 %")
