"""Which split a file belongs to, and songs that stand in more than one."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from deeprnn.data.music import SPLITS, MusicData

SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}

_WORDS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
_WORDS |= {"dev": "valid", "test": "test"}


def split_by_hash(digest: str) -> str:
    """train, valid or test from a file's sha256: it stays the same whatever other files are added."""
    point = int(digest[:16], 16) / 2**64
    return "train" if point < SHARES["train"] else "valid" if point < 1 - SHARES["test"] else "test"


def split_all(digests: list[str]) -> tuple[list[str], list[int]]:
    """The split of every file, and which were moved because too few files left a split empty.

    While every split has a file of its own, this is `split_by_hash` and adding files moves none.
    """
    splits, moved = [split_by_hash(digest) for digest in digests], []
    for wanted in SPLITS:
        donor = max(SPLITS, key=splits.count)
        if wanted in splits or splits.count(donor) < 2:
            continue
        chosen = max((i for i, split in enumerate(splits) if split == donor), key=lambda i: digests[i])
        splits[chosen] = wanted
        moved.append(chosen)
    return splits, moved


def named_split(path: str) -> str | None:
    """The split that a path spells, in a folder or in the file's name; None for none or several."""
    words = [word for part in Path(path).parts for word in re.split(r"[._\- ]", part.lower())]
    found = {_WORDS[word] for word in words if word in _WORDS}
    return found.pop() if len(found) == 1 else None


def duplicates_across_splits(data: MusicData) -> list[tuple[str, str]]:
    """Songs of one split whose frames equal a song's of an earlier split, as pairs of names."""
    seen: dict[bytes, tuple[str, str]] = {}
    pairs = []
    for split in data.splits:
        for name, roll in zip(data.names[split], data.splits[split], strict=True):
            key = hashlib.sha256(roll.tobytes()).digest()
            first = seen.setdefault(key, (split, name))
            if first[0] != split:
                pairs.append((f"{first[0]}/{first[1]}", f"{split}/{name}"))
    return pairs
