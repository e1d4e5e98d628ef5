"""Array files: round trips, other people's layouts, damage, and sizes that are only claimed."""

from __future__ import annotations

import io
import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings

from deeprnn.data import Grid, MusicData, Songs, TextData, load
from deeprnn.data.arrays import read_npz
from deeprnn.data.matfile import read_mat
from deeprnn.data.rolls import load_json, load_mat, load_npz, save_npz
from deeprnn.data.text import text_data
from deeprnn.errors import UserError
from tests.data.makers import mutations, npz_bytes, plain_npz, zipped


def make_songs(lengths, pitches=88, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.random((n, pitches)) < 0.1).astype(np.uint8) for n in lengths]


def make_data() -> MusicData:
    splits = {s: Songs.pack(make_songs(lengths, 88, i)) for i, (s, lengths) in enumerate(LENGTHS.items())}
    return MusicData("made", splits, Grid(2))


LENGTHS = {"train": [5, 9], "valid": [3], "test": [4, 2, 1]}


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def mat_bytes(cells=None) -> bytes:
    scipy_io = pytest.importorskip("scipy.io")
    file = io.BytesIO()
    content = {}
    for i, split in enumerate(LENGTHS):
        songs = cells if cells is not None else make_songs(LENGTHS[split], 88, i)
        array = np.empty((1, len(songs)), object)
        for j, song in enumerate(songs):
            array[0, j] = song
        content[f"{split}data"] = array
    scipy_io.savemat(file, content, do_compression=True)
    return file.getvalue()


# Songs


def test_songs_pack_to_bits_and_back():
    rolls = make_songs([4, 0, 7], pitches=13)
    songs = Songs.pack(rolls, 13)
    assert [song.tolist() for song in songs] == [roll.tolist() for roll in rolls]
    assert songs[-1].tolist() == rolls[-1].tolist()
    assert [song.tolist() for song in songs[1:]] == [roll.tolist() for roll in rolls[1:]]
    assert songs.nbytes == 11 * 2 + 3 * 8
    assert (songs.counts() == np.concatenate(rolls).sum(0)).all()
    assert songs.density == pytest.approx(np.concatenate(rolls).sum() / 11)
    with pytest.raises(IndexError):
        songs[3]
    with pytest.raises(UserError, match="shape"):
        Songs.pack([np.zeros((3, 12))], 13)


# .npz


def test_npz_round_trip_of_music(tmp_path):
    data = make_data()
    save_npz(tmp_path / "made.npz", data)
    again = load(tmp_path / "made.npz")
    assert again.grid == data.grid
    assert again.names == data.names
    for split in LENGTHS:
        assert (again.splits[split].packed == data.splits[split].packed).all()
        assert (again.splits[split].lengths == data.splits[split].lengths).all()


def test_npz_round_trip_of_text(tmp_path):
    data = text_data("t", "word", {"train": "a b a\nc\n", "valid": "a d\n", "test": "b\n"})
    save_npz(tmp_path / "t.npz", data)
    again = load(tmp_path / "t.npz")
    assert isinstance(again, TextData)
    assert (again.kind, again.vocabulary) == ("word", data.vocabulary)
    assert all((again.splits[s] == data.splits[s]).all() for s in data.splits)


def test_npz_of_frames_and_lengths(tmp_path):
    arrays = {}
    for i, (split, lengths) in enumerate(LENGTHS.items()):
        arrays[split] = np.concatenate(make_songs(lengths, 88, i))
        arrays[f"{split}_len"] = np.array(lengths)
    data = load_npz(write(tmp_path, "x.npz", npz_bytes(**arrays)))
    assert (data.splits["test"].packed == make_data().splits["test"].packed).all()


