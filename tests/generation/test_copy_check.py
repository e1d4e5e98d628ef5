"""The copy check against a plain search."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.data import MusicData, Songs, TextData
from deeprnn.generation.copy_check import Corpus, Passage, check, describe


def plain_search(sample: list[int], pieces: list[list[int]]) -> int:
    """Length of the longest common substring, by dynamic programming."""
    best = 0
    for piece in pieces:
        row = [0] * (len(piece) + 1)
        for a in sample:
            row = [0] + [row[j] + 1 if a == b else 0 for j, b in enumerate(piece)]
            best = max(best, *row)
    return best


symbols = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=200, deadline=None)
@given(symbols, st.lists(symbols, max_size=4))
def test_length_equals_a_plain_search_and_the_place_is_right(sample: list[int], pieces: list[list[int]]):
    found = Corpus([np.array(piece, int) for piece in pieces]).longest(np.array(sample, int))
    assert found.length == plain_search(sample, pieces)
    if found.length:
        mine = sample[found.at : found.at + found.length]
        assert mine == pieces[found.piece][found.position : found.position + found.length]


def test_a_planted_passage_of_frames_is_found_with_its_piece():
    rng = np.random.default_rng(0)
    pieces = [(rng.random((n, 88)) < 0.05).astype(np.uint8) for n in (50, 80, 30)]
    sample = (rng.random((60, 88)) < 0.05).astype(np.uint8)
    sample[20:37] = pieces[1][11:28]
    assert Corpus(pieces, ["a", "b", "c"]).longest(sample) == Passage(17, 20, 1, 11, "b")


def test_one_note_more_breaks_a_passage():
    piece = (np.random.default_rng(0).random((40, 88)) < 0.05).astype(np.uint8)
    sample = piece.copy()
    sample[15, 3] ^= 1
    assert Corpus([piece]).longest(sample).length == 24


def test_no_passage_spans_two_pieces():
    one, two = np.arange(10), np.arange(10, 20)
    assert Corpus([one, two]).longest(np.arange(20)).length == 10


def test_the_whole_sample_and_the_empty_one():
    piece = np.arange(30)
    assert Corpus([piece]).longest(piece[5:25]) == Passage(20, 0, 0, 5)
    assert Corpus([piece]).longest(piece[:0]).length == 0
    assert Corpus([piece]).longest(np.array([99])).length == 0
    assert Corpus([]).longest(piece).length == 0


def test_a_passage_is_found_in_a_million_symbols_in_few_looks(monkeypatch):
    """Each look compares all windows of one length at once: their number grows with the logarithm of the sample's."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50, 1_000_000).astype(np.uint8)
    corpus = Corpus([text])
    sample = np.concatenate([rng.integers(0, 50, 500), text[777_000:777_041], rng.integers(0, 50, 500)])
    looks, shared = [], corpus._shared
    monkeypatch.setattr(
        corpus, "_shared", lambda length, *rest: looks.append(length) or shared(length, *rest)
    )
    found = corpus.longest(sample)
    assert (found.length, found.at, found.position) == (41, 500, 777_000)
    assert len(looks) <= 12


def test_samples_are_compared_with_unseen_pieces():
    rng = np.random.default_rng(0)
    rolls = [(rng.random((60, 88)) < 0.05).astype(np.uint8) for _ in range(8)]
    rolls[5][10:14] = rolls[0][30:34]
    data = MusicData("toy", {"train": Songs.pack(rolls[:5]), "test": Songs.pack(rolls[5:6])})
    passages, typical = check([rolls[1][7:27], rolls[7]], data)
    assert [p.length for p in passages] == [20, 0]
    assert (passages[0].name, passages[0].position) == ("train-0001", 7)
    assert typical == 4
    text = TextData(
        "toy", "char", {"train": np.arange(50), "test": np.arange(20, 50)}, [chr(i) for i in range(50)]
    )
    passages, typical = check([np.arange(5, 9)], text)
    assert (passages[0].length, typical) == (4, 4)


def test_the_line_for_a_person():
    line = describe(Passage(17, 20, 1, 11, "chorale 5"), 60, "frames", typical=9)
    assert "17 of 60 frames" in line
    assert "chorale 5" in line
    assert "an unseen test piece shares 9" in line
    assert "nothing" in describe(Passage(0, 0, 0, 0), 60, "frames")
