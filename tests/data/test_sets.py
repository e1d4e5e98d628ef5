"""The benchmark sets: counts, vocabularies and update counts that the literature states."""

from __future__ import annotations

import numpy as np
import pytest

from deeprnn.data import Grid, MusicData, TextData, load
from deeprnn.data.batching import music_chunks
from deeprnn.data.matfile import read_mat
from deeprnn.errors import UserError
from tests.helpers import benchmark_data

MUSIC = {
    "jsb": ((229, 76, 77), (13_807, 4_602, 4_725)),
    "nottingham": ((694, 173, 170), (176_561, 45_513, 44_463)),
    "musedata": ((524, 135, 124), (245_202, 82_755, 64_339)),
}


@pytest.mark.parametrize("name", MUSIC)
def test_music_counts(name):
    benchmark_data()
    data = load(name)
    assert isinstance(data, MusicData)
    assert tuple(len(songs) for songs in data.splits.values()) == MUSIC[name][0]
    assert tuple(songs.frames for songs in data.splits.values()) == MUSIC[name][1]
    assert data.size == 88
    assert sum(songs.nbytes for songs in data.splits.values()) < 5e6, "a few MB at a bit a note"


@pytest.mark.parametrize(("name", "chunk", "updates"), [("jsb", 50, 387), ("nottingham", 200, 1166)])
def test_updates_per_epoch_are_the_papers(name, chunk, updates):
    benchmark_data()
    assert len(music_chunks(load(name).splits["train"], chunk=chunk)) == updates


def test_our_mat_reader_agrees_with_scipy():
    scipy_io = pytest.importorskip("scipy.io")
    path = benchmark_data() / "music" / "JSB_Chorales.mat"
    ours, theirs = read_mat(path), scipy_io.loadmat(path)
    for key in ("traindata", "validdata", "testdata"):
        assert len(ours[key]) == theirs[key].shape[1]
        assert all((a == b).all() for a, b in zip(ours[key], theirs[key][0], strict=True))


@pytest.mark.parametrize(
    ("counting", "counts"),
    [("authors", (5_059_550, 396_412, 446_184)), ("stripped", (5_017_482, 393_042, 442_423))],
)
def test_characters_in_both_countings(counting, counts):
    benchmark_data()
    data = load("ptb-char", counting=counting)
    assert isinstance(data, TextData)
    assert tuple(len(ids) for ids in data.splits.values()) == counts
    assert data.size == 50
    assert data.splits["train"].dtype == np.uint8
    head = data.decode(data.splits["test"][:30])
    assert head.startswith("no it was n't black monday")


def test_words():
    benchmark_data()
    data = load("ptb-word")
    assert isinstance(data, TextData)
    assert tuple(len(ids) for ids in data.splits.values()) == (929_589, 73_760, 82_430)
    assert data.size == 10_000
    assert {"<unk>", "<eos>", "N"} <= set(data.vocabulary)
    assert data.splits["train"].dtype == np.int16
    assert data.decode(data.splits["test"][:7]) == "no it was n't black monday\n"


def test_a_missing_set_says_what_is_expected_where(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPRNN_DATA", str(tmp_path / "given"))
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as caught:
        load("jsb")
    message = str(caught.value)
    assert str(tmp_path / "given" / "music" / "JSB_Chorales.mat") in message
    assert str(tmp_path / "cache") in message
    assert "deeprnn data get jsb" in message


def test_unknown_options_list_the_known_ones():
    with pytest.raises(UserError, match="takes no option chunk; it knows counting"):
        load("ptb-char", chunk=3)


def test_grid_refuses_nonsense():
    assert Grid().size == 88
    assert Grid.from_dict(Grid(2, 30, 40).to_dict()) == Grid(2, 30, 40)
    with pytest.raises(UserError, match=r"40\.\.30"):
        Grid(low=40, high=30)
    with pytest.raises(UserError, match="steps_per_beat=0"):
        Grid(steps_per_beat=0)