def test_npz_refusals(tmp_path):
    bad = {
        "no.npz": (b"PK nonsense", "no .npz archive"),
        "object.npz": (npz_bytes(train=np.array([{}], dtype=object)), "pickled objects"),
        "lacks.npz": (npz_bytes(train=np.zeros((2, 88), np.uint8), train_len=np.array([2])), "lacks valid"),
        "sum.npz": (
            npz_bytes(**{s: np.zeros((2, 88), np.uint8) for s in LENGTHS}, train_len=np.array([3])),
            "sums to 3",
        ),
        "wrap.npz": (  # lengths whose sum in 64 bits is 2 again
            npz_bytes(
                **{s: np.zeros((2, 88), np.uint8) for s in LENGTHS}, train_len=np.array([2**63 - 1] * 2 + [4])
            ),
            "sums to 18,446,744,073,709,551,618",
        ),
        "grid.npz": (
            npz_bytes(
                **{s: np.zeros((1, 88), np.uint8) for s in LENGTHS},
                **{f"{s}_len": np.array([1]) for s in LENGTHS},
                grid=np.array([0, 21, 108]),
            ),
            "grid.npz: steps_per_beat=0",
        ),
        "ids.npz": (
            npz_bytes(
                **{s: np.array([7]) for s in LENGTHS}, vocabulary=np.array(["a"]), kind=np.array("char")
            ),
            "outside the vocabulary",
        ),
    }
    for name, (content, reason) in bad.items():
        with pytest.raises(UserError, match=reason):
            load_npz(write(tmp_path, name, content))


def test_a_claimed_shape_is_not_believed(tmp_path):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 88)}
    )
    path = write(tmp_path, "huge.npz", zipped(train=file.getvalue() + b"\0" * 88))
    with pytest.raises(UserError, match="claims shape"):
        read_npz(path)


def test_a_bomb_is_refused_before_it_is_inflated(tmp_path, monkeypatch):
    path = write(tmp_path, "bomb.npz", npz_bytes(train=np.zeros(50_000_000, np.uint8)))
    assert path.stat().st_size < 100_000
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "1000000")
    with pytest.raises(UserError, match="limit of 1,000,000"):
        load_npz(path)


# .mat


def test_mat_written_by_scipy(tmp_path):
    data = load(write(tmp_path, "x.mat", mat_bytes()))
    for i, split in enumerate(LENGTHS):
        expected = make_songs(LENGTHS[split], 88, i)
        assert all((a == b).all() for a, b in zip(data.splits[split], expected, strict=True))


def test_mat_of_doubles_and_big_endian_numbers(tmp_path):
    songs = [song.astype(np.float64) for song in make_songs([3, 2])]
    data = load_mat(write(tmp_path, "x.mat", mat_bytes(songs)))
    assert [song.tolist() for song in data.splits["train"]] == [song.tolist() for song in songs]


def test_mat_refusals(tmp_path):
    with pytest.raises(UserError, match=r"MATLAB 7\.3"):
        read_mat(write(tmp_path, "a.mat", b"\x89HDF\r\n" + b"\0" * 200))
    with pytest.raises(UserError, match="not a MATLAB 5 file"):
        read_mat(write(tmp_path, "b.mat", b"short"))
    with pytest.raises(UserError, match="other than 0 and 1"):
        load_mat(write(tmp_path, "c.mat", mat_bytes([np.full((2, 88), 3.0)])))
    with pytest.raises(UserError, match="lacks traindata"):
        load_mat(write(tmp_path, "d.mat", b" " * 124 + b"\0\1IM"))


def test_a_mat_bomb_stops_at_the_limit(tmp_path, monkeypatch):
    body = zlib.compress(b"\0" * 50_000_000)
    path = write(tmp_path, "e.mat", b" " * 124 + b"\0\1IM" + struct.pack("<II", 15, len(body)) + body)
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "1000000")
    with pytest.raises(UserError, match="inflates beyond the size limit"):
        read_mat(path)


# .json


def test_json_of_midi_numbers(tmp_path):
    content = {"train": [[[60, 64], [-1], []]], "valid": [[60, None]], "test": [[[61.0]]]}
    data = load_json(write(tmp_path, "x.json", json.dumps(content).encode()))
    train = data.splits["train"][0]
    assert np.argwhere(train).tolist() == [[0, 60 - 21], [0, 64 - 21]]
    assert data.splits["valid"][0].sum() == 1
    assert data.splits["valid"].frames == 2


