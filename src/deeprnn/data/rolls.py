"""Piano rolls from files: .mat in the TCN layout, .pickle in Boulanger-Lewandowski's, .npz and .json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from deeprnn.data.limits import check_frames
from deeprnn.data.matfile import read_mat
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs
from deeprnn.errors import UserError


def load_mat(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .mat of cell arrays `traindata`, `validdata`, `testdata`, each cell a roll (frames, 88)."""
    found = read_mat(path)
    missing = [f"{split}data" for split in SPLITS if f"{split}data" not in found]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(found) or 'nothing'}")
    return from_rolls(name or path.stem, {s: _as_list(found[f"{s}data"], path) for s in SPLITS}, path, grid)


def from_rolls(
    name: str, splits: Mapping[str, Sequence[np.ndarray]], path: Path, grid: Grid | None = None
) -> MusicData:
    """Checked rolls as packed songs: two dimensions, one width, nothing but zeros and ones."""
    widths = {np.shape(roll)[1] if np.ndim(roll) == 2 else -1 for rolls in splits.values() for roll in rolls}
    if -1 in widths or len(widths) > 1:
        raise UserError(f"{path}: songs must all be (frames, pitches) with one width; widths are {widths}")
    width = widths.pop() if widths else 88
    if not 1 <= width <= 128:
        raise UserError(f"{path}: frames have {width} pitches; expected 1 to 128")
    for split, rolls in splits.items():
        for i, roll in enumerate(rolls):
            check_frames(len(roll), f"{path}, song {i} of {split}")
            if not ((roll == 0) | (roll == 1)).all():
                raise UserError(f"{path}, song {i} of {split}: a roll holds values other than 0 and 1")
    packed = {split: Songs.pack(rolls, width) for split, rolls in splits.items()}
    return MusicData(name, packed, grid)


def _as_list(value: object, path: Path) -> list[np.ndarray]:
    if not isinstance(value, list) or not all(isinstance(v, np.ndarray) for v in value):
        raise UserError(f"{path}: expected cell arrays of rolls (the TCN layout)")
    return value


READERS: dict[str, Callable[..., MusicData]] = {".mat": load_mat}
