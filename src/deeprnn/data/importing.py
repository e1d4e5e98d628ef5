"""People's own files as data: every file accepted or skipped with a reason, nothing dropped in silence."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deeprnn.data.cutting import ALONE, Cut, cut_song, cut_text
from deeprnn.data.files import files_below
from deeprnn.data.limits import check_bytes, read_bytes
from deeprnn.data.midi import SUFFIXES, midi_bytes_to_song
from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.parts import Item, assign, music_of, text_of
from deeprnn.data.report import FileReport, Report
from deeprnn.data.rolls import READERS
from deeprnn.data.song import Song, SongReader
from deeprnn.data.splitting import CUTS, duplicates_across_splits
from deeprnn.data.text import TextData, text_data
from deeprnn.data.transposing import to_common_tonic
from deeprnn.errors import UserError

SONGS: dict[str, SongReader] = dict.fromkeys(SUFFIXES, midi_bytes_to_song)
"""readers of one song from its bytes, by suffix; what has no suffix of these is tried as MIDI"""
TEXT = (".txt", ".text", ".md")


@dataclass
class Options:
    """How files are read: `kind` is auto, music, char or word."""

    kind: str = "auto"
    grid: Grid | None = None  # None: the default for MIDI, what a file says of itself elsewhere
    drums: bool = False
    transpose: bool = False
    minimum: int = 1
    progress: Callable[[Iterable[Path]], Iterable[Path]] = lambda paths: paths


def song_from_bytes(
    data: bytes, suffix: str, grid: Grid | None = None, *, drums: bool = False, what: str = "it"
) -> Song:
    """One song, by the reader of its suffix."""
    reader = SONGS.get(suffix.lower(), midi_bytes_to_song)
    return reader(data, grid or Grid(), drums=drums, what=what)


def read_song(path: Path, grid: Grid | None = None) -> Song:
    """The song in a file."""
    return song_from_bytes(read_bytes(path), path.suffix, grid, what=str(path))


def import_path(path: Path, options: Options | None = None) -> tuple[MusicData | TextData, Report]:
    """Data from a file or folder, and the report of how it was read."""
    options = options or Options()
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if options.kind not in ("auto", "music", "char", "word"):
        raise UserError(f"kind={options.kind!r} is unknown: use auto, music, char or word")
    if path.is_file() and path.suffix.lower() in READERS:
        return _with_own_splits(path, options)
    if options.minimum < 1:
        raise UserError(f"minimum={options.minimum} is no count of a symbol: use at least 1")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is neither a file nor a folder")
    files, others = ([path], []) if path.is_file() else files_below(path)
    paths = [p for p in files if not _is_hidden(p, path)]
    if not paths and not others:
        raise UserError(f"{path} holds no files")
    music = _is_music(paths, options.kind)
    items, report = _read_all(path, paths, music, options)
    report.files += [FileReport(_shown(p, path), False, why) for p, why in others if not _is_hidden(p, path)]
    if not items:
        raise UserError(_nothing_accepted(path, report, music))
    if len(files) > len(paths):
        report.warnings.append(f"{len(files) - len(paths)} hidden files were left out")
    if len(items) == 1 and isinstance(text := items[0].content, str):
        items[0].cut = cut_text(text, ALONE)
    assign(items, report)
    name = path.resolve().stem
    if music:
        data = music_of(name, items, options.grid or Grid())
    else:
        kind = "char" if options.kind == "auto" else options.kind
        data = text_data(name, kind, text_of(items), minimum=options.minimum)
    report.warn_of_empty(data.sizes)
    return data, report


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _shown(path: Path, root: Path) -> str:
    """A name that can be printed, whatever bytes and control characters the file's own name has."""
    name = str(path.relative_to(root)) if root.is_dir() else path.name
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _is_music(paths: Sequence[Path], kind: str) -> bool:
    if kind != "auto":
        return kind == "music"
    return any(path.suffix.lower() in SONGS for path in paths) or (
        len(paths) == 1 and paths[0].suffix.lower() not in TEXT and _begins_as_midi(paths[0])
    )


