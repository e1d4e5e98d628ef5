"""Splits: by hash where that is balanced, else dealt by length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.data.music import SPLITS
from deeprnn.data.splitting import SHARES, split_all, split_by_hash


def digests(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32).hex() for _ in range(count)]


def test_shares_of_the_hash_split():
    splits = [split_by_hash(digest) for digest in digests(4000)]
    assert 0.77 < splits.count("train") / 4000 < 0.83
    assert 0.08 < splits.count("valid") / 4000 < 0.12


def test_adding_files_to_many_moves_none():
    sizes = np.random.default_rng(1).integers(100, 1000, 500).tolist()
    names = digests(500)
    before = split_all(sizes[:400], names[:400], [True] * 400)
    assert split_all(sizes, names, [True] * 500)[:400] == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(50, 5000), min_size=3, max_size=60), st.integers(0, 9), st.booleans())
def test_every_split_has_files_whatever_their_lengths(sizes, seed, can_be_cut):
    splits = split_all(sizes, digests(len(sizes), seed), [can_be_cut] * len(sizes))
    assert can_be_cut or None not in splits
    assert None in splits or set(splits) == set(SPLITS)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 400), min_size=40, max_size=80), st.integers(0, 9))
def test_splits_have_their_shares_of_the_frames(sizes, seed):
    splits = split_all(sizes, digests(len(sizes), seed), [True] * len(sizes))
    for split in ("valid", "test"):
        mine = [size for size, name in zip(sizes, splits, strict=True) if name == split]
        assert sum(mine) / sum(sizes) == pytest.approx(SHARES[split], rel=0.5)
        assert max(mine) <= sum(mine) / 2


def test_a_long_file_is_trained_on_where_others_suffice_and_cut_where_they_do_not():
    sizes = [3000] + [100] * 30
    assert split_all(sizes, digests(31), [True] * 31)[0] == "train"
    sizes = [3000] + [100] * 5
    assert split_all(sizes, digests(6), [True] * 6)[0] is None
    assert split_all(sizes, digests(6), [False] * 6)[0] == "train"
