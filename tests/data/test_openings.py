"""Beginnings from data that was not trained on."""

from __future__ import annotations

import numpy as np

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.openings import BEATS, MOST, SYMBOLS, openings
from deeprnn.data.text import text_data


def song(first: int, frames: int = 150) -> np.ndarray:
    roll = np.zeros((frames, 12), np.uint8)
    roll[first:, 3] = roll[first + 1 :, 7] = 1
    return roll


def music(count: int) -> MusicData:
    parts = {"train": Songs.pack([song(0)], 12), "test": Songs.pack([song(i) for i in range(count)], 12)}
    names = {"test": [f"folder/tune {i}.mid" for i in range(count)]}
    return MusicData("toy", parts, Grid(steps_per_beat=2, low=60, high=71), names)


def test_music_begins_with_its_first_note_and_lasts_two_bars():
    found = openings(music(3))
    assert [item["name"] for item in found] == ["tune 0", "tune 1", "tune 2"]
    for item in found:
        assert len(item["frames"]) == 2 * BEATS
        assert item["frames"][:2] == [[3], [3, 7]]


def test_of_many_pieces_some_are_taken_from_all_over():
    names = [item["name"] for item in openings(music(100))]
    assert len(names) == MOST
    assert names[0] == "tune 0"
    assert names[-1] == "tune 87"


def test_silent_pieces_and_empty_parts_are_left_out():
    data = music(2)
    data.splits["test"] = Songs.pack([np.zeros((5, 12), np.uint8)], 12)
    assert openings(data) == []
    assert openings(MusicData("none", {"train": Songs.pack([], 12)})) == []


LINES = [
    "a line that is long enough to be cut at the end of one of its many words",
    "short",
    "another line of some length, too",
]


def test_text_begins_with_lines_and_ends_with_words():
    text = "".join(f"{line}\n" for line in LINES)
    found = [item["text"] for item in openings(text_data("toy", "char", {"train": text, "test": text}))]
    assert found == [
        "a line that is long enough to be cut at the end of one of ",
        "another line of some length, too",
    ]
    assert all(len(text) <= SYMBOLS["char"] for text in found)
    words = [item["text"] for item in openings(text_data("toy", "word", {"train": text, "test": text}))]
    assert words == [" ".join(LINES[0].split()[:12]), "another line of some length, too"]


def test_a_text_without_lines_has_a_beginning():
    found = openings(text_data("toy", "char", {"train": "abc " * 100}))
    assert found[0]["text"].startswith("abc abc ")
