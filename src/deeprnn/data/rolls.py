"""Piano rolls from files with splits of their own: .mat, .pickle, .npz and .json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.arrays import read_npz
from deeprnn.data.jsonfile import read_json_songs
from deeprnn.data.limits import check_frames, check_memory, check_songs
from deeprnn.data.matfile import read_mat
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs
from deeprnn.data.notelists import SongCollector, listed
from deeprnn.data.pickles import read_pickle
from deeprnn.data.text import TextData
from deeprnn.errors import UserError
from deeprnn.files import open_atomically


def load_mat(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .mat of cell arrays `traindata`, `validdata`, `testdata`, each cell a roll (frames, pitches)."""
    variables = read_mat(path)
    _require([f"{split}data" for split in SPLITS], variables, path)
    splits = {split: variables[f"{split}data"] for split in SPLITS}
    for split, songs in splits.items():
        if not isinstance(songs, list) or not all(isinstance(song, np.ndarray) for song in songs):
            raise UserError(f"{path}: {split}data is not a cell array of rolls (the TCN layout)")
    return from_rolls(name or path.stem, splits, path, grid)  # pyright: ignore[reportArgumentType]


def load_pickle(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .pickle in Boulanger-Lewandowski's layout: splits of songs of frames of MIDI numbers."""
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected splits {', '.join(SPLITS)}")
    content = {_text_key(key): value for key, value in content.items()}
    _require(list(SPLITS), content, path)
    splits = {split: _songs_of_notes(content[split], path, split, grid or Grid()) for split in SPLITS}
    return MusicData(name or path.stem, splits, grid)


def load_json(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .json in the same layout; -1 and null are rests."""
    splits = read_json_songs(path, grid or Grid())
    _require(list(SPLITS), splits, path)
    return MusicData(name or path.stem, {split: splits[split] for split in SPLITS}, grid)


def load_npz(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData | TextData:
    """A .npz as `save_npz` writes, or with frames `train` (N, pitches) and `train_len` for each split."""
    arrays = read_npz(path)
    name = name or path.stem
    if "vocabulary" in arrays:
        return _stored_text(name, arrays, path)
    grid = grid or _stored_grid(arrays, path)
    if f"{SPLITS[0]}_packed" in arrays:
        _require([f"{split}_packed" for split in SPLITS], arrays, path)
        data = MusicData(name, {split: _stored_songs(arrays, split, path, grid) for split in SPLITS}, grid)
    else:
        _require(list(SPLITS), arrays, path)
        rolls = {split: _cut(_table(arrays, split, path), arrays, split, path) for split in SPLITS}
        data = from_rolls(name, rolls, path, grid)
    for split in SPLITS:
        titles = [str(title) for title in arrays.get(f"{split}_names", np.array([])).ravel()]
        if len(titles) == len(data.splits[split]):
            data.names[split] = titles
    return data


def save_npz(path: Path, data: MusicData | TextData) -> None:
    """Data in one file that `load` reads back: packed frames, or symbol ids with their vocabulary."""
    arrays: dict[str, Any] = {}
    if isinstance(data, TextData):
        arrays = {"vocabulary": np.array(data.vocabulary), "kind": np.array(data.kind), **data.splits}
    else:
        arrays["pitches"] = np.array(data.size)
        if data.grid:
            arrays["grid"] = np.array([data.grid.steps_per_beat, data.grid.low, data.grid.high])
        for split, songs in data.splits.items():
            arrays |= {f"{split}_packed": songs.packed, f"{split}_lengths": songs.lengths}
            arrays[f"{split}_names"] = np.array(data.names[split], dtype=np.str_)
    with open_atomically(path) as file:
        np.savez_compressed(file, **arrays)


def _songs_of_notes(value: Any, path: Path, split: str, grid: Grid) -> Songs:
    what, size = f"{path}, {split}", path.stat().st_size
    songs = listed(value, what)
    # A pickle can list one song a million times over: count before anything is built.
    frames = sum(len(listed(song, what)) for song in songs)
    check_memory(frames * ((grid.size + 7) // 8), size, what)
    collector = SongCollector(grid, what, size)
    for song in songs:
        collector.add(song)
    return collector.songs()


def from_rolls(
    name: str, splits: Mapping[str, Sequence[np.ndarray]], path: Path, grid: Grid | None = None
) -> MusicData:
    """Checked rolls as packed songs: two dimensions, one width, nothing but zeros and ones."""
    widths = {np.shape(roll)[1] if np.ndim(roll) == 2 else -1 for rolls in splits.values() for roll in rolls}
    if -1 in widths or len(widths) > 1:
        raise UserError(f"{path}: songs must all be (frames, pitches) of one width; widths are {widths}")
    width = widths.pop() if widths else 88
    _check_width(width, path, grid)
    for split, rolls in splits.items():
        check_songs(len(rolls), f"{path}, {split}")
        for i, roll in enumerate(rolls):
            check_frames(len(roll), f"{path}, song {i} of {split}")
            if not ((roll == 0) | (roll == 1)).all():
                raise UserError(f"{path}, song {i} of {split}: a roll holds values other than 0 and 1")
    return MusicData(name, {split: Songs.pack(rolls, width) for split, rolls in splits.items()}, grid)


def _text_key(key: object) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def _require(keys: list[str], variables: Mapping[str, object], path: Path) -> None:
    missing = [key for key in keys if key not in variables]
    if missing:
        listed = ", ".join(list(variables)[:12]) or "nothing"
        raise UserError(f"{path} lacks {', '.join(missing)}; it holds {listed}")


def _numbers(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype.kind not in "iub":
        raise UserError(f"{path}: an array of {array.dtype} stands where whole numbers are expected")
    return array


def _table(arrays: Mapping[str, np.ndarray], key: str, path: Path) -> np.ndarray:
    table = arrays[key]
    if (
        table.ndim != 2
        or table.dtype.kind not in "iubf"
        or (key.endswith("_packed") and table.dtype != np.uint8)
    ):
        raise UserError(f"{path}: {key} is {table.dtype} of shape {table.shape}; expected frames by pitches")
    return table


def _check_width(width: int, path: Path, grid: Grid | None) -> None:
    if not 1 <= width <= 128 or (grid and grid.size != width):
        raise UserError(f"{path}: frames have {width} pitches; expected {grid.size if grid else '1 to 128'}")


def _stored_grid(arrays: Mapping[str, np.ndarray], path: Path) -> Grid | None:
    if "grid" not in arrays:
        return None
    try:
        return Grid(*(int(v) for v in _numbers(arrays["grid"], path).ravel()[:3]))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _stored_songs(arrays: Mapping[str, np.ndarray], split: str, path: Path, grid: Grid | None) -> Songs:
    """Packed frames as they stand; unpacking them would take eight times the memory."""
    packed = _table(arrays, f"{split}_packed", path)
    value = arrays.get("pitches", np.array(8 * packed.shape[1]))
    pitches = int(value.ravel()[0]) if value.size and value.dtype.kind in "iu" else 0
    if packed.shape[1] != (pitches + 7) // 8:
        raise UserError(f"{path}: pitches={pitches} does not fit frames of {8 * packed.shape[1]} bits")
    _check_width(pitches, path, grid)
    lengths = _lengths(packed, arrays, split, path)
    check_frames(int(lengths.max(initial=0)), f"{path}, a song of {split}")
    spare = -pitches % 8
    if (packed[:, -1] & ((1 << spare) - 1)).any():
        raise UserError(f"{path}: {split}_packed has notes beyond its {pitches} pitches")
    return Songs(packed, lengths, pitches)


def _cut(frames: np.ndarray, arrays: Mapping[str, np.ndarray], split: str, path: Path) -> list[np.ndarray]:
    lengths = _lengths(frames, arrays, split, path)
    return np.split(frames, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _lengths(frames: np.ndarray, arrays: Mapping[str, np.ndarray], split: str, path: Path) -> np.ndarray:
    """The number of frames of each song; together as many as there are."""
    key = f"{split}_lengths" if f"{split}_lengths" in arrays else f"{split}_len"
    _require([key], arrays, path)
    check_songs(arrays[key].size, f"{path}, {split}")
    lengths = _numbers(arrays[key], path).ravel().astype(np.int64)
    total = sum(lengths.tolist())  # in Python's integers: numpy's would wrap around to any number wanted
    if (lengths < 0).any() or total != len(frames):
        raise UserError(f"{path}: {key} sums to {total:,}, but there are {len(frames):,} frames")
    return lengths


def _stored_text(name: str, arrays: Mapping[str, np.ndarray], path: Path) -> TextData:
    _require([*SPLITS, "kind"], arrays, path)
    vocabulary = [str(symbol) for symbol in arrays["vocabulary"].ravel()]
    kind = str(arrays["kind"])
    if kind not in ("char", "word") or arrays["vocabulary"].dtype.kind != "U":
        raise UserError(f"{path}: kind={kind!r} with a vocabulary of {arrays['vocabulary'].dtype} is no text")
    for split in SPLITS:
        ids = _numbers(arrays[split], path)
        if ids.ndim != 1 or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(vocabulary)):
            raise UserError(f"{path}: {split} holds ids outside the vocabulary of {len(vocabulary)}")
    return TextData(name, kind, {split: arrays[split].copy() for split in SPLITS}, vocabulary)


READERS: dict[str, Callable[..., MusicData | TextData]] = {
    ".mat": load_mat,
    ".pickle": load_pickle,
    ".pkl": load_pickle,
    ".npz": load_npz,
    ".json": load_json,
}
"""Files that carry their own splits, by suffix."""
