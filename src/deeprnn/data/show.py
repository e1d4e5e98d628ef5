"""Data that a person can look at: a piano roll or a sample of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deeprnn.data.music import Grid, MusicData
from deeprnn.data.text import TextData
from deeprnn.errors import UserError, need
from deeprnn.files import open_atomically

MOST_STEPS = 512
"""of a piano roll as an image"""
_NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


def pitch_name(number: int) -> str:
    """C4 for 60."""
    return f"{_NAMES[number % 12]}{number // 12 - 1}"


def choose_song(data: MusicData, split: str, index: int) -> np.ndarray:
    """One song's roll by its number, counted from 1, or an error that says how many there are."""
    songs = data.splits.get(split)
    if songs is None:
        raise UserError(f"split={split!r} is unknown: use one of {', '.join(data.splits)}")
    if not 1 <= index <= len(songs):
        raise UserError(f"{data.name} has songs 1 to {len(songs)} in {split}: {index} is not among them")
    return songs[index - 1]


def roll_as_text(roll: np.ndarray, grid: Grid, steps: int = 100, width: int | None = None) -> str:
    """A piano roll in characters: a row per pitch between the lowest and highest, a column per step.

    Where the lines would be longer than `width`, the roll is broken into systems as sheet music is.
    """
    shown = roll[:MOST_STEPS]
    sounding = np.flatnonzero(shown.any(0))
    if not len(sounding):
        return "(silence)"
    columns = len(shown) if width is None else max(1, width - 5)  # 5: the name of the pitch
    pitches = range(int(sounding[-1]), int(sounding[0]) - 1, -1)
    systems = []
    for start in range(0, len(shown), columns):
        part = shown[start : start + columns]
        lines = ("".join("█" if on else "·" for on in part[:, pitch]) for pitch in pitches)
        named = (f"{pitch_name(p + grid.low):>4} {line}" for p, line in zip(pitches, lines, strict=True))
        systems.append("\n".join(named))
    return "\n\n".join(systems)


def text_sample(data: TextData, split: str, characters: int = 600) -> str:
    """The beginning of a split, readable."""
    if split not in data.splits:
        raise UserError(f"split={split!r} is unknown: use one of {', '.join(data.splits)}")
    symbols = characters if data.kind == "char" else characters // 6
    return data.decode(data.splits[split][:symbols])


def roll_png(path: Path, roll: np.ndarray, grid: Grid, title: str) -> None:
    """A piano roll as an image: time in beats, pitches by name."""
    figure_module = need("matplotlib.figure", extra="cli")
    shown = roll[:MOST_STEPS]
    width = float(np.clip(len(shown) / 24, 6, 24))
    figure = figure_module.Figure(figsize=(width, 4.5), layout="constrained")  # no window system needed
    axes = figure.subplots()
    beats = len(shown) / grid.steps_per_beat
    extent = (0, max(beats, 1e-6), grid.low - 0.5, grid.high + 0.5)
    axes.imshow(shown.T, origin="lower", aspect="auto", cmap="Greys", extent=extent, interpolation="nearest")
    octaves = [number for number in range(grid.low, grid.high + 1) if number % 12 == 0]
    axes.set_yticks(octaves, [pitch_name(number) for number in octaves])
    sounding = np.flatnonzero(shown.any(0))
    if len(sounding):
        axes.set_ylim(grid.low + sounding[0] - 2, grid.low + sounding[-1] + 2)
    axes.grid(alpha=0.25, linewidth=0.5)
    more = f" (first {len(shown):,} of {len(roll):,} steps)" if len(shown) < len(roll) else ""
    axes.set_title(title + more, fontsize=10)
    axes.set_xlabel("beats")
    with open_atomically(path) as file:
        figure.savefig(file, dpi=120, format="png")
