"""From notes in beats to a piano roll on a grid, with what that loses counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from deeprnn.data.limits import check_frames, check_memory
from deeprnn.data.music import Grid

_BLOCK = 65_536  # notes worked on at a time, so that they take little memory beyond the roll


@dataclass
class Losses:
    """What became of a song's notes on the grid; all but `notes` are things a listener may miss."""

    notes: int = 0  # notes in the file, drums included
    moved: int = 0  # onset or end did not lie on the grid
    lengthened: int = 0  # shorter than half a step: given a whole one
    merged: int = 0  # overlaps, on the grid, an earlier note of the same pitch
    joined: int = 0  # repeats the same pitch without a gap: sounds on as one note
    out_of_range: int = 0  # outside the grid's pitches: dropped
    drums: int = 0  # on a drum channel: dropped
    unclosed: int = 0  # never ended in the file: dropped

    def add(self, other: Losses) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def dropped(self) -> int:
        return self.out_of_range + self.drums + self.unclosed

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        lost = [f"{count:,} {name.replace('_', ' ')}" for name, count in self.to_dict().items() if count]
        return ", ".join(lost[1:]) if len(lost) > 1 else "nothing lost"


def render(
    onset: np.ndarray,
    end: np.ndarray,
    pitch: np.ndarray,
    grid: Grid,
    what: str,
    per_beat: int = 1,
    *,
    file_size: int = 0,
) -> tuple[np.ndarray, Losses]:
    """A roll (T, pitches) of notes given in whole ticks, `per_beat` of them to a beat.

    Onsets and ends go to the nearest grid line, halves upwards; every note sounds for at least one step.
    The roll ends with the last sounding step, and leading silence stays.
    A few bytes can hold notes hours apart: a roll that takes more than a file of `file_size` may is refused.
    """
    losses = Losses(notes=len(pitch))
    inside = (pitch >= grid.low) & (pitch <= grid.high)
    losses.out_of_range = int((~inside).sum())
    start, early = _to_grid(onset[inside], grid.steps_per_beat, per_beat)
    stop, late = _to_grid(end[inside], grid.steps_per_beat, per_beat)
    pitch = pitch[inside]
    losses.moved = int((early | late).sum())
    losses.lengthened = int((stop <= start).sum())
    np.maximum(stop, start + 1, out=stop)
    total = int(stop.max()) if len(stop) else 0
    check_frames(total, what)
    check_memory(
        total * (grid.size + (grid.size + 7) // 8 + 1), file_size, what
    )  # with its bits and its rests
    losses.merged, losses.joined = _collisions(start, stop, pitch)
    roll = np.zeros((grid.size, total), np.uint8)  # by pitch first, so that a note is one stretch of memory
    for block in range(0, len(pitch), _BLOCK):
        part = slice(block, block + _BLOCK)
        rows, starts, stops = (pitch[part] - grid.low).tolist(), start[part].tolist(), stop[part].tolist()
        for p, a, b in zip(rows, starts, stops, strict=True):
            roll[p, a:b] = 1
    return roll.T, losses  # a view: a copy would be as large again


def _to_grid(ticks: np.ndarray, steps_per_beat: int, per_beat: int) -> tuple[np.ndarray, np.ndarray]:
    """The nearest step of each tick, and whether the tick lies off the grid."""
    nearest, off = np.empty(len(ticks), np.int64), np.empty(len(ticks), bool)
    for block in range(0, len(ticks), _BLOCK):
        part = slice(block, block + _BLOCK)
        scaled = ticks[part].astype(np.int64) * steps_per_beat
        nearest[part] = (2 * scaled + per_beat) // (2 * per_beat)
        off[part] = scaled % per_beat != 0
    return nearest, off


def _collisions(start: np.ndarray, stop: np.ndarray, pitch: np.ndarray) -> tuple[int, int]:
    """Notes that overlap an earlier one of their pitch, and notes that follow one without a gap."""
    merged = joined = 0
    for number in np.unique(pitch):
        begin, end = start[pitch == number], stop[pitch == number]
        order = np.lexsort((end, begin))
        reach = np.maximum.accumulate(end[order])[:-1]  # the furthest end so far
        begin = begin[order][1:]
        merged += int((begin < reach).sum())
        joined += int((begin == reach).sum())
    return merged, joined
