"""A piano roll read as held notes, with the loudness a player would give them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deeprnn.errors import UserError


class Note(NamedTuple):
    """One held note; times in frames of the grid."""

    start: int
    length: int
    pitch: int  # MIDI number
    velocity: int  # 1..127


def as_roll(frames: np.ndarray, low: int = 21) -> np.ndarray:
    """Check a piano roll and return it as (T, K) uint8 of zeros and ones."""
    roll = np.asarray(frames)
    if roll.ndim != 2:
        raise UserError(f"a piano roll has the shape (time, pitch), not {roll.shape}")
    if low < 0 or low + roll.shape[1] > 128:
        raise UserError(f"pitches {low}..{low + roll.shape[1] - 1} leave MIDI's range 0..127")
    return (roll > 0).astype(np.uint8)


def held_notes(frames: np.ndarray, low: int = 21, steps_per_beat: int = 4) -> list[Note]:
    """Merge runs of frames into held notes, sorted by time and then pitch.

    A piano roll does not say where a held pitch is struck anew, so that a run of frames is one note.
    """
    roll = as_roll(frames, low)
    if not roll.any():
        return []
    edge = np.zeros((1, roll.shape[1]), np.int8)
    change = np.diff(np.concatenate([edge, roll.astype(np.int8), edge]), axis=0)  # (T+1, K)
    # Transposed, so that starts and ends come in the same order: by pitch, then by time.
    pitch, start = np.nonzero(change.T == 1)
    _, end = np.nonzero(change.T == -1)
    velocity = _velocities(roll, start, pitch, steps_per_beat)
    notes = zip(
        start.tolist(), (end - start).tolist(), (pitch + low).tolist(), velocity.tolist(), strict=True
    )
    return sorted(Note(*note) for note in notes)


def _velocities(roll: np.ndarray, start: np.ndarray, pitch: np.ndarray, steps_per_beat: int) -> np.ndarray:
    """The melody sings, the bass carries, inner voices stay behind; beats lean a little; phrases breathe."""
    at = roll[start].astype(bool)  # (N, K): what sounds when each note begins
    keys = np.arange(roll.shape[1])
    top = np.where(at, keys, -1).max(axis=1)
    bottom = np.where(at, keys, roll.shape[1]).min(axis=1)
    velocity = np.full(len(start), 66.0)
    velocity[pitch == bottom] = 74
    velocity[pitch == top] = 88
    velocity += 5.0 * (start % max(1, steps_per_beat) == 0)
    velocity += 4.0 * np.sin(2 * np.pi * start / (16.0 * max(1, steps_per_beat)))  # one breath in four bars
    return np.clip(np.rint(velocity), 1, 127).astype(int)
