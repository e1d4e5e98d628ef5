"""Piano rolls as pictures: notes in ink, octaves and beats as a faint grid, systems like a score's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from deeprnn.errors import UserError
from deeprnn.render.notes import Note, as_roll, held_notes
from deeprnn.render.style import ACCENT, INK, PAPER, RULE, SOFT, new_figure, png_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLACK_KEYS = {1, 3, 6, 8, 10}
BAR_BEATS = 4
MANY = 1000  # notes in a line: round corners would neither be seen nor be quick
HEAT = ("#fdfcf9", "#f9ead2", "#f3cf9b", "#e9a866", "#db7c46")  # paper to embers


def pianoroll_png(
    frames: np.ndarray,
    *,
    probabilities: np.ndarray | None = None,
    primer: int = 0,
    steps_per_beat: int = 4,
    low: int = 21,
    title: str = "",
    subtitle: str = "",
    dpi: int = 150,
) -> bytes:
    """A piano roll (T, K) as PNG.

    `probabilities` (T, K) glow under the notes; the first `primer` frames are shaded.
    """
    roll = as_roll(frames, low)
    if probabilities is not None and probabilities.shape != roll.shape:
        raise UserError(f"probabilities {probabilities.shape} and frames {roll.shape} differ in shape")
    bottom, top = _compass(roll, low)
    width = _frames_per_system(len(roll), steps_per_beat)
    systems = max(1, math.ceil(len(roll) / width))
    height = np.clip((top - bottom) * 0.075, 1.6, 4.6)
    figure = new_figure(11.5, height * systems + (0.75 if title else 0.35))
    notes = held_notes(roll, low, steps_per_beat)
    for number, axes in enumerate(figure.subplots(systems, 1, squeeze=False)[:, 0]):
        first = number * width
        _ground(axes, first, width, len(roll), (bottom, top), steps_per_beat)
        if probabilities is not None:
            _heat(axes, probabilities, low)
        if primer > first:
            _primer(axes, first, primer, bottom, top, label=number == 0)
        _notes(axes, [n for n in notes if n.start < first + width and n.start + n.length > first], primer)
    if title:
        head = figure.suptitle(title, x=0.012, ha="left", color=INK, fontsize=13, fontweight="bold")
        head.set_in_layout(True)
    if subtitle:
        figure.text(0.99, 0.992, subtitle, ha="right", va="top", color=SOFT, fontsize=9)
    return png_bytes(figure, dpi)


def _compass(roll: np.ndarray, low: int) -> tuple[int, int]:
    """The pitches to show: those that sound, to whole half-octaves, and at least two octaves."""
    used = np.flatnonzero(roll.any(axis=0)) + low
    if not len(used):
        return 48, 73
    bottom, top = int(used[0]) - 2, int(used[-1]) + 3
    missing = 24 - (top - bottom)
    if missing > 0:
        bottom, top = bottom - missing // 2, top + missing - missing // 2
    return max(0, bottom), min(128, top)


def _frames_per_system(frames: int, steps_per_beat: int) -> int:
    """How many frames a line of the picture holds: whole bars, lines of like length."""
    bar = BAR_BEATS * steps_per_beat
    most = max(bar, 16 * BAR_BEATS if steps_per_beat == 1 else 128 // bar * bar)
    lines = max(1, math.ceil(frames / most))
    return max(1, math.ceil(frames / lines / bar)) * bar


def _ground(
    axes: Axes, first: int, width: int, frames: int, compass: tuple[int, int], steps_per_beat: int
) -> None:
    """Rows of black keys, octave lines, beats and bars."""
    bottom, top = compass
    axes.set_facecolor(PAPER)
    last = min(first + width, frames)
    black = [p for p in range(bottom, top) if p % 12 in BLACK_KEYS]
    left, wide = [first] * len(black), [last - first] * len(black)
    axes.barh(black, wide, height=1.0, left=left, color="#f3f1ea", linewidth=0, zorder=0)
    axes.set_ylim(bottom - 0.5, top - 0.5)
    octaves = [p for p in range(bottom, top) if p % 12 == 0]
    axes.hlines([p - 0.5 for p in octaves], first, last, color="#bfbcb2", linewidth=0.8, zorder=2)
    axes.set_yticks(octaves, [f"C{p // 12 - 1}" for p in octaves], color=SOFT, fontsize=8.5)
    bar = BAR_BEATS * steps_per_beat
    beats = range(first, last + 1, steps_per_beat)
    axes.vlines([b for b in beats if b % bar], bottom, top, color=RULE, linewidth=0.5, zorder=1)
    bars = range(first, last + 1, bar)
    axes.vlines(bars, bottom - 0.5, top - 0.5, color="#bfbcb2", linewidth=0.8, zorder=2)
    axes.set_xticks([b for b in bars if b < last], [str(b // bar + 1) for b in bars if b < last], fontsize=8)
    axes.tick_params(length=0, colors=SOFT, pad=3)
    axes.set_xlim(first, first + width)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _heat(axes: Axes, probabilities: np.ndarray, low: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    frames, keys = probabilities.shape
    axes.imshow(
        np.sqrt(np.clip(probabilities.T, 0, 1)),  # the root lifts what is unlikely into sight
        cmap=LinearSegmentedColormap.from_list("embers", HEAT),
        vmin=0,
        vmax=1,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0, frames, low - 0.5, low + keys - 0.5),
        zorder=0.5,
    )


def _primer(axes: Axes, first: int, primer: int, bottom: int, top: int, label: bool) -> None:
    axes.axvspan(first, primer, color="#e7ecf4", linewidth=0, zorder=0.6, alpha=0.75)
    axes.vlines(primer, bottom - 0.5, top - 0.5, color=ACCENT, linewidth=1.4, zorder=3)
    if label:
        axes.text(first + 0.3, top - 0.9, "primer", va="top", color=SOFT, fontsize=8.5, style="italic")


def _notes(axes: Axes, notes: list[Note], primer: int) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import FancyBboxPatch, Rectangle

    inset = 0.06
    shapes, faces = [], []
    for note in notes:
        size = max(0.05, note.length - 2 * inset)
        corner = (note.start + inset, note.pitch - 0.4)
        if len(notes) < MANY:
            style = f"round,pad=0,rounding_size={min(0.28, size / 2)}"
            shapes.append(FancyBboxPatch(corner, size, 0.8, boxstyle=style))
        else:
            shapes.append(Rectangle(corner, size, 0.8))
        faces.append(_shade(note, primer))
    axes.add_collection(PatchCollection(shapes, facecolors=faces, edgecolors=PAPER, linewidths=0.5, zorder=4))


def _shade(note: Note, primer: int) -> tuple[float, float, float]:
    """Louder is darker; what was given is greyer than what was sampled."""
    base = np.array([0.42, 0.47, 0.55] if note.start < primer else [0.16, 0.31, 0.50])
    depth = np.clip((note.velocity - 62) / 36, 0, 1)
    r, g, b = (base * (1.0 - 0.55 * depth) + 0.22 * (1 - depth)).clip(0, 1).tolist()
    return (r, g, b)
