"""One song as a reader of any format gives it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deeprnn.data.cutting import Meter
from deeprnn.data.music import Grid
from deeprnn.data.quantise import Losses


@dataclass(frozen=True)
class Song:
    """A song's roll, what the grid lost, and what a person should know of its file."""

    roll: np.ndarray  # (T, pitches) uint8
    losses: Losses
    meters: tuple[Meter, ...]  # at least one: bars are counted from it
    remarks: tuple[str, ...] = ()  # a few words each, for the report


class SongReader(Protocol):
    """Makes a song of a file's bytes; a damaged file is a `UserError` that calls it `what` and says why."""

    def __call__(self, data: bytes, grid: Grid, *, drums: bool = False, what: str = "it") -> Song:
        """With `drums`, percussion is kept as pitches."""
        ...
