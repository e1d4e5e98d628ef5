"""From nats to the numbers people publish: nats per frame, bits per character, perplexity.

One evaluation pass scores every frame or symbol once (`Scores`); every convention is then a choice of
which scores to average. This is the only place that divides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Headline(NamedTuple):
    """The metric that selects models and stands in tables, for one kind of data."""

    key: str
    """in results"""
    name: str
    """in run.json, in tables and on a terminal"""
    words: str
    """where there is room, as on the page"""
    places: int
    """decimals that it is printed with"""


HEADLINE = {
    "music": Headline("nats_per_frame", "nats/frame", "nats per frame", 3),
    "char": Headline("bpc", "bpc", "bits per character", 3),
    "word": Headline("perplexity", "perplexity", "perplexity", 1),
}
"""by kind of data"""


def mean(nats: float, count: int) -> float:
    """Nats per frame or symbol; nan for an empty split, so that it is seen."""
    return float(nats) / int(count) if count else math.nan


def bits(nats: float, count: int) -> float:
    """Bits per symbol: BPC where the symbols are characters."""
    return mean(nats, count) / math.log(2.0)


def perplexity(nats: float, count: int) -> float:
    """exp of the mean nats per token; inf where that overflows."""
    value = mean(nats, count)
    return math.exp(value) if not value > 709.0 else math.inf


def headline(kind: str, nats: float, count: int) -> float:
    """The metric of `HEADLINE` from a sum and a count."""
    convert = {"music": mean, "char": bits, "word": perplexity}
    if kind not in convert:
        raise ValueError(f"data kind {kind!r} is unknown: use one of {', '.join(sorted(convert))}")
    return convert[kind](nats, count)


def music_metrics(nats: np.ndarray, lengths: Sequence[int]) -> dict[str, float]:
    """The three averages of a music split from the nats of each frame, songs end to end.

    `nats_per_frame` (the headline) is total nats / total frames with every song's first frame scored;
    `..._sequence_average` is the mean over songs of each song's own mean;
    `..._without_first` leaves each song's first frame out of sum and count.
    """
    nats = np.asarray(nats, np.float64)
    frames = np.asarray(lengths, np.int64)  # (songs,)
    if nats.shape != (int(frames.sum()),):
        raise ValueError(f"{nats.shape} scores for {int(frames.sum())} frames")
    nonempty = frames > 0
    starts = (np.cumsum(frames) - frames)[nonempty]
    per_song = np.add.reduceat(nats, starts) if nonempty.any() else np.zeros(0)
    first = nats[starts]
    means = per_song / frames[nonempty]
    return {
        "nats_per_frame": mean(per_song.sum(), len(nats)),
        "nats_per_frame_sequence_average": mean(means.sum(), len(means)),
        "nats_per_frame_without_first": mean(per_song.sum() - first.sum(), len(nats) - len(first)),
        "frames": len(nats),
        "sequences": len(lengths),
    }


def char_metrics(nats: np.ndarray, ids: np.ndarray, vocabulary: Sequence[str]) -> dict[str, float]:
    """BPC of a character stream in two countings, from the nats of each symbol.

    `nats[i]` scores `ids[i]`; the first symbol has no score and `nats[0]` is ignored. `bpc` counts every
    scored symbol (the authors' stream keeps the space before each newline); `bpc_stripped` leaves those
    trailing spaces out of sum and count, as papers do that strip them. The model still reads them: the
    stripped number is this model's score of the remaining symbols, not that of one trained without them.
    """
    nats = np.asarray(nats, np.float64)
    if nats.shape != np.shape(ids):
        raise ValueError(f"{nats.shape} scores for {np.shape(ids)} symbols")
    scored = np.arange(len(ids)) > 0
    counted = scored & ~trailing_spaces(ids, vocabulary)
    return {
        "bpc": bits(nats[scored].sum(), int(scored.sum())),
        "bpc_stripped": bits(nats[counted].sum(), int(counted.sum())),
        "symbols": len(ids),
        "symbols_stripped": len(ids) - int(trailing_spaces(ids, vocabulary).sum()),
    }


def word_metrics(nats: np.ndarray) -> dict[str, float]:
    """Perplexity of a token stream, `<eos>` scored, the first token not (`nats[0]` is ignored)."""
    scored = np.asarray(nats, np.float64)[1:]
    return {
        "perplexity": perplexity(scored.sum(), len(scored)),
        "nats_per_token": mean(scored.sum(), len(scored)),
        "tokens": len(nats),
    }


def trailing_spaces(ids: np.ndarray, vocabulary: Sequence[str]) -> np.ndarray:
    """Where a symbol is a space directly before a newline: (N,) bool."""
    trailing = np.zeros(len(ids), bool)
    index = {symbol: i for i, symbol in enumerate(vocabulary)}
    if " " in index and "\n" in index and len(ids) > 1:
        ids = np.asarray(ids)
        trailing[:-1] = (ids[:-1] == index[" "]) & (ids[1:] == index["\n"])
    return trailing


def summarise(
    kind: str,
    nats: np.ndarray,
    *,
    lengths: Sequence[int] | None = None,
    ids: np.ndarray | None = None,
    vocabulary: Sequence[str] | None = None,
) -> dict[str, float]:
    """All conventions for one split: music needs `lengths`, characters `ids` and `vocabulary`."""
    if kind == "music" and lengths is not None:
        return music_metrics(nats, lengths)
    if kind == "char" and ids is not None and vocabulary is not None:
        return char_metrics(nats, ids, vocabulary)
    if kind == "word":
        return word_metrics(nats)
    raise ValueError(f"cannot summarise kind {kind!r}: music needs lengths, char needs ids and vocabulary")


def describe(metrics: Mapping[str, float]) -> str:
    """One line for a person: `8.319 nats/frame` and the like."""
    for headline in HEADLINE.values():
        if headline.key in metrics:
            return f"{metrics[headline.key]:.3f} {headline.name}"
    raise ValueError(f"no headline metric among {', '.join(metrics)}")
