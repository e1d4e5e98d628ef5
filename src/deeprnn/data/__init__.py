"""Data: the paper's sets by name, people's own files, and Bach out of the box.

data = load("jsb")                      # MusicData; also nottingham, musedata, piano-midi, bach
data = load("ptb-char")                 # TextData; also ptb-word
data = load("songs/")                   # a folder of MIDI or text; .mat .pickle .npz .json .mid .txt
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path

from deeprnn.data import sources
from deeprnn.data.music import SPLITS, Grid, MusicData, Songs
from deeprnn.data.text import TextData, text_data, treebank_characters
from deeprnn.errors import UserError

__all__ = ["SPLITS", "Grid", "MusicData", "Songs", "TextData", "load", "names"]


def names() -> tuple[str, ...]:
    """The data sets known by name."""
    return (*sources.SOURCES, "bach")


def load(name_or_path: str | Path, **options: object) -> MusicData | TextData:
    """A data set by name, or a person's own file or folder.

    Options: `counting` ("authors" or "stripped") for ptb-char; `grid` and `transpose` for bach; for MIDI files
    also `drums`; for text files `kind` ("char" or "word") and `minimum`, the least count of a vocabulary entry.
    """
    name = str(name_or_path)
    if name == "bach":
        from deeprnn.data.bach import load_bach

        return _call(load_bach, name, name, options)
    if name in sources.SOURCES:
        return _call(_BY_KIND[sources.SOURCES[name].kind], name, name, options)
    path = Path(os.path.expanduser(name))  # unlike Path's own, it leaves a home that nobody has as it is
    if not path.exists():
        raise UserError(f"{name!r} is neither a data set ({', '.join(names())}) nor a file or folder")
    return _call(_load_path, name, path, options)


def _load_music(name: str) -> MusicData:
    from deeprnn.data.rolls import load_mat

    # Sampled every quarter note for the chorales, every eighth note for the other sets of the family.
    return load_mat(sources.find(name)[0], name, Grid(steps_per_beat=1 if name == "jsb" else 2))


def _load_chars(name: str, counting: str = "authors") -> TextData:
    parts = {split: treebank_characters(text, counting) for split, text in _treebank(name).items()}
    return text_data(name, "char", parts, unknown=False)


def _load_words(name: str) -> TextData:
    return text_data(name, "word", _treebank(name), unknown=False)


def _load_path(
    path: Path,
    kind: str = "auto",
    grid: Grid | None = None,
    drums: bool = False,
    transpose: bool = False,
    minimum: int = 1,
) -> MusicData | TextData:
    from deeprnn.data.importing import Options, import_path

    data, report = import_path(path, Options(kind, grid, drums, transpose, minimum))
    data.remarks = report.summary(data.sizes, "frames" if data.kind == "music" else "symbols")
    skipped = len(report.files) - report.accepted
    remarks = [f"{skipped} of {len(report.files)} files skipped"] if skipped else []
    remarks += [f"{len(report.duplicates)} songs or texts occur in two splits"] if report.duplicates else []
    if remarks := remarks + report.warnings:
        advice = f"`deeprnn data import {path}` tells more"
        logging.getLogger("deeprnn").warning("%s: %s; %s", path, "; ".join(remarks), advice)
    return data


def _treebank(name: str) -> dict[str, str]:
    from deeprnn.data.limits import read_bytes

    parts = {}
    for split, path in zip(SPLITS, sources.find(name), strict=True):
        try:
            parts[split] = read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text (byte {error.start}): download it again") from None
    return parts


_BY_KIND = {"music": _load_music, "char": _load_chars, "word": _load_words}


def _call(loader: Callable[..., MusicData | TextData], what: str, first: object, options: dict[str, object]):
    known = list(inspect.signature(loader).parameters)[1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"{what} takes no option {', '.join(unknown)}; it knows {', '.join(known) or 'none'}")
    return loader(first, **options)
