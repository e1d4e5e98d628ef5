"""A few beginnings from data that a model was not trained on: something of its own to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from deeprnn.data.music import MusicData
from deeprnn.data.text import END, TextData

MOST = 8
BEATS = 8
SYMBOLS = {"char": 60, "word": 12}


def openings(data: MusicData | TextData) -> list[dict[str, Any]]:
    """Beginnings by name, of the test part where there is one: `frames` (lists of keys) of music, `text` of text."""
    split = next((s for s in ("test", "valid", "train") if len(data.splits.get(s, ()))), None)
    if split is None:
        return []
    return _music(data, split) if isinstance(data, MusicData) else _text(data, split)


def _music(data: MusicData, split: str) -> list[dict[str, Any]]:
    """The first two bars of some pieces, from their first note on."""
    songs, names = data.splits[split], data.names[split]
    length = BEATS * (data.grid.steps_per_beat if data.grid else 4)
    openings = []
    for i in _spread(len(songs)):
        roll = songs[i]
        sounding = np.flatnonzero(roll.any(axis=1))
        if len(sounding):
            first = int(sounding[0])
            frames = [np.flatnonzero(frame).tolist() for frame in roll[first : first + length]]
            openings.append({"name": PurePath(names[i]).stem, "frames": frames})
    return openings


def _text(data: TextData, split: str) -> list[dict[str, Any]]:
    """The beginnings of some lines, to a word's end."""
    stream, length = data.splits[split], SYMBOLS[data.kind]
    end = "\n" if data.kind == "char" else END
    ends = (
        np.flatnonzero(stream == data.vocabulary.index(end)) if end in data.vocabulary else np.zeros(0, int)
    )
    starts = [0, *(int(e) + 1 for e in ends[:-1])]
    lines = [(a, b) for a, b in zip(starts, (*starts[1:], len(stream)), strict=True) if b - a > length // 2]
    openings = []
    for i in _spread(len(lines)):
        start, stop = lines[i]
        text = data.decode(stream[start : min(start + length, stop)]).rstrip("\n")
        if data.kind == "char" and stop > start + length and " " in text.strip():
            text = text[: text.rindex(" ") + 1]
        openings.append({"name": text[:40], "text": text})
    return openings


def _spread(count: int) -> Sequence[int]:
    """At most `MOST` of the indices, evenly spread."""
    return range(count) if count <= MOST else [i * count // MOST for i in range(MOST)]
