"""Pickles: plain data is read as pickle reads it; everything else is refused and nothing runs."""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.data.pickles import loads
from deeprnn.data.rolls import load_mat, load_pickle
from deeprnn.errors import UserError
from tests.data.makers import mutations
from tests.helpers import benchmark_data

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(plain, st.integers(0, 5))
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    assert loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize(
    "scalar", [np.int64(60), np.int32(-3), np.uint8(200), np.float32(1.5), np.bool_(True)]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_scalars(scalar, protocol):
    assert loads(pickle.dumps({"train": [[(scalar,)]]}, protocol)) == {"train": [[(scalar.item(),)]]}


def test_shared_objects_stay_shared():
    inner = [1, 2]
    found = loads(pickle.dumps([inner, inner]))
    assert found[0] is found[1]


class Harmful:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    witness = tmp_path / "ran"
    path = tmp_path / "songs.pickle"
    path.write_bytes(pickle.dumps({"train": Harmful(f"touch {witness}")}, protocol))
    with pytest.raises(UserError, match=r"refused: it would import \w+.system"):
        load_pickle(path)
    assert not witness.exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"cnumpy\nload\n.", "numpy.load"),
        (b"(i__main__\nThing\n.", "instruction INST"),
        (b"\x80\x02cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.", "scalar of type 'O8'"),
        (pickle.dumps({1, 2}), "instruction EMPTY_SET|builtins.set"),
        (pickle.dumps(np.zeros(3)), "_reconstruct"),
        (b"\x80\x02P123\n.", "instruction PERSID"),
        (b"]", "damaged"),
        (b"", "damaged"),
        (b"(t1.", "damaged"),
        (b"a.", "damaged"),
    ],
)
def test_everything_else_is_refused_with_a_reason(data, reason):
    with pytest.raises(UserError, match=reason):
        loads(data)


def test_a_claimed_memo_of_billions_takes_no_memory():
    with pytest.raises(UserError, match="object 2147483647 is numbered where 0 comes next"):
        loads(b"\x80\x02K\x05r\xff\xff\xff\x7f.")


def test_memos_counted_from_one_as_python_2_wrote_them():
    assert loads(b"\x80\x02]q\x01(h\x01K\x05e.")[1] == 5


def test_numbers_of_thousands_of_digits_are_refused():
    with pytest.raises(UserError, match="instruction LONG4"):
        loads(pickle.dumps(2**3000, 2))


def test_a_claimed_string_of_gigabytes_is_damage():
    with pytest.raises(UserError, match="damaged"):
        loads(b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc.")


def test_one_song_listed_a_million_times_is_counted_before_it_is_built(tmp_path):
    song = [(60,)] * 1000
    content = {"train": [song] * 100_000, "valid": [], "test": []}
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps(content, 2))
    assert path.stat().st_size < 1_000_000
    with pytest.raises(UserError, match="DEEPRNN_MAX_MEMORY"):
        load_pickle(path)


def test_deep_nesting_is_an_error_not_a_crash(tmp_path):
    deep = b"]" * 50_000 + b"a" * 49_999 + b"."
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x02}(X\x05\x00\x00\x00train" + deep[:-1] + b"u.")
    with pytest.raises(UserError):
        load_pickle(path)


ORIGINAL = pickle.dumps(
    {"train": [[(np.int64(60), np.int64(64)), (62,)]], "valid": [[(60,)]], "test": [[(), (61,)]]}, 2
)


@settings(max_examples=120, deadline=None)
@given(mutations(ORIGINAL))
def test_a_mutated_pickle_is_data_or_a_clean_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "mutated.pickle"
    path.write_bytes(data)
    try:
        songs = load_pickle(path)
    except UserError:
        return
    assert songs.size == 88


def test_the_jsb_pickle_equals_the_mat():
    folder = benchmark_data() / "music"
    ours, theirs = load_pickle(folder / "JSB Chorales.pickle"), load_mat(folder / "JSB_Chorales.mat")
    for split in ("train", "valid", "test"):
        assert (ours.splits[split].lengths == theirs.splits[split].lengths).all()
        assert (ours.splits[split].packed == theirs.splits[split].packed).all()
