"""Where a sampled piece of music comes to rest, so that it ends instead of breaking off.

The models know no end: they predict the next frame for ever. But what they learned from has phrases, and a phrase
closes on the tonic chord, most often at the beginning of a bar and after the dominant. The best such place in the last
quarter of what was sampled becomes the last chord, held to the end of a bar.
"""

from __future__ import annotations

import numpy as np

from deeprnn.data.music import Grid
from deeprnn.data.transposing import key_of

BAR = 4
"""beats: the metre is not known, and common time is the most common"""
SHORTEST = 4
"""bars that a piece must have to be given an end; a shorter one is a fragment"""


def end_at_cadence(roll: np.ndarray, grid: Grid, primer: int = 0) -> tuple[np.ndarray, int]:
    """The roll (T, K) up to its cadence, the last chord held, and the frame where that begins.

    The first `primer` frames were given. Where no chord of the last quarter gives rest the roll stays as it is,
    with its own length as the place.
    """
    beat = grid.steps_per_beat
    bar, sampled = BAR * beat, len(roll) - primer
    if sampled < SHORTEST * bar:
        return roll, len(roll)
    tonic, _ = key_of(roll, grid)
    begin = len(roll) - max(bar, sampled // 4)
    places = [t for t in range(begin, len(roll)) if _begins(roll, t)]
    rated = [(rest(roll, t, tonic, grid), t) for t in places]
    best, place = max(rated, default=(0.0, 0))
    if best <= 0:
        return roll, len(roll)
    end = min(len(roll), -(-(place + 2 * beat) // bar) * bar)
    ended = roll[:end].copy()
    ended[place:] = roll[place]
    return ended, place


def rest(roll: np.ndarray, t: int, tonic: int, grid: Grid) -> float:
    """How well a piece can end with the chord of frame t: 0 for one that wants to go on."""
    pitches = np.flatnonzero(roll[t]) + grid.low
    bass = int(pitches[0]) % 12
    degrees = {(int(pitch) - bass) % 12 for pitch in pitches}
    if not (degrees <= {0, 4, 7} or degrees <= {0, 3, 7}):  # no triad on its own root
        return 0.0
    at_home = bass == tonic
    from_dominant = at_home and _bass_before(roll, t, grid) == (tonic + 7) % 12
    full = len(degrees) == 3
    beat = grid.steps_per_beat
    metre = 1.0 if t % (BAR * beat) == 0 else 0.5 if t % beat == 0 else 0.0
    lateness = t / len(roll)  # of two alike the later one
    return 2.0 * at_home + 1.0 * from_dominant + 0.5 * full + metre + 0.2 * lateness


def _begins(roll: np.ndarray, t: int) -> bool:
    """Whether a chord begins in frame t."""
    return bool(roll[t].any()) and (t == 0 or bool((roll[t] > roll[t - 1]).any()))


def _bass_before(roll: np.ndarray, t: int, grid: Grid) -> int | None:
    """The bass of the last chord with another bass, within a bar."""
    bass = int(np.flatnonzero(roll[t])[0])
    for s in range(t - 1, max(-1, t - BAR * grid.steps_per_beat), -1):
        lowest = np.flatnonzero(roll[s])
        if len(lowest) and lowest[0] != bass:
            return (int(lowest[0]) + grid.low) % 12
    return None
