"""Piano rolls from files with splits of their own: .mat, .pickle, .npz and .json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.arrays import read_npz
from deeprnn.data.files import write_atomically
from deeprnn.data.limits import check_bytes, check_frames, read_bytes
from deeprnn.data.matfile import read_mat
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs, roll_of_notes
from deeprnn.data.pickles import read_pickle
from deeprnn.data.text import TextData
from deeprnn.errors import UserError

_MAX_NOTES = 1024  # a frame may repeat a note, but not without end


def load_mat(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .mat of cell arrays `traindata`, `validdata`, `testdata`, each cell a roll (frames, pitches)."""
    found = read_mat(path)
    _require([f"{split}data" for split in SPLITS], found, path)
    splits = {split: found[f"{split}data"] for split in SPLITS}
    for split, songs in splits.items():
        if not isinstance(songs, list) or not all(isinstance(song, np.ndarray) for song in songs):
            raise UserError(f"{path}: {split}data is not a cell array of rolls (the TCN layout)")
    return from_rolls(name or path.stem, splits, path, grid)  # pyright: ignore[reportArgumentType]


def load_pickle(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .pickle in Boulanger-Lewandowski's layout: splits of songs of frames of MIDI numbers."""
    return from_notes(name or path.stem, read_pickle(path), path, grid)


def load_json(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData:
    """A .json in the same layout; -1 and null are rests."""
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    return from_notes(name or path.stem, content, path, grid)


def load_npz(path: Path, name: str | None = None, grid: Grid | None = None) -> MusicData | TextData:
    """A .npz as `save_npz` writes, or with frames `train` (N, pitches) and `train_len` for each split."""
    found = read_npz(path)
    name = name or path.stem
    if "vocabulary" in found:
        return _stored_text(name, found, path)
    splits = {}
    for split in SPLITS:
        if f"{split}_packed" in found:
            frames = np.unpackbits(_table(found, f"{split}_packed", path), axis=1)
            frames = frames[:, : _pitches(found, frames.shape[1], path)]
        else:
            _require([split], found, path)
            frames = _table(found, split, path)
        splits[split] = _cut(frames, found, split, path)
    if grid is None and "grid" in found:
        try:
            grid = Grid(*(int(v) for v in _numbers(found["grid"], path).ravel()[:3]))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    data = from_rolls(name, splits, path, grid)
    for split in SPLITS:
        titles = [str(title) for title in found.get(f"{split}_names", np.array([])).ravel()]
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
    with write_atomically(path) as file:
        np.savez_compressed(file, **arrays)


def from_notes(name: str, content: Any, path: Path, grid: Grid | None = None) -> MusicData:
    """Checked splits of songs of frames of MIDI numbers, as packed songs over the grid's pitches."""
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected splits {', '.join(SPLITS)}")
    content = {_text_key(key): value for key, value in content.items()}
    _require(list(SPLITS), content, path)
    used = grid or Grid()
    packed = {}
    for split in SPLITS:
        songs = _listed(content[split], f"{path}, {split}")
        # A pickle can list one song a million times over: count before anything is built.
        frames = sum(len(_listed(song, f"{path}, {split}")) for song in songs)
        check_bytes(frames * used.size, f"{path}, {split} as a roll,")
        rolls = (_roll(song, used, f"{path}, song {i} of {split}") for i, song in enumerate(songs))
        packed[split] = Songs.pack(rolls, used.size)
    return MusicData(name, packed, grid)


def from_rolls(
    name: str, splits: Mapping[str, Sequence[np.ndarray]], path: Path, grid: Grid | None = None
) -> MusicData:
    """Checked rolls as packed songs: two dimensions, one width, nothing but zeros and ones."""
    widths = {np.shape(roll)[1] if np.ndim(roll) == 2 else -1 for rolls in splits.values() for roll in rolls}
    if -1 in widths or len(widths) > 1:
        raise UserError(f"{path}: songs must all be (frames, pitches) of one width; widths are {widths}")
    width = widths.pop() if widths else 88
    if not 1 <= width <= 128 or (grid and grid.size != width):
        raise UserError(f"{path}: frames have {width} pitches; expected {grid.size if grid else '1 to 128'}")
    for split, rolls in splits.items():
        for i, roll in enumerate(rolls):
            check_frames(len(roll), f"{path}, song {i} of {split}")
            if not ((roll == 0) | (roll == 1)).all():
                raise UserError(f"{path}, song {i} of {split}: a roll holds values other than 0 and 1")
    return MusicData(name, {split: Songs.pack(rolls, width) for split, rolls in splits.items()}, grid)


def _roll(song: Any, grid: Grid, what: str) -> np.ndarray:
    frames = [_frame(frame, what) for frame in _listed(song, what)]
    return roll_of_notes(frames, grid, what)


def _frame(frame: Any, what: str) -> list[int]:
    notes = []
    given = _listed([frame] if frame is None or isinstance(frame, int) else frame, what)
    if len(given) > _MAX_NOTES:
        raise UserError(f"{what}: a frame lists {len(given):,} notes; MIDI has 128")
    for note in given:
        if note is None or note == -1:
            continue
        if isinstance(note, bool) or not isinstance(note, (int, float)) or note != note // 1:
            raise UserError(f"{what}: a {type(note).__name__} stands where a MIDI number is expected")
        notes.append(int(note))
    return notes


def _listed(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{what}: expected a list, found {type(value).__name__}")
    return value


def _text_key(key: object) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key)


def _require(keys: list[str], found: Mapping[str, object], path: Path) -> None:
    missing = [key for key in keys if key not in found]
    if missing:
        listed = ", ".join(list(found)[:12]) or "nothing"
        raise UserError(f"{path} lacks {', '.join(missing)}; it holds {listed}")


def _numbers(array: np.ndarray, path: Path) -> np.ndarray:
    if array.dtype.kind not in "iub":
        raise UserError(f"{path}: an array of {array.dtype} stands where whole numbers are expected")
    return array


def _table(found: Mapping[str, np.ndarray], key: str, path: Path) -> np.ndarray:
    table = found[key]
    if (
        table.ndim != 2
        or table.dtype.kind not in "iubf"
        or (key.endswith("_packed") and table.dtype != np.uint8)
    ):
        raise UserError(f"{path}: {key} is {table.dtype} of shape {table.shape}; expected frames by pitches")
    return table


def _pitches(found: Mapping[str, np.ndarray], limit: int, path: Path) -> int:
    value = found.get("pitches", np.array(limit))
    pitches = int(value.ravel()[0]) if value.size and value.dtype.kind in "iu" else 0
    if not 1 <= pitches <= limit:
        raise UserError(f"{path}: pitches={pitches} does not fit frames of {limit} bits")
    return pitches


def _cut(frames: np.ndarray, found: Mapping[str, np.ndarray], split: str, path: Path) -> list[np.ndarray]:
    key = f"{split}_lengths" if f"{split}_lengths" in found else f"{split}_len"
    _require([key], found, path)
    lengths = _numbers(found[key], path).ravel().astype(np.int64)
    total = sum(lengths.tolist())  # in Python's integers: numpy's would wrap around to any number wanted
    if (lengths < 0).any() or total != len(frames):
        raise UserError(f"{path}: {key} sums to {total:,}, but there are {len(frames):,} frames")
    return np.split(frames, np.cumsum(lengths)[:-1]) if len(lengths) else []


def _stored_text(name: str, found: Mapping[str, np.ndarray], path: Path) -> TextData:
    _require([*SPLITS, "kind"], found, path)
    vocabulary = [str(symbol) for symbol in found["vocabulary"].ravel()]
    kind = str(found["kind"])
    if kind not in ("char", "word") or found["vocabulary"].dtype.kind != "U":
        raise UserError(f"{path}: kind={kind!r} with a vocabulary of {found['vocabulary'].dtype} is no text")
    for split in SPLITS:
        ids = _numbers(found[split], path)
        if ids.ndim != 1 or (ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(vocabulary)):
            raise UserError(f"{path}: {split} holds ids outside the vocabulary of {len(vocabulary)}")
    return TextData(name, kind, {split: found[split].copy() for split in SPLITS}, vocabulary)


READERS: dict[str, Callable[..., MusicData | TextData]] = {
    ".mat": load_mat,
    ".pickle": load_pickle,
    ".pkl": load_pickle,
    ".npz": load_npz,
    ".json": load_json,
}
"""Files that carry their own splits, by suffix."""
