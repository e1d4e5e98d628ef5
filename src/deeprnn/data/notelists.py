"""Songs given as the MIDI numbers that sound in each frame: the layout of pickles and JSON files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from deeprnn.data.limits import check_frames, check_memory, check_songs
from deeprnn.data.music import Grid, Songs
from deeprnn.errors import UserError

MAX_NOTES = 1024
"""Most numbers in a frame, which may repeat a note, but not without end."""

_OFTEN = 65_536  # frames between two looks at the limits


class SongCollector:
    """Songs added frame by frame and kept as bits, so that no frame's Python objects stay."""

    def __init__(self, grid: Grid, what: str, file_size: int) -> None:
        self.grid, self.what, self.file_size = grid, what, file_size
        self.width = (grid.size + 7) // 8
        self.table = bytearray()
        self.lengths: list[int] = []

    def add(self, frames: Iterable[Any]) -> None:
        """One song; a frame is a list of MIDI numbers, or one alone, and None and -1 are rests."""
        check_songs(len(self.lengths) + 1, self.what)
        what, count = f"{self.what}, song {len(self.lengths)}", 0
        for frame in frames:
            self.table += self._bits(frame_notes(frame, what), what, count)
            count += 1
            if count % _OFTEN == 0:
                self._check(count, what)
        self._check(count, what)
        self.lengths.append(count)

    def _bits(self, notes: list[int], what: str, frame: int) -> bytes:
        low, high, bits = self.grid.low, self.grid.high, 0
        for note in notes:
            if not low <= note <= high:
                raise UserError(f"{what}, frame {frame}: MIDI number {note!r} lies outside {low}..{high}")
            bits |= 1 << (8 * self.width - 1 - (note - low))  # the first pitch in the highest bit
        return bits.to_bytes(self.width, "big")

    def _check(self, count: int, what: str) -> None:
        check_frames(count, what)
        check_memory(len(self.table), self.file_size, self.what)

    def songs(self) -> Songs:
        """All that was added."""
        table = np.frombuffer(self.table, np.uint8).reshape(-1, self.width)
        return Songs(table, np.array(self.lengths, np.int64), self.grid.size)


def frame_notes(frame: Any, what: str) -> list[int]:
    """The MIDI numbers of one frame, checked."""
    notes = []
    values = listed([frame] if frame is None or isinstance(frame, int) else frame, what)
    if len(values) > MAX_NOTES:
        raise UserError(f"{what}: a frame lists {len(values):,} notes; MIDI has 128")
    for note in values:
        if note is None or note == -1:
            continue
        if isinstance(note, bool) or not isinstance(note, (int, float)) or note != note // 1:
            raise UserError(f"{what}: a {type(note).__name__} stands where a MIDI number is expected")
        notes.append(int(note))
    return notes


def listed(value: Any, what: str) -> list[Any] | tuple[Any, ...]:
    """The value if it is a list or tuple, else an error."""
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{what}: expected a list, found {type(value).__name__}")
    return value
