"""Primers by name: a song's file, a text, or a piece of the run's own data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deeprnn.errors import UserError, nearest

if TYPE_CHECKING:
    from deeprnn.data import MusicData, TextData
    from deeprnn.runs.folder import Run

PIECE_BEATS = 8  # how much of a named piece is given when nobody says


def run_data(run: Run) -> MusicData | TextData:
    """The data a run may see (a search's: no test part), read again; a UserError where it is not to be found."""
    from deeprnn.data import TextData
    from deeprnn.training.evaluate import visible
    from deeprnn.training.loading import load_data
    from deeprnn.training.recipe import Recipe

    recipe = Recipe.from_dict(run.recipe)
    part = recipe.data
    data = visible(load_data(part), recipe.evaluation)
    if isinstance(data, TextData) and data.vocabulary != run.vocabulary:
        raise UserError(f"{part.name} has changed since the run was trained: its vocabulary is another")
    return data


def read_primer(run: Run, text: str, length: int | None = None) -> np.ndarray | str:
    """A primer from what a person wrote: a file, `test:3` or `test:NAME`, or for text runs the text itself.

    `length` cuts it, in frames or characters; a named piece of music is cut to its first two bars unless
    told otherwise.
    """
    if length is not None and length < 1:
        raise UserError(f"primer length {length} must be at least 1")
    split, colon, which = text.partition(":")
    named = bool(colon) and split in ("train", "valid", "test")
    if named and split == "test" and not run.recipe.get("evaluation", {}).get("test", True):
        raise UserError(
            f"{run.path} was trained with evaluation.test=false, as runs of a search are: its test part stays unread. "
            "Use a valid: or train: piece"
        )
    if run.kind == "music":
        if named:
            roll = _piece(run, split, which)
            steps = run.grid.steps_per_beat if run.grid else 4
            return roll[: PIECE_BEATS * steps if length is None else length]
        return _song(run, text)[:length]
    if named:
        return _line(run, split, which)[:length]
    return (_text(Path(text)) if _is_file(text) else text)[:length]


def _is_file(text: str) -> bool:
    """Whether a text is the name of a file; a paragraph is too long to be one, and asking would be an error."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _text(path: Path) -> str:
    from deeprnn.data.limits import read_bytes

    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"the primer {str(path)!r} is not a text file in UTF-8 ({error.reason})") from None
    if "\0" in text:
        raise UserError(f"the primer {str(path)!r} is not a text file: it holds zero bytes")
    return text.replace("\r\n", "\n")


def _song(run: Run, name: str) -> np.ndarray:
    from deeprnn.data.importing import read_song

    if not _is_file(name):
        short = name if len(name) <= 80 else f"{name[:77]}..."
        raise UserError(
            f"there is no primer {short!r}: give a MIDI file or another song, or a piece of the data as in test:3"
        )
    roll = read_song(Path(name), run.grid).roll
    if not len(roll):
        raise UserError(f"the primer {name!r} holds no notes")
    return roll


def _piece(run: Run, split: str, number_or_name: str) -> np.ndarray:
    """A piece by its number, counted from 1, or by its name."""
    data = run_data(run)
    songs, names = data.splits[split], getattr(data, "names", {}).get(split, [])
    if number_or_name.isdecimal():
        if not 1 <= int(number_or_name) <= len(songs):
            raise UserError(
                f"{split}:{number_or_name} is not there: {data.name} has {split}:1 to {split}:{len(songs)}"
            )
        return songs[int(number_or_name) - 1]
    if number_or_name not in names:
        suggestions = nearest(number_or_name, names, count=3) or names[:3]
        raise UserError(
            f"{data.name} has no {split} piece {number_or_name!r}: near are {', '.join(suggestions)}"
        )
    return songs[names.index(number_or_name)]


def _line(run: Run, split: str, number: str) -> str:
    """A line of a text's split by its number, counted from 1."""
    data = run_data(run)
    assert not hasattr(data, "grid")
    text = data.decode(data.splits[split][:200_000])  # type: ignore[union-attr]
    lines = text.split("\n")
    if not (number.isdecimal() and 1 <= int(number) <= len(lines)):
        raise UserError(f"{split}:{number} is not there: give the number of a line, 1 to {len(lines)}")
    return lines[int(number) - 1]
