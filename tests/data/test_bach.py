"""Bach: the light reader against music21's own, fixed splits, and the cache."""

from __future__ import annotations

import numpy as np
import pytest

from deeprnn.data import SPLITS, Grid, load
from deeprnn.data.bach import TICKS, corpus_folder, parse_chorales, read_score, split_of
from deeprnn.data.splitting import duplicates_across_splits
from deeprnn.data.transposing import key_of

pytest.importorskip("music21")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def bach(cache, monkeypatch):
    monkeypatch.setenv("DEEPRNN_CACHE", str(cache))
    return load("bach")


def test_all_four_part_chorales(bach):
    assert sum(len(songs) for songs in bach.splits.values()) == 362
    assert [len(bach.splits[split]) for split in SPLITS] == [266, 51, 45]
    assert bach.grid == Grid(steps_per_beat=4)
    for songs in bach.splits.values():
        assert 3.7 < songs.density < 4.0
    assert duplicates_across_splits(bach) == []


def test_a_second_load_comes_from_the_cache(bach, monkeypatch):
    monkeypatch.setattr("deeprnn.data.bach.parse_chorales", None)  # would fail if it were called
    again = load("bach")
    assert again.names == bach.names
    assert (again.splits["test"].packed == bach.splits["test"].packed).all()


@pytest.fixture
def two_chorales(monkeypatch):
    rolls = [np.eye(8, 88, k, dtype=np.uint8) for k in (0, 1)]
    monkeypatch.setattr(
        "deeprnn.data.bach.parse_chorales", lambda *_, **__: (["bwv10.7", "bwv435"], rolls, None)
    )
    return rolls


def test_a_damaged_cache_is_parsed_again(two_chorales, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    first = load("bach")
    (kept,) = tmp_path.glob("bach-*.npz")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    again = load("bach")
    assert again.names == first.names
    assert "parsing the chorales again" in caplog.text
    assert len(kept.read_bytes()) == len(whole), "and kept whole this time"


def test_a_cache_that_cannot_be_written_is_no_hindrance(two_chorales, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path / "file"))
    assert (load("bach").splits["train"][0] == two_chorales[0]).all()
    assert "set DEEPRNN_CACHE" in caplog.text


def test_splits_are_fixed_by_the_number():
    assert [split_of(f"bwv{n}") for n in ("10.7", "435", "9.7")] == ["train", "test", "test"]
    assert split_of("bwv248.23-s") == split_of("bwv248.23-2")


@pytest.mark.parametrize("title", ["bwv269", "bwv10.7", "bwv245.40", "bwv328"])
def test_notes_equal_music21s(title):
    from music21 import converter

    folder, _ = corpus_folder()
    ours = read_score(folder / f"{title}.mxl")
    score = converter.parse(folder / f"{title}.mxl", forceSource=True, storePickle=False)
    assert len(ours) == len(score.parts)
    for part, theirs in zip(ours, score.parts, strict=True):
        flat = theirs.flatten().notes
        spans = [(note.offset, note.offset + note.quarterLength, note.pitch.midi) for note in flat]
        assert part == [(round(a * TICKS), round(b * TICKS), p) for a, b, p in spans if b > a]


def test_transposing_moves_every_chorale_to_c():
    folder, _ = corpus_folder()
    few = folder
    titles, rolls, losses = parse_chorales(
        few, Grid(), transpose=True, progress=lambda paths: list(paths)[:40]
    )
    assert len(titles) == len(rolls) > 20
    assert {key_of(roll, Grid())[0] for roll in rolls} == {0}
    assert losses.out_of_range == 0
    assert all(roll.dtype == np.uint8 and set(np.unique(roll)) <= {0, 1} for roll in rolls)
