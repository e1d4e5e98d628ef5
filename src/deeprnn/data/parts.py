"""Files that were read, divided into the parts to train, validate and test on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deeprnn.data.cutting import Cut, ended
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs
from deeprnn.data.report import Report
from deeprnn.data.splitting import named_split, split_all


@dataclass
class Item:
    """A file's content: packed frames (T, bytes) or text."""

    path: str
    content: np.ndarray | str
    digest: str  # of the file
    same: str  # of what it holds: equal for files that differ in their bytes alone
    cut: Cut | None  # where it can be cut in three
    split: str | None = None  # None: it is cut

    def pieces(self) -> dict[str, np.ndarray | str]:
        """The parts of the item that go to each split."""
        if self.split:
            return {self.split: self.content}
        assert self.cut
        first, second, _ = self.cut
        parts = self.content[:first], self.content[first:second], self.content[second:]
        return dict(zip(SPLITS, parts, strict=True))


def assign(items: Sequence[Item], report: Report) -> None:
    """Splits that names give (train.txt, test/a.mid), where all files have one; else by hash or length."""
    by_name = [named_split(item.path) for item in items]
    if set(by_name) == set(SPLITS):
        splits = by_name
    else:
        sizes = [len(item.content) for item in items]
        splits = split_all(sizes, [item.digest for item in items], [item.cut is not None for item in items])
    accepted = {file.path: file for file in report.files}
    for item, split in zip(items, splits, strict=True):
        item.split = split
        accepted[item.path].split = split or (f"all three, cut at {item.cut.where}" if item.cut else "")
    _find_duplicates(items, report)
    if len(items) > 1:
        shares: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        for item in items:
            for split, piece in item.pieces().items():
                shares[split][item.path] = len(piece)
        report.warn_of_large(shares)


def _find_duplicates(items: Sequence[Item], report: Report) -> None:
    seen: dict[str, Item] = {}
    for item in items:
        first = seen.setdefault(item.same, item)
        if first.split != item.split:
            pair = (f"{one.split or 'all three'}/{one.path}" for one in (first, item))
            report.duplicates.append(tuple(pair))  # type: ignore[arg-type]


def music_of(name: str, items: Sequence[Item], grid: Grid) -> MusicData:
    """Songs by split."""
    packed: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    for item in items:
        for split, piece in item.pieces().items():
            packed[split].append(np.asarray(piece))
            part = "" if item.split else f" (part {SPLITS.index(split) + 1} of 3)"
            names[split].append(item.path + part)
    empty = np.zeros((0, (grid.size + 7) // 8), np.uint8)
    songs = {
        split: Songs(np.concatenate([empty, *parts]), np.array([len(p) for p in parts], np.int64), grid.size)
        for split, parts in packed.items()
    }
    return MusicData(name, songs, grid, names)


def text_of(items: list[Item]) -> dict[str, str]:
    """The text of each split; the items give theirs up, for a long one should not be held twice."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    several = len(items) > 1
    while items:
        item = items.pop(0)
        for split, piece in item.pieces().items():
            whole_lines = several or (item.cut and item.cut.where == "line ends")
            texts[split].append(ended(str(piece)) if whole_lines else str(piece))
        del item
    return {split: texts[split][0] if len(texts[split]) == 1 else "".join(texts[split]) for split in SPLITS}