def _begins_as_midi(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"MThd"
    except OSError:  # reading it as text will say why
        return False


def _read_all(root: Path, paths: Sequence[Path], music: bool, options: Options) -> tuple[list[Item], Report]:
    items, report, path_of, total = [], Report(), {}, 0
    for path in options.progress(paths):
        shown = _shown(path, root)
        entry = FileReport(shown, accepted=False)
        report.files.append(entry)
        try:
            _check_suffix(path, music, alone=len(paths) == 1)
            data = read_bytes(path)
            digest = hashlib.sha256(data).hexdigest()
            if digest in path_of:
                raise UserError(f"same bytes as {path_of[digest]}")
            content, cut = (
                _read_song(data, path.suffix.lower(), entry, options) if music else _read_text(data)
            )
            total += 8 * content.nbytes if isinstance(content, np.ndarray) else len(data)
            check_bytes(total, "all files together, up to this one,")
        except UserError as error:
            entry.reason = str(error)
            continue
        path_of[digest] = shown
        entry.accepted, entry.size = True, len(content)
        if entry.losses:
            report.losses.add(entry.losses)
        text_or_frames = (
            content.tobytes() if isinstance(content, np.ndarray) else data.removeprefix(BOM_UTF8).strip()
        )
        items.append(Item(shown, content, digest, hashlib.sha256(text_or_frames).hexdigest(), cut))
    return items, report


def _check_suffix(path: Path, music: bool, alone: bool) -> None:
    suffix = path.suffix.lower()
    suffixes = SONGS if music else TEXT
    if suffix not in suffixes and not alone:
        raise UserError(f"its name ends in {suffix or 'nothing'}; {' '.join(suffixes)} are read here")


def _read_song(
    data: bytes, suffix: str, entry: FileReport, options: Options
) -> tuple[np.ndarray, Cut | None]:
    """A song's packed frames, and where it can be cut; of an unknown suffix it may be MIDI."""
    grid = options.grid or Grid()
    song = song_from_bytes(data, suffix, grid, drums=options.drums, what="it")
    if not len(song.roll):
        lost = f" ({song.losses})" if song.losses.notes else ""
        raise UserError(f"no notes are left on the grid{lost}")
    entry.losses, roll = song.losses, song.roll
    if options.transpose:
        roll, fallen = to_common_tonic(roll, grid)
        if fallen:
            entry.notes.append(f"{fallen} sounding steps left the pitch range when transposed")
    entry.notes += song.remarks
    packed, sounds, meters = np.packbits(roll, axis=1), roll.max(1) > 0, song.meters
    del song, roll  # finding the cuts takes memory of its own
    return packed, cut_song(sounds, grid.steps_per_beat, meters, CUTS)


def _read_text(data: bytes) -> tuple[str, Cut | None]:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError("it is UTF-16 text: save it as UTF-8")
    if b"\0" in data:
        raise UserError("it holds zero bytes, so it is no plain text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"it is not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    if not text or text.isspace():
        raise UserError("it is empty")
    text = text.replace("\r\n", "\n")
    return text, cut_text(text, CUTS)


def _with_own_splits(path: Path, options: Options) -> tuple[MusicData | TextData, Report]:
    data = READERS[path.suffix.lower()](path, grid=options.grid)
    if options.kind not in ("auto", data.kind):
        raise UserError(f"{path} holds {data.kind} data: it cannot be read as {options.kind}")
    report = Report([FileReport(path.name, accepted=True, split="its own", size=sum(data.sizes.values()))])
    if isinstance(data, MusicData):
        if options.transpose:
            _transpose(data, report)
        report.duplicates = duplicates_across_splits(data)
        lengths = {split: data.splits[split].lengths.tolist() for split in data.splits}
        report.warn_of_large({s: dict(zip(data.names[s], lengths[s], strict=True)) for s in data.splits})
    report.warn_of_empty(data.sizes)
    return data, report


def _transpose(data: MusicData, report: Report) -> None:
    grid = data.grid or Grid(low=21, high=20 + data.size)
    for split, songs in data.splits.items():
        moved = [to_common_tonic(roll, grid) for roll in songs]
        data.splits[split] = Songs.pack((roll for roll, _ in moved), data.size)
        if fallen := sum(lost for _, lost in moved):
            report.warnings.append(
                f"{fallen:,} sounding steps of {split} left the pitch range when transposed"
            )


def _nothing_accepted(path: Path, report: Report, music: bool) -> str:
    first = next(iter(report.files))
    what = "song" if music else "text file"
    whole = next((f.path for f in report.files if Path(f.path).suffix.lower() in READERS), None)
    hint = f". {whole} is a data set of its own: name that file" if whole else ""
    return f"{path}: no {what} could be read; {first.path}: {first.reason}{hint}"
