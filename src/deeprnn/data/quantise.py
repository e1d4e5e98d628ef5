"""From notes in beats to a piano roll on a grid, with what that loses counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np

from deeprnn.data.limits import check_frames
from deeprnn.data.music import Grid


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
    onset: np.ndarray, end: np.ndarray, pitch: np.ndarray, grid: Grid, what: str, per_beat: int = 1
) -> tuple[np.ndarray, Losses]:
    """A roll (T, pitches) of notes given in whole ticks, `per_beat` of them to a beat.

    Onsets and ends go to the nearest grid line, halves upwards; every note sounds for at least one step.
    The roll ends with the last sounding step, and leading silence stays.
    """
    losses = Losses(notes=len(pitch))
    inside = (pitch >= grid.low) & (pitch <= grid.high)
    losses.out_of_range = int((~inside).sum())
    onset, end, pitch = (np.asarray(a, np.int64)[inside] for a in (onset, end, pitch))
    steps = grid.steps_per_beat
    start, stop = _nearest(onset * steps, per_beat), _nearest(end * steps, per_beat)
    losses.moved = int(((onset * steps % per_beat != 0) | (end * steps % per_beat != 0)).sum())
    losses.lengthened = int((stop <= start).sum())
    stop = np.maximum(stop, start + 1)
    total = int(stop.max()) if len(stop) else 0
    check_frames(total, what)
    losses.merged, losses.joined = _collisions(start, stop, pitch)
    roll = np.zeros((grid.size, total), np.uint8)  # by pitch first, so that a note is one stretch of memory
    for p, a, b in zip((pitch - grid.low).tolist(), start.tolist(), stop.tolist(), strict=True):
        roll[p, a:b] = 1
    return np.ascontiguousarray(roll.T), losses


def _nearest(numerator: np.ndarray, denominator: int) -> np.ndarray:
    return (2 * numerator + denominator) // (2 * denominator)


def _collisions(start: np.ndarray, stop: np.ndarray, pitch: np.ndarray) -> tuple[int, int]:
    """Notes that overlap an earlier one of their pitch, and notes that follow one without a gap."""
    if len(start) < 2:
        return 0, 0
    order = np.lexsort((stop, start, pitch))
    start, stop, pitch = start[order], stop[order], pitch[order]
    # The furthest end so far within each pitch: shifting pitches far apart makes one running maximum do.
    shift = pitch * (int(stop.max()) + 2)
    reach = np.maximum.accumulate(stop + shift)[:-1]
    begin, same = (start + shift)[1:], pitch[1:] == pitch[:-1]
    return int((same & (begin < reach)).sum()), int((same & (begin == reach)).sum())


# Krumhansl and Kessler's probe-tone profiles: how strongly each degree belongs to a key.
_MAJOR = np.array([6.35, 2.23, 3.48, 2.33, 4.38, 4.09, 2.52, 5.19, 2.39, 3.66, 2.29, 2.88])
_MINOR = np.array([6.33, 2.68, 3.52, 5.38, 2.60, 3.53, 2.54, 4.75, 3.98, 2.69, 3.34, 3.17])


def key_of(roll: np.ndarray, grid: Grid) -> tuple[int, str]:
    """Tonic (0 = C) and mode by correlation with the key profiles (Krumhansl and Schmuckler)."""
    weight = np.zeros(12)
    np.add.at(weight, (np.arange(grid.size) + grid.low) % 12, roll.sum(0))
    if weight.std() == 0:
        return 0, "major"
    best = max(
        (float(np.corrcoef(np.roll(profile, tonic), weight)[0, 1]), -tonic, mode)
        for mode, profile in (("major", _MAJOR), ("minor", _MINOR))
        for tonic in range(12)
    )
    return -best[1], best[2]


def transpose(roll: np.ndarray, semitones: int) -> tuple[np.ndarray, int]:
    """The roll shifted in pitch, and how many sounding cells fell off its edges."""
    moved = np.zeros_like(roll)
    if semitones >= 0:
        moved[:, semitones:] = roll[:, : roll.shape[1] - semitones]
    else:
        moved[:, :semitones] = roll[:, -semitones:]
    return moved, int(roll.sum()) - int(moved.sum())


def to_common_tonic(roll: np.ndarray, grid: Grid) -> tuple[np.ndarray, int]:
    """The roll moved by the shortest way to C major or C minor, and the cells that fell off."""
    tonic, _ = key_of(roll, grid)
    return transpose(roll, -tonic if tonic <= 6 else 12 - tonic)
