"""Which split a file belongs to, and songs that stand in more than one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from deeprnn.data.music import SPLITS, MusicData

SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}

CUTS = (SHARES["train"], SHARES["train"] + SHARES["valid"])
"""Where valid and test begin in a file that is cut."""

LARGEST = 1 / 3
"""A file that is more of a split than this decides its score almost alone."""

_WORDS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
_WORDS |= {"dev": "valid", "test": "test"}


def split_by_hash(digest: str) -> str:
    """train, valid or test from a file's sha256: it stays the same whatever other files are added."""
    point = int(digest[:16], 16) / 2**64
    return "train" if point < SHARES["train"] else "valid" if point < 1 - SHARES["test"] else "test"


def split_all(sizes: Sequence[int], digests: Sequence[str], can_be_cut: Sequence[bool]) -> list[str | None]:
    """The split of every file; None for one that is to be cut into all three.

    By hash where that gives balanced splits, as with many files it does: adding files then moves none.
    Otherwise files are dealt out from the longest to the shortest, so that every split has its share of the
    frames and files of all lengths. A file that alone would be more than a third of a split is trained on;
    where too little else is left to validate and test on, it is cut.
    """
    by_hash = [split_by_hash(digest) for digest in digests]
    if _balanced(by_hash, sizes):
        return list(by_hash)
    total = sum(sizes)
    long = [size > LARGEST * SHARES["valid"] * total for size in sizes]
    others = sum(size for size, is_long in zip(sizes, long, strict=True) if not is_long)
    enough = others >= 2 * (SHARES["valid"] + SHARES["test"]) * total
    cut = [is_long and can and not enough for is_long, can in zip(long, can_be_cut, strict=True)]
    splits: list[str | None] = [None] * len(sizes)
    seen = sum(size for size, is_cut in zip(sizes, cut, strict=True) if is_cut)
    filled = {split: SHARES[split] * seen for split in SPLITS}
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], digests[i])):
        if cut[i]:
            continue
        seen += sizes[i]
        allowed = SPLITS[:1] if long[i] and enough else SPLITS
        chosen = max(allowed, key=lambda split: SHARES[split] * seen - filled[split])
        splits[i] = chosen
        filled[chosen] += sizes[i]
    if not any(cut):
        _fill_empty(splits, sizes)
    return splits


def _balanced(splits: Sequence[str], sizes: Sequence[int]) -> bool:
    """Whether valid and test have about their share of the frames, and no file in them has too much of it."""
    for split in SPLITS[1:]:
        in_split = [size for size, name in zip(sizes, splits, strict=True) if name == split]
        frames = sum(in_split)
        if not 2 / 3 <= frames / (SHARES[split] * sum(sizes)) <= 3 / 2 or max(in_split) > LARGEST * frames:
            return False
    return True


def _fill_empty(splits: list[str | None], sizes: Sequence[int]) -> None:
    """Give every split a file, from the one with most, while there are enough: the shortest it has."""
    for split in SPLITS:
        donor = max(SPLITS, key=splits.count)
        if split not in splits and splits.count(donor) > 1:
            splits[min((i for i, s in enumerate(splits) if s == donor), key=lambda i: sizes[i])] = split


def named_split(path: str) -> str | None:
    """The split that a path spells, in a folder or in the file's name; None for none or several."""
    words = [word for part in Path(path).parts for word in re.split(r"[._\- ]", part.lower())]
    spelt = {_WORDS[word] for word in words if word in _WORDS}
    return spelt.pop() if len(spelt) == 1 else None


def duplicates_across_splits(data: MusicData) -> list[tuple[str, str]]:
    """Songs of one split whose frames equal a song's of an earlier split, as pairs of names."""
    seen: dict[bytes, tuple[str, str]] = {}
    pairs = []
    for split in data.splits:
        for name, packed in zip(data.names[split], data.splits[split].each_packed(), strict=True):
            key = hashlib.sha256(packed.tobytes()).digest()
            first = seen.setdefault(key, (split, name))
            if first[0] != split:
                pairs.append((f"{first[0]}/{first[1]}", f"{split}/{name}"))
    return pairs
