"""Pieces end to end, songs or lines of text, with hashes of their windows that do not change under transposition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deeprnn.data.music import Songs
from deeprnn.data.window_hashes import powers, prefix_sums, random_values, windows

SHIFT = 0xD1342543DE82EF95
"""a note p of a frame counts SHIFT^p, so that a frame s semitones higher has SHIFT^s times the value"""
UNSHIFT = pow(SHIFT, -1, 1 << 64)
SILENCE = 1000
"""above every pitch: the lowest note of a frame without notes"""


@dataclass(frozen=True)
class Windows:
    """The windows of one length of all pieces: hash, the piece it stands in, where it begins, its lowest pitch."""

    key: np.ndarray
    piece: np.ndarray
    start: np.ndarray
    lowest: np.ndarray


class Pieces:
    """Sequences of 64-bit values, one for each frame or word, and the lowest pitch that sounds in each."""

    def __init__(self, v: np.ndarray, lowest: np.ndarray, lengths: np.ndarray, names: Sequence[str]) -> None:
        self.values, self.lowest, self.names = v, lowest, list(names)
        self.lengths = np.asarray(lengths, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self._prefix = prefix_sums(v)

    @classmethod
    def of_songs(cls, songs: Songs, names: Sequence[str]) -> Pieces:
        """Frames by their notes."""
        weights = powers(SHIFT, songs.pitches)
        v, lowest = np.empty(songs.frames, np.uint64), np.empty(songs.frames, np.int64)
        for at in range(0, songs.frames, 65536):  # in blocks: the bits stay packed
            part = slice(at, at + 65536)
            notes = np.unpackbits(songs.packed[part], axis=1, count=songs.pitches)
            v[part] = (notes * weights).sum(1, dtype=np.uint64)
            lowest[part] = np.where(notes.any(1), notes.argmax(1), SILENCE)
        return cls(v, lowest, songs.lengths, names)

    @classmethod
    def of_melodies(cls, songs: Songs, names: Sequence[str]) -> Pieces:
        """The highest note of every frame alone: the same tune may stand over other voices."""
        v, highest = np.empty(songs.frames, np.uint64), np.empty(songs.frames, np.int64)
        for at in range(0, songs.frames, 65536):
            part = slice(at, at + 65536)
            notes = np.unpackbits(songs.packed[part], axis=1, count=songs.pitches)
            top = songs.pitches - 1 - notes[:, ::-1].argmax(1)
            v[part] = np.where(notes.any(1), powers(SHIFT, songs.pitches)[top], 0)
            highest[part] = np.where(notes.any(1), top, SILENCE)
        return cls(v, highest, songs.lengths, names)

    @classmethod
    def of_lines(cls, lines: Sequence[np.ndarray], names: Sequence[str]) -> Pieces:
        """Lines of word numbers, which have no key."""
        lengths = np.array([len(line) for line in lines], np.int64)
        words = np.concatenate(lines) if len(lines) else np.zeros(0, np.int64)
        v = random_values(int(words.max(initial=0)) + 1, seed=1)[words]
        return cls(v, np.full(len(v), SILENCE), lengths, names)

    def __len__(self) -> int:
        return len(self.lengths)

    def piece(self, number: int) -> np.ndarray:
        """The values of one piece."""
        return self.values[self.starts[number] : self.starts[number] + self.lengths[number]]

    def windows(self, length: int) -> Windows:
        """All windows of one length that lie within a piece, each moved to where its lowest note is the first pitch."""
        counts = np.maximum(self.lengths - length + 1, 0)
        piece = np.repeat(np.arange(len(self)), counts)
        start = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        place = start + self.starts[piece]
        lowest = self.lowest[place]
        for i in range(1, length):
            lowest = np.minimum(lowest, self.lowest[place + i])
        lowest = np.where(lowest == SILENCE, 0, lowest)
        key = windows(*self._prefix, place, length) * powers(UNSHIFT, SILENCE)[lowest]
        return Windows(key, piece, start, lowest)


def transposed(v: np.ndarray, semitones: int) -> np.ndarray:
    """The values of a piece moved up by so many semitones, or down."""
    base = SHIFT if semitones >= 0 else UNSHIFT
    return v * np.uint64(pow(base, abs(semitones), 1 << 64))
