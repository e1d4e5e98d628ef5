"""Copy check: the longest passage a sample shares with the training data.

Windows are compared by hash (`data.window_hashes`). A shared passage of length L holds shared passages of every shorter
length, so that each step of the search looks only where the step before it found something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deeprnn.data.window_hashes import prefix_sums, random_values, values, windows

if TYPE_CHECKING:
    from deeprnn.data import MusicData, TextData


@dataclass(frozen=True)
class Passage:
    """A passage that stands both in a sample and in the training data."""

    length: int  # frames or symbols; 0: nothing is shared
    at: int  # where it begins in the sample
    piece: int  # which training piece holds it; 0 for a text
    position: int  # where it begins in that piece
    name: str = ""  # the piece's name, where it has one


class Corpus:
    """Training data prepared for many queries: pieces of frames (T, K), or one stream of symbols."""

    def __init__(self, pieces: Sequence[np.ndarray], names: Sequence[str] = ()) -> None:
        self.pieces = pieces
        self.names = list(names)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        # One value that no sample can hold stands after every piece, so that no window spans two.
        self.starts = np.cumsum(lengths + 1) - (lengths + 1)
        self._values = np.zeros(int((lengths + 1).sum()), np.uint64)
        fence = random_values(1, seed=2)[0]
        for start, piece in zip(self.starts, pieces, strict=True):
            self._values[start : start + len(piece)] = values(piece)
            self._values[start + len(piece)] = fence
        self._prefix, self._unshift = prefix_sums(self._values)

    def longest(self, sample: np.ndarray) -> Passage:
        """The longest passage of `sample` that stands in the corpus; of several, the first in the sample."""
        sample = np.asarray(sample)
        if not len(sample) or not len(self._values):
            return Passage(0, 0, 0, 0)
        prefix, unshift = prefix_sums(values(sample))
        best: tuple[int, np.ndarray, np.ndarray] | None = None
        low, high = 0, min(len(sample), len(self._values)) + 1  # found at low, not at high
        starts, corpus_starts = np.arange(len(sample)), np.arange(len(self._values))
        guess = min(12, high - 1)
        while high - low > 1:
            shared = self._shared(guess, prefix, unshift, starts, corpus_starts)
            if len(shared[0]):
                low, (starts, corpus_starts) = guess, shared
                best = (guess, *shared)
                guess = min(2 * low, (low + high) // 2) if high - low > 1 else low
            else:
                high = guess
                guess = (low + high) // 2
        if best is None:
            return Passage(0, 0, 0, 0)
        return self._place(sample, *best)

    def shared_windows(self, sample: np.ndarray, length: int) -> np.ndarray:
        """Where windows of `length` begin in a sample that stand in the corpus, told by their hashes alone."""
        sample = np.asarray(sample)
        if len(sample) < length or not len(self._values):
            return np.zeros(0, np.int64)
        every = np.arange(len(sample)), np.arange(len(self._values))
        return self._shared(length, *prefix_sums(values(sample)), *every)[0]

    def _shared(
        self,
        length: int,
        prefix: np.ndarray,
        unshift: np.ndarray,
        starts: np.ndarray,
        corpus_starts: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the candidate starts, those whose windows of `length` occur on both sides."""
        starts = starts[starts + length < len(prefix)]
        corpus_starts = corpus_starts[corpus_starts + length < len(self._prefix)]
        hashes = windows(prefix, unshift, starts, length)
        known = np.unique(hashes)
        keep = []
        for block in np.array_split(
            corpus_starts, max(1, len(corpus_starts) >> 18)
        ):  # blocks that fit the cache
            h = windows(self._prefix, self._unshift, block, length)
            slot = np.minimum(np.searchsorted(known, h), max(0, len(known) - 1))
            keep.append(block[known[slot] == h] if len(known) else block[:0])
        corpus_starts = np.concatenate(keep)
        return starts[
            np.isin(hashes, windows(self._prefix, self._unshift, corpus_starts, length))
        ], corpus_starts

    def _place(
        self, sample: np.ndarray, length: int, starts: np.ndarray, corpus_starts: np.ndarray
    ) -> Passage:
        """Turn starts into a passage, seen to be equal symbol by symbol."""
        at = int(starts[0])
        for start in corpus_starts.tolist():
            piece = int(np.searchsorted(self.starts, start, side="right")) - 1
            position = start - int(self.starts[piece])
            passage = self.pieces[piece][position : position + length]
            if np.array_equal(passage, sample[at : at + length]):
                name = self.names[piece] if piece < len(self.names) else ""
                return Passage(length, at, piece, position, name)
        return self.longest(sample[:at])  # two hashes in 2^64 agreed by chance


def check(samples: Sequence[np.ndarray], data: MusicData | TextData) -> tuple[list[Passage], int | None]:
    """The longest shared passage of every sample, and what unseen test pieces of that length share."""
    train, test = data.splits["train"], data.splits.get("test")
    unseen: list[np.ndarray] = []
    if isinstance(train, np.ndarray):
        corpus = Corpus([train])
        if isinstance(test, np.ndarray):
            unseen = [test[i:] for i in (0, len(test) // 3, 2 * len(test) // 3)]
    else:
        corpus = Corpus(train, getattr(data, "names", {}).get("train", ()))
        if test is not None:
            unseen = [np.asarray(test[i]) for i in range(min(25, len(test)))]
    length = max((len(sample) for sample in samples), default=0)
    shared = sorted(corpus.longest(piece[:length]).length for piece in unseen)
    return [corpus.longest(sample) for sample in samples], shared[len(shared) // 2] if shared else None


def describe(passage: Passage, total: int, unit: str, typical: int | None = None) -> str:
    """One line for a person: what is shared, where, and how that compares with unseen pieces."""
    if not passage.length:
        return "copy check: nothing is shared with the training data"
    where = f" in {passage.name}" if passage.name else ""
    share = 100 * passage.length / max(1, total)
    line = (
        f"copy check: the longest passage shared with the training data is {passage.length} of {total} {unit} "
        f"({share:.0f} %), from {passage.at + 1}, found{where} at {passage.position + 1}"
    )
    return line + (f"; an unseen test piece shares {typical}" if typical is not None else "")
