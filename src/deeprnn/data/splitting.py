"""Which split a file belongs to, and songs that stand in more than one."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from deeprnn.data.music import SPLITS, MusicData

SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
CUTS = (0.9, 0.95)  # of one text: where valid and test begin

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


def ended(text: str) -> str:
    """A text whose last line ends as the others do."""
    return text if text.endswith("\n") else text + "\n"


def cut_in_order(text: str) -> tuple[dict[str, str], str]:
    """One text as 90 : 5 : 5 in its own order, and where it was cut.

    At line ends by the number of lines, or, where there are too few lines to fill the splits, between
    words by the number of characters: some corpora are one line.
    """
    lines = ended(text).splitlines(keepends=True)
    first, second = (round(share * len(lines)) for share in CUTS)
    if 0 < first < second < len(lines):
        cut = ("".join(part) for part in (lines[:first], lines[first:second], lines[second:]))
        return dict(zip(SPLITS, cut, strict=True)), "line ends"
    starts = [round(share * len(text)) for share in CUTS]
    for i, stop in ((1, len(text)), (0, starts[1])):
        if space := re.compile(r"\s(?=\S)").search(text, starts[i], stop):
            starts[i] = space.end()
    first, second = starts
    return {"train": text[:first], "valid": text[first:second], "test": text[second:]}, "words"


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
