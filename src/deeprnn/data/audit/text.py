"""A text's lines as pieces, and the n-grams that two texts share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from deeprnn.data.audit.duplicates import Match
from deeprnn.data.audit.pieces import Pieces
from deeprnn.data.text import END, TextData
from deeprnn.data.window_hashes import prefix_sums, values, windows

NGRAMS = {"char": (10, 20, 50, 100), "word": (3, 5, 8, 12)}
"""lengths of n-grams, in symbols of the text"""
LEAST_WORDS, MOST_WORDS = 5, 2000
"""lines that are compared: shorter ones are equal by chance, longer ones are no lines"""


@dataclass(frozen=True)
class TextPieces:
    """One split: its lines, where each stands in the stream of symbols, and those that are compared."""

    lines: list[str]
    spans: np.ndarray
    """(lines, 2): beginning and end of each line, its end mark included"""
    compared: Pieces
    number: np.ndarray
    """of each compared piece, its line"""

    @classmethod
    def of(cls, data: TextData, splits: Iterable[str]) -> dict[str, TextPieces]:
        """The splits of a text, with one numbering of words for all."""
        index: dict[str, int] = {}
        return {split: cls._one(data, data.splits[split], index) for split in sorted(splits)}

    @classmethod
    def _one(cls, data: TextData, ids: np.ndarray, index: dict[str, int]) -> TextPieces:
        end = "\n" if data.kind == "char" else END
        ends = (
            np.flatnonzero(ids == data.vocabulary.index(end)) + 1
            if end in data.vocabulary
            else np.zeros(0, int)
        )
        starts = np.r_[0, ends]
        spans = np.stack([starts, np.r_[ends, len(ids)]], 1)
        spans = spans[spans[:, 1] > spans[:, 0]]
        lines = [data.decode(ids[a:b]).strip() for a, b in spans]
        words = [[index.setdefault(word, len(index)) for word in line.split()] for line in lines]
        numbers = [i for i, line in enumerate(words) if LEAST_WORDS <= len(line) <= MOST_WORDS]
        pieces = Pieces.of_lines([np.array(words[i]) for i in numbers], [lines[i] for i in numbers])
        return cls(lines, spans, pieces, np.array(numbers, np.int64))

    def numbered(self, match: Match, other: TextPieces) -> Match:
        """A match of compared pieces by the numbers of their lines."""
        return replace(match, piece=int(self.number[match.piece]), other=int(other.number[match.other]))


def shared_ngrams(mine: np.ndarray, theirs: np.ndarray, kind: str) -> dict[int, float]:
    """For each n, the share of the n-grams of one text that the other has, too."""
    out = {}
    top = np.array([max(mine.max(initial=0), theirs.max(initial=0))])  # one table of values for both
    sums = [prefix_sums(values(np.concatenate([text.astype(np.int64), top]))[:-1]) for text in (mine, theirs)]
    for n in NGRAMS[kind]:
        ours, known = (
            windows(*own, np.arange(max(0, len(text) - n + 1)), n)
            for own, text in zip(sums, (mine, theirs), strict=True)
        )
        out[n] = float(np.isin(ours, known).mean()) if len(ours) else 0.0
    return out
