"""Songs in other keys: all to one tonic, or each by a random interval while training."""

from __future__ import annotations

import numpy as np

from deeprnn.data.music import Grid, Songs

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


def randomly_transposed(songs: Songs, most: int, seed: int) -> Songs:
    """Every song moved up or down by up to `most` semitones, as far as all its notes stay within the range.

    Raw PCG64 output decides rather than a Generator: numpy promises the former stream for good.
    """
    draws = np.random.PCG64(seed).random_raw(len(songs))
    moved = np.empty_like(songs.packed)
    for start, roll, draw in zip(songs.starts.tolist(), songs, draws.tolist(), strict=True):
        used = np.flatnonzero(roll.any(0))
        if len(used):
            least, greatest = -min(most, int(used[0])), min(most, songs.pitches - 1 - int(used[-1]))
            roll, _ = transpose(roll, least + draw % (greatest - least + 1))
        moved[start : start + len(roll)] = np.packbits(roll, axis=1)
    return Songs(moved, songs.lengths, songs.pitches)
