"""A data set's splits compared two by two: how many pieces stand in two of them, which, and what is left without them.

report = audit(load("nottingham"))
report.flagged("test")            # songs of the test part with a near-duplicate in the training part
report.to_dict()                  # everything, for JSON
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deeprnn.data.audit.duplicates import PASSAGE, THRESHOLD, Match, near_duplicates, shared_passages
from deeprnn.data.audit.pieces import Pieces
from deeprnn.data.audit.text import LEAST_WORDS, NGRAMS, TextPieces, shared_ngrams
from deeprnn.data.music import MusicData
from deeprnn.data.text import TextData
from deeprnn.errors import UserError

PAIRS = (("test", "train"), ("valid", "train"), ("test", "valid"))
"""splits that are compared: the first one's pieces are looked for in the second"""
KINDS = ("exact", "transposed", "edited", "transposed and edited", "contained")
SHOWN = 100
"""characters of a line that are kept"""


@dataclass(frozen=True)
class Comparison:
    """The pieces of one split looked for in another."""

    split: str
    other: str
    pieces: int
    symbols: int
    """frames or symbols of the split"""
    flagged_symbols: int
    """those of pieces with a near-duplicate"""
    matches: tuple[Match, ...]
    names: Mapping[int, str]
    other_names: Mapping[int, str]
    shared: Mapping[str, float]
    """share of the frames in passages, or of n-grams by n, that the other split has, too"""
    melodies: tuple[Match, ...] = ()
    """songs whose highest notes have a near-duplicate there, whatever stands below them"""
    too_short: int = 0
    """lines of text that were not compared"""

    @property
    def counts(self) -> dict[str, int]:
        """Near-duplicates by kind."""
        kinds = Counter(match.kind for match in self.matches)
        return {kind: kinds[kind] for kind in KINDS if kinds[kind]}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "split": self.split,
            "other": self.other,
            "pieces": self.pieces,
            "near_duplicates": len(self.matches),
            "by_kind": self.counts,
            "symbols": self.symbols,
            "symbols_of_near_duplicates": self.flagged_symbols,
            "shared": {name: round(share, 4) for name, share in self.shared.items()},
            **({"lines_too_short": self.too_short} if self.too_short else {}),
            "matches": [self._match(match) for match in self.matches],
            **({"same_melody": [self._match(match) for match in self.melodies]} if self.melodies else {}),
        }

    def _match(self, match: Match) -> dict[str, Any]:
        return {
            "piece": match.piece,
            "name": self.names[match.piece][:SHOWN],
            "other": match.other,
            "other_name": self.other_names[match.other][:SHOWN],
            "kind": match.kind,
            "similarity": round(match.similarity, 4),
            "semitones": match.semitones,
            "contained": round(match.contained, 4),
            "others": match.others,
        }


@dataclass(frozen=True)
class Audit:
    """What stands in two splits of a data set."""

    name: str
    kind: str
    comparisons: tuple[Comparison, ...]
    spans: Mapping[str, np.ndarray] = field(repr=False)
    """where each split's pieces begin and end in it: (pieces, 2)"""
    sizes: Mapping[str, int] = field(default_factory=dict)
    threshold: float = THRESHOLD

    def flagged(self, split: str, against: str = "train") -> list[int]:
        """The pieces of a split that have a near-duplicate in another."""
        return [
            m.piece for c in self.comparisons if (c.split, c.other) == (split, against) for m in c.matches
        ]

    def same_melody(self, split: str, against: str = "train") -> list[int]:
        """The songs of a split that are near-duplicates of one in another by all their notes, or the highest alone."""
        songs = [
            m.piece
            for c in self.comparisons
            if (c.split, c.other) == (split, against)
            for m in (*c.matches, *c.melodies)
        ]
        return sorted(set(songs))

    def clean(self, split: str, melodies: bool = False) -> np.ndarray:
        """Which frames or symbols of a split belong to no near-duplicate of the training part: (symbols,) bool.

        With `melodies` also to no song whose highest notes have one.
        """
        keep = np.ones(self.sizes[split], bool)
        duplicates = self.same_melody(split) if melodies else self.flagged(split)
        for start, stop in self.spans[split][duplicates]:
            keep[start:stop] = False
        return keep

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with what was asked."""
        music = self.kind == "music"
        settings: dict[str, Any] = {"similarity": self.threshold}
        settings |= (
            {"passage_frames": PASSAGE}
            if music
            else {"ngrams": NGRAMS[self.kind], "least_words": LEAST_WORDS}
        )
        return {
            "name": self.name,
            "kind": self.kind,
            "settings": settings,
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }


def audit(data: MusicData | TextData, threshold: float = THRESHOLD) -> Audit:
    """Compare the splits of a data set two by two."""
    if not 0.5 <= threshold <= 1:
        raise UserError(f"a similarity of {threshold:g} is asked for: give one from 0.5 to 1")
    pairs = [(a, b) for a, b in PAIRS if len(data.splits.get(a, ())) and len(data.splits.get(b, ()))]
    if not pairs:
        raise UserError(f"{data.name} has one split only: there is nothing to compare")
    used = {split for pair in pairs for split in pair}
    if isinstance(data, MusicData):
        songs = {s: Pieces.of_songs(data.splits[s], data.names[s]) for s in used}
        tunes = {s: Pieces.of_melodies(data.splits[s], data.names[s]) for s in used}
        compared = [_compare_music(a, b, songs, tunes, threshold) for a, b in pairs]
        spans = {s: np.stack([p.starts, p.starts + p.lengths], 1) for s, p in songs.items()}
    else:
        texts = TextPieces.of(data, used)
        compared = [_compare_text(a, b, data, texts, threshold) for a, b in pairs]
        spans = {s: texts[s].spans for s in used}
    return Audit(data.name, data.kind, tuple(compared), spans, dict(data.sizes), threshold)


def _compare_music(
    split: str, other: str, songs: Mapping[str, Pieces], tunes: Mapping[str, Pieces], threshold: float
) -> Comparison:
    pieces, others = songs[split], songs[other]
    matches = tuple(near_duplicates(pieces, others, threshold))
    melodies = tuple(near_duplicates(tunes[split], tunes[other], threshold, passages=False))
    shared = {f"passages of {PASSAGE} frames": float(shared_passages(pieces, others).mean())}
    return Comparison(
        split,
        other,
        len(pieces),
        len(pieces.values),
        int(sum(pieces.lengths[m.piece] for m in matches)),
        matches,
        {m.piece: pieces.names[m.piece] for m in (*matches, *melodies)},
        {m.other: others.names[m.other] for m in (*matches, *melodies)},
        shared,
        melodies,
    )


def _compare_text(
    split: str, other: str, data: TextData, texts: Mapping[str, TextPieces], threshold: float
) -> Comparison:
    pieces, others = texts[split], texts[other]
    lines = near_duplicates(pieces.compared, others.compared, threshold, passages=False)
    matches = tuple(pieces.numbered(match, others) for match in lines)
    shared = {
        f"{n}-grams": s for n, s in shared_ngrams(data.splits[split], data.splits[other], data.kind).items()
    }
    flagged = [m.piece for m in matches]
    return Comparison(
        split,
        other,
        len(pieces.lines),
        len(data.splits[split]),
        int(np.diff(pieces.spans[flagged], axis=1).sum()),
        matches,
        {m.piece: pieces.lines[m.piece] for m in matches},
        {m.other: others.lines[m.other] for m in matches},
        shared,
        too_short=len(pieces.lines) - len(pieces.compared),
    )
