"""Near-duplicates between two splits: pieces that a few edits, in one key or another, turn into each other.

A piece is compared with all pieces of the other split, and nothing above the threshold is missed: d edits leave at
least max(n, m) − 1 − 2d of the windows of two frames as they were (the q-gram lemma), and those windows are counted
for all pairs at once. Only pairs that share as many are aligned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from deeprnn.data.audit.pieces import Pieces, Windows, transposed
from deeprnn.data.window_hashes import BASE

THRESHOLD = 0.8
"""similarity from which two pieces count as near-duplicates: at most a fifth of the frames differ"""
PASSAGE = 16
"""frames of a passage that two pieces may share"""
VARIED = 4
"""different frames that such a passage must have: a held chord is no passage"""
MOST_CELLS = 4e8
"""of the table that aligns a pair, which takes seconds then: longer pairs are compared by their passages alone"""
SHIFTS = 3
"""transpositions of a pair that are aligned, those that most windows speak for"""


@dataclass(frozen=True)
class Match:
    """A piece and the one of the other split that is most like it."""

    piece: int
    other: int
    similarity: float
    """1 − edits / frames of the longer one"""
    semitones: int
    """by which the other one has to be moved up"""
    contained: float
    """share of the piece's frames that lie in passages of the other one, in whatever keys"""
    threshold: float = THRESHOLD
    others: int = 1
    """pieces of the other split that are as near as the threshold asks, this one included"""

    @property
    def kind(self) -> str:
        """exact, transposed, edited, both, or contained in a longer piece."""
        if self.similarity == 1.0:
            return "transposed" if self.semitones else "exact"
        if self.similarity >= self.threshold:
            return "transposed and edited" if self.semitones else "edited"
        return "contained"


def near_duplicates(
    pieces: Pieces, others: Pieces, threshold: float = THRESHOLD, passages: bool = True
) -> list[Match]:
    """For every piece of `mine` that has a near-duplicate among `theirs`, the nearest one."""
    contained = _contained(pieces, others) if passages else {}
    matches: dict[int, list[Match]] = {}
    pairs = {
        *_candidates(pieces, others, threshold),
        *(pair for pair, share in contained.items() if share >= threshold),
    }
    for piece, other in sorted(pairs):
        share = contained.get((piece, other), 0.0)
        similarity, semitones = _aligned(
            pieces, piece, others, other, 0.0 if share >= threshold else threshold
        )
        if similarity >= threshold or share >= threshold:
            match = Match(piece, other, similarity, semitones, share, threshold)
            matches.setdefault(piece, []).append(match)
    nearest = {
        piece: max(of_piece, key=lambda m: (m.similarity, m.semitones == 0, m.contained, -m.other))
        for piece, of_piece in matches.items()
    }
    return [replace(nearest[piece], others=len(matches[piece])) for piece in sorted(matches)]


def shared_passages(pieces: Pieces, others: Pieces) -> np.ndarray:
    """Which frames of `pieces` lie in a passage that `others` have, too, in whatever key: (frames,) bool."""
    windows = _varied(pieces, pieces.windows(PASSAGE))
    known = np.unique(_varied(others, others.windows(PASSAGE)).key)
    at = (pieces.starts[windows.piece] + windows.start)[np.isin(windows.key, known)]
    return _covered(at, PASSAGE, len(pieces.values))


def _covered(starts: np.ndarray, length: int, size: int) -> np.ndarray:
    edges = np.zeros(size + 1, np.int64)
    np.add.at(edges, starts, 1)
    np.add.at(edges, starts + length, -1)
    return np.cumsum(edges[:-1]) > 0


# ---- counting windows for all pairs


