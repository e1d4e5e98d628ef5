"""Piano rolls: songs of binary frames, kept as bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import overload

import numpy as np

from deeprnn.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Grid:
    """How time and pitch become a roll: steps per beat (quarter note), lowest and highest MIDI number."""

    steps_per_beat: int = 4
    low: int = 21
    high: int = 108

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | np.integer):
                raise UserError(f"{name}={value!r:.40} of a grid is no whole number")
        if not 1 <= self.steps_per_beat <= 96:
            raise UserError(f"steps_per_beat={self.steps_per_beat} is outside 1..96")
        if not 0 <= self.low <= self.high <= 127:
            raise UserError(f"pitch range {self.low}..{self.high} is not an interval within MIDI's 0..127")

    @property
    def size(self) -> int:
        """Number of pitches, the width of a frame."""
        return self.high - self.low + 1

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Grid:
        known = asdict(cls())
        if not isinstance(values, Mapping) or not values.keys() <= known.keys():
            raise UserError(f"a grid is a table of {', '.join(known)}, not {values!r:.60}")
        return cls(**values)


class Songs(Sequence[np.ndarray]):
    """Rolls (T, pitches) of zeros and ones, stored end to end at a bit a note and unpacked when asked for."""

    def __init__(self, packed: np.ndarray, lengths: np.ndarray, pitches: int) -> None:
        self.packed = np.ascontiguousarray(
            packed
        )  # (sum of lengths, ceil(pitches / 8)) uint8, first pitch in the highest bit
        self.lengths = np.asarray(lengths, np.int64)
        self.pitches = pitches
        self.starts = np.cumsum(self.lengths) - self.lengths

    @classmethod
    def pack(cls, rolls: Iterable[np.ndarray], pitches: int = 88) -> Songs:
        """From rolls of any numeric dtype: non-zero means sounding."""
        packed, lengths = [], []
        for roll in rolls:
            roll = np.asarray(roll)
            if roll.ndim != 2 or roll.shape[1] != pitches:
                raise UserError(f"a song has shape {roll.shape}; expected (frames, {pitches})")
            packed.append(np.packbits(roll != 0, axis=1))
            lengths.append(len(roll))
        width = (pitches + 7) // 8
        table = np.concatenate(packed) if packed else np.zeros((0, width), np.uint8)
        return cls(table, np.array(lengths, np.int64), pitches)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> Songs: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Songs:
        if isinstance(index, slice):
            return Songs.pack((self[i] for i in range(*index.indices(len(self)))), self.pitches)
        length = self.lengths[index]
        start = self.starts[index]
        return np.unpackbits(self.packed[start : start + length], axis=1, count=self.pitches)

    def each_packed(self) -> Iterator[np.ndarray]:
        """The songs one by one as they are stored, an eighth of their size as rolls."""
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            yield self.packed[start : start + length]

    @property
    def frames(self) -> int:
        """Frames in all songs together."""
        return len(self.packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.lengths.nbytes

    def counts(self) -> np.ndarray:
        """How often each pitch sounds: (pitches,) int64."""
        total = np.zeros(self.pitches, np.int64)
        for start in range(0, self.frames, 65536):  # in blocks: the bits stay packed
            block = np.unpackbits(self.packed[start : start + 65536], axis=1, count=self.pitches)
            total += block.sum(0, dtype=np.int64)
        return total

    @property
    def density(self) -> float:
        """Sounding notes per frame."""
        return float(self.counts().sum() / self.frames) if self.frames else 0.0


@dataclass
class MusicData:
    """Songs by split, with the grid they lie on (None: unknown) and a name for each."""

    name: str
    splits: dict[str, Songs]
    grid: Grid | None = None
    names: dict[str, list[str]] = field(default_factory=dict)
    kind: str = "music"
    remarks: list[str] = field(default_factory=list)  # what to know before training on it

    def __post_init__(self) -> None:
        for split, songs in self.splits.items():
            self.names.setdefault(split, [f"{split}-{i:04d}" for i in range(len(songs))])

    @property
    def size(self) -> int:
        """Width of a frame: the model's input and output size."""
        return next(iter(self.splits.values())).pitches

    @property
    def sizes(self) -> dict[str, int]:
        """Frames of each split."""
        return {split: songs.frames for split, songs in self.splits.items()}
