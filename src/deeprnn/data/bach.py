"""Bach's four-part chorales out of the box, from the corpus that the music21 package carries.

Only music21's files are used, not its parser: they are MusicXML with one voice a part, which a few lines read
in seconds instead of half a minute. The rolls are cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

import numpy as np

from deeprnn.data.arrays import read_npz
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs
from deeprnn.data.quantise import Losses, render
from deeprnn.data.sources import cache_folder
from deeprnn.data.transposing import to_common_tonic
from deeprnn.errors import MissingExtra, UserError
from deeprnn.files import open_atomically

VERSION = 1
"""Raised when parsing or splitting changes, so that older caches are not used."""

SHARES = {"train": 0.70, "valid": 0.15, "test": 0.15}

_STEPS = {"C": 0, "D": 2, "E": 4, "F": 5, "G": 7, "A": 9, "B": 11}


def load_bach(name: str = "bach", *, grid: Grid | None = None, transpose: bool = False) -> MusicData:
    """All four-part chorales on a grid (default: sixteenth notes), optionally moved to C major or minor.

    A chorale's split is fixed by a hash of its BWV number, so it depends on nothing else.
    """
    grid = grid or Grid()
    folder, version = corpus_folder()
    key = f"bach-v{VERSION}-{version}-{grid.steps_per_beat}-{grid.low}-{grid.high}-{int(transpose)}.npz"
    place = cache_folder() / key
    chorales = _read(place)
    if chorales is None:
        titles, rolls, _ = parse_chorales(folder, grid, transpose, progress=_progress)
        chorales = titles, Songs.pack(rolls, grid.size)
        try:
            _save(place, *chorales)
        except OSError as error:  # the data is there all the same
            advice = "they will be parsed again next time; set DEEPRNN_CACHE to a folder that can be written"
            logging.getLogger("deeprnn").warning(
                "cannot keep the chorales at %s (%s): %s", place, error, advice
            )
    return _divide(*chorales, name, grid)


def corpus_folder() -> tuple[Path, str]:
    """music21's folder of Bach's works and the package's version, found without importing it."""
    spec = importlib.util.find_spec("music21")
    if spec is None or spec.origin is None:
        raise MissingExtra("the Bach chorales come with the package 'music21': pip install 'deeprnn[bach]'")
    from importlib.metadata import version

    folder = Path(spec.origin).parent / "corpus" / "bach"
    if not folder.is_dir():
        raise UserError(f"this music21 carries no Bach corpus at {folder}: install it from PyPI")
    return folder, version("music21")


def parse_chorales(
    folder: Path,
    grid: Grid,
    transpose: bool = False,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = lambda paths: paths,
) -> tuple[list[str], list[np.ndarray], Losses]:
    """Titles, rolls and quantising losses of every four-part chorale, each distinct one once, by title."""
    titles, rolls, losses, seen = [], [], Losses(), set()
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".mxl", ".xml"))
    for path in progress(paths):
        parts = read_score(path)
        if len(parts) != 4:  # with instruments, or not a chorale
            continue
        if (music := _signature(parts)) in seen:  # the same chorale, perhaps in another key, once more
            continue
        seen.add(music)
        roll, lost = render_parts(parts, grid, path.stem)
        if transpose:
            roll, fallen = to_common_tonic(roll, grid)
            lost.out_of_range += fallen
        titles.append(path.stem)
        rolls.append(roll)
        losses.add(lost)
    return titles, rolls, losses


TICKS = 10_080  # per beat: divides into every note value of the corpus

Note: TypeAlias = tuple[int, int, int]  # onset and end in ticks, MIDI number


def read_score(path: Path) -> list[list[Note]]:
    """The notes of each part of a MusicXML file, plain or zipped, repeats played once."""
    if path.suffix == ".mxl":
        with zipfile.ZipFile(path) as archive:
            inside = next(n for n in archive.namelist() if n.endswith("xml") and not n.startswith("META-INF"))
            root = ElementTree.fromstring(archive.read(inside))
    else:
        root = ElementTree.fromstring(path.read_bytes())
    return [_notes_of(part) for part in root.findall("part")]


def _notes_of(part: ElementTree.Element) -> list[Note]:
    notes: list[Note] = []
    now, divisions, onset = 0, 1, 0
    for element in (e for measure in part.findall("measure") for e in measure):
        if element.tag == "attributes":
            divisions = int(element.findtext("divisions") or divisions)
        length = round(int(element.findtext("duration") or 0) * TICKS / divisions)
        if element.tag == "forward":
            now += length
        elif element.tag == "backup":
            now -= length
        elif element.tag == "note" and element.find("grace") is None:
            if element.find("chord") is None:
                onset, now = now, now + length
            pitch = element.find("pitch")
            if pitch is not None and length:
                notes.append((onset, onset + length, _midi_number(pitch)))
    return notes


def _midi_number(pitch: ElementTree.Element) -> int:
    step = _STEPS[pitch.findtext("step", "")]
    return 12 * (int(pitch.findtext("octave", "")) + 1) + step + int(pitch.findtext("alter") or 0)


def render_parts(parts: list[list[Note]], grid: Grid, what: str) -> tuple[np.ndarray, Losses]:
    """All parts of a score on one roll."""
    notes = np.array([note for part in parts for note in part], np.int64).reshape(-1, 3)
    return render(notes[:, 0], notes[:, 1], notes[:, 2], grid, what, TICKS)


def _signature(parts: list[list[Note]]) -> bytes:
    """What sounds when, apart from the key: the same whatever grid is asked for."""
    roll, _ = render_parts(parts, Grid(), "a chorale")
    used = np.flatnonzero(roll.any(0))
    return roll[:, used[0] : used[-1] + 1].tobytes()


def split_of(title: str) -> str:
    """train, valid or test by a hash of the BWV number; variants (`bwv248.23-s`) go with their original."""
    digest = hashlib.sha256(title.partition("-")[0].encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64
    for split in SPLITS:
        if point < SHARES[split]:
            return split
        point -= SHARES[split]
    return SPLITS[-1]


def _save(place: Path, titles: list[str], songs: Songs) -> None:
    with open_atomically(place) as file:
        np.savez_compressed(
            file, packed=songs.packed, lengths=songs.lengths, pitches=songs.pitches, titles=np.array(titles)
        )


def _read(place: Path) -> tuple[list[str], Songs] | None:
    """The chorales in the cache; None where there are none, or where the file is damaged."""
    if not place.is_file():
        return None
    try:
        stored = read_npz(place)
        songs = Songs(stored["packed"], stored["lengths"], int(stored["pitches"]))
        return [str(title) for title in stored["titles"]], songs
    except (UserError, KeyError) as error:
        logging.getLogger("deeprnn").warning("parsing the chorales again: %s", error)
        return None


def _divide(titles: list[str], songs: Songs, name: str, grid: Grid) -> MusicData:
    splits = [split_of(title) for title in titles]
    rolls = {s: [songs[i] for i, part in enumerate(splits) if part == s] for s in SPLITS}
    return MusicData(
        name,
        {s: Songs.pack(rolls[s], grid.size) for s in SPLITS},
        grid,
        {s: [t for t, part in zip(titles, splits, strict=True) if part == s] for s in SPLITS},
    )


def _progress(paths: Iterable[Path]) -> Iterable[Path]:
    from deeprnn.data.files import progress_bar

    return progress_bar(paths, "Parsing chorales")