def test_json_may_say_more_than_songs_and_in_any_order(tmp_path):
    content = {"about": {"by": ["me", 1]}, "test": [[61]], "valid": [], "train": [[], [[60]]]}
    data = load_json(write(tmp_path, "x.json", json.dumps(content, indent=4).encode("utf-8-sig")))
    assert {split: songs.lengths.tolist() for split, songs in data.splits.items()} == {
        "train": [0, 1],
        "valid": [],
        "test": [1],
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not readable JSON"),
        (b"[" * 100_000, "holds a list; expected splits"),
        (b'{"train": [' + b"[" * 100_000, "a frame is no list of numbers|does not end"),
        (b'{"train": [[' + b"[" * 4000 + b"]", "a frame is no list of numbers"),
        (b'{"train": [[60 61]]}', "',' was expected"),
        (b'{"train": [[60}]}', "frame|expected"),
        (b'{"train": [], } ', "quotation marks"),
        (b'{"train": [[[60]]], "valid": [], "test": []} more', "nothing more was expected"),
        (b'{"about": [1, {"a": 2}, "train": []}', "the entry 'about'"),
        (b"[]", "expected splits"),
        (b'{"train": []}', "lacks valid, test"),
        (b'{"train": 3, "valid": [], "test": []}', "expected a list"),
        (b'{"train": [[[300]]], "valid": [], "test": []}', "outside 21..108"),
        (b'{"train": [[["a"]]], "valid": [], "test": []}', "str stands where"),
        (b'{"train": [[[60.5]]], "valid": [], "test": []}', "float stands where"),
        (b'{"train": [[[NaN]]], "valid": [], "test": []}', "stands where|outside"),
        (b'{"train": [[[1e999]]], "valid": [], "test": []}', "stands where|outside"),
        (b"9" * 10_000, "expected splits|not readable"),
        (b"\xff\xfe", "not readable JSON"),
    ],
)
def test_json_refusals(tmp_path, content, reason):
    with pytest.raises(UserError, match=reason):
        load_json(write(tmp_path, "x.json", content))


def test_the_size_limit_and_its_override(tmp_path, monkeypatch):
    path = write(tmp_path, "x.json", b'{"train": [[[60]]], "valid": [[[60]]], "test": [[[60]]]}')
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "20")
    with pytest.raises(UserError, match="set DEEPRNN_MAX_BYTES"):
        load(path)
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "2000")
    assert load(path).splits["train"].frames == 1
    monkeypatch.setenv("DEEPRNN_MAX_BYTES", "many")
    with pytest.raises(UserError, match="DEEPRNN_MAX_BYTES='many' is not a whole number"):
        load(path)
    monkeypatch.delenv("DEEPRNN_MAX_BYTES")
    monkeypatch.setenv("DEEPRNN_MAX_FRAMES", "few")
    with pytest.raises(UserError, match="DEEPRNN_MAX_FRAMES='few' is not a whole number"):
        load(path)


# mutations of each


def check_mutation(tmp_path_factory, suffix, data):
    path = tmp_path_factory.getbasetemp() / f"mutated{suffix}"
    path.write_bytes(data)
    try:
        found = load(path)
    except UserError:
        return
    assert found.size > 0


JSON = json.dumps({"train": [[[60, 64], [62]]], "valid": [[[60]]], "test": [[[], [61]]]}).encode()


@settings(max_examples=100, deadline=None)
@given(mutations(JSON))
def test_a_mutated_json_is_data_or_a_clean_error(tmp_path_factory, data):
    check_mutation(tmp_path_factory, ".json", data)


NPZ = plain_npz(
    **{s: np.concatenate(make_songs(n)) for s, n in LENGTHS.items()},
    **{f"{s}_len": np.array(n) for s, n in LENGTHS.items()},
)


@settings(max_examples=100, deadline=None)
@given(mutations(NPZ))
def test_a_mutated_npz_is_data_or_a_clean_error(tmp_path_factory, data):
    check_mutation(tmp_path_factory, ".npz", data)


ARRAY = io.BytesIO()
np.save(ARRAY, np.zeros((3, 88), np.uint8))


@settings(max_examples=100, deadline=None)
@given(mutations(ARRAY.getvalue()))
def test_a_mutated_array_behind_a_right_checksum_is_data_or_a_clean_error(tmp_path_factory, data):
    length = io.BytesIO()
    np.save(length, np.array([3]))
    members = dict.fromkeys(LENGTHS, data) | {f"{s}_len": length.getvalue() for s in LENGTHS}
    check_mutation(tmp_path_factory, ".npz", zipped(**members))


def uncompressed_mat() -> bytes:
    scipy_io = pytest.importorskip("scipy.io")
    file = io.BytesIO()
    cell = np.empty((1, 1), object)
    cell[0, 0] = make_songs([3])[0]
    scipy_io.savemat(file, {f"{s}data": cell for s in LENGTHS}, do_compression=False)
    return file.getvalue()


@settings(max_examples=100, deadline=None)
@given(mutations(uncompressed_mat()))
def test_a_mutated_mat_is_data_or_a_clean_error(tmp_path_factory, data):
    check_mutation(tmp_path_factory, ".mat", data)