@dataclass(frozen=True)
class _Index:
    """Windows of the other split by their hash: for each distinct one the pieces that have it, and how often."""

    key: np.ndarray
    piece: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, w: Windows) -> _Index:
        order = np.lexsort((w.piece, w.key))
        key, piece = w.key[order], w.piece[order]
        first = np.flatnonzero(np.r_[True, (key[1:] != key[:-1]) | (piece[1:] != piece[:-1])][: len(key)])
        return cls(key[first], piece[first], np.diff(np.r_[first, len(key)]))

    def rows(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the index with one of these distinct hashes, and which of the hashes each has."""
        low, high = np.searchsorted(self.key, key), np.searchsorted(self.key, key, side="right")
        counts = high - low
        which = np.repeat(np.arange(len(key)), counts)
        return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[which], which


def _candidates(pieces: Pieces, others: Pieces, threshold: float) -> Iterator[tuple[int, int]]:
    """Pairs that share enough windows of two to be as similar as the threshold asks."""
    pairs_of_frames, index = pieces.windows(2), _Index.of(others.windows(2))
    bounds = np.searchsorted(pairs_of_frames.piece, np.arange(len(pieces) + 1))
    for piece in range(len(pieces)):
        longer = np.maximum(pieces.lengths[piece], others.lengths)
        least = np.maximum(1, longer - 1 - 2 * np.floor((1 - threshold) * longer + 1e-9))
        key, count = np.unique(pairs_of_frames.key[bounds[piece] : bounds[piece + 1]], return_counts=True)
        rows, queried = index.rows(key)
        shared = np.bincount(
            index.piece[rows], np.minimum(index.count[rows], count[queried]), minlength=len(others)
        )
        ratio = np.minimum(pieces.lengths[piece], others.lengths) / np.maximum(longer, 1)
        for other in np.flatnonzero((shared >= least) & (ratio >= threshold)):
            yield piece, int(other)


# ---- one pair


def _aligned(pieces: Pieces, piece: int, others: Pieces, other: int, threshold: float) -> tuple[float, int]:
    """Similarity and transposition of a pair, over the transpositions that most of their windows speak for."""
    a, b = pieces.piece(piece), others.piece(other)
    if not len(a) or not len(b) or len(a) * len(b) > MOST_CELLS:
        return 0.0, 0
    best = (-1.0, 0)
    for shift in _shifts(pieces, piece, others, other):
        longer = max(len(a), len(b))
        most, moved = int((1 - threshold) * longer + 1e-9), transposed(b, shift)
        if _in_common(a, moved) < longer - most or _in_common(_twos(a), _twos(moved)) < longer - 1 - 2 * most:
            continue  # in this key they have too little in common, in whatever order
        similarity = 1 - edits(a, moved, most) / longer
        best = max(best, (similarity, shift), key=lambda candidate: (candidate[0], -abs(candidate[1])))
    return best


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many values two sequences have in common, each as often as it occurs in both."""
    (a, own), (b, other) = np.unique(a, return_counts=True), np.unique(b, return_counts=True)
    _, i, j = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    return int(np.minimum(own[i], other[j]).sum())


def _twos(v: np.ndarray) -> np.ndarray:
    return v[:-1] * np.uint64(BASE) + v[1:]


def _shifts(pieces: Pieces, piece: int, others: Pieces, other: int) -> list[int]:
    """The likeliest transpositions; none at all, 0, is always among them."""
    a, b = _lowest(pieces, piece), _lowest(others, other)
    votes: dict[int, int] = {}
    _, mine_at, theirs_at = np.intersect1d(a[0], b[0], return_indices=True)
    for shift in (a[1][mine_at] - b[1][theirs_at]).tolist():
        votes[shift] = votes.get(shift, 0) + 1
    likely = sorted(votes, key=lambda s: (-votes[s], abs(s)))[:SHIFTS]
    return list(dict.fromkeys([0, *likely]))


def _lowest(pieces: Pieces, number: int) -> tuple[np.ndarray, np.ndarray]:
    part = slice(int(pieces.starts[number]), int(pieces.starts[number] + pieces.lengths[number]))
    one = Pieces(pieces.values[part], pieces.lowest[part], pieces.lengths[number : number + 1], [""])
    w = one.windows(min(2, len(one.values)))
    return w.key, w.lowest


def edits(a: np.ndarray, b: np.ndarray, most: int) -> int:
    """Frames to be inserted, left out or exchanged to turn one sequence into the other; beyond `most`, all of them."""
    if abs(len(a) - len(b)) > most:
        return max(len(a), len(b))
    places = np.arange(len(b) + 1)
    row = places.copy()
    for i, value in enumerate(a, 1):
        new = np.empty_like(row)
        new[0] = i
        np.minimum(row[1:] + 1, row[:-1] + (b != value), out=new[1:])
        row = np.minimum.accumulate(new - places) + places  # insertions, from left to right
        if row.min() > most:
            return max(len(a), len(b))
    return int(row[-1]) if row[-1] <= most else max(len(a), len(b))


# ---- passages


def _varied(pieces: Pieces, w: Windows) -> Windows:
    """The windows that are more than a held chord or two."""
    place = pieces.starts[w.piece] + w.start
    changes = np.zeros(len(pieces.values) + 1, np.int64)
    changes[2:] = np.cumsum(pieces.values[1:] != pieces.values[:-1])
    keep = changes[place + PASSAGE] - changes[place + 1] >= VARIED - 1
    return Windows(w.key[keep], w.piece[keep], w.start[keep], w.lowest[keep])


def _contained(pieces: Pieces, others: Pieces) -> dict[tuple[int, int], float]:
    """Share of a piece's frames in passages that one other piece has, where that is a fifth or more."""
    passages, index = (
        _varied(pieces, pieces.windows(PASSAGE)),
        _Index.of(_varied(others, others.windows(PASSAGE))),
    )
    bounds = np.searchsorted(passages.piece, np.arange(len(pieces) + 1))
    out: dict[tuple[int, int], float] = {}
    for piece in range(len(pieces)):
        part = slice(bounds[piece], bounds[piece + 1])
        key, inverse = np.unique(passages.key[part], return_inverse=True)
        rows, queried = index.rows(key)
        for other in np.unique(index.piece[rows]):
            hit = np.zeros(len(key), bool)
            hit[queried[index.piece[rows] == other]] = True
            size = int(pieces.lengths[piece])
            share = float(_covered(passages.start[part][hit[inverse]], PASSAGE, size).mean())
            if share >= 0.2:
                out[piece, int(other)] = share
    return out
