"""One file in three: where a text or a song is cut into training, validation and test parts, in its own order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deeprnn.data.text import BLOCK

ALONE = (0.9, 0.95)
"""Where valid and test begin in a text that is the only file: it is long, so that a twentieth is enough."""


class Meter(NamedTuple):
    """Bars of equal length: where the first begins and how long each is, in grid steps."""

    start: float
    bar: float


class Cut(NamedTuple):
    """Where the second and third parts begin, and what stands there, for people to read."""

    first: int
    second: int
    where: str


def ended(text: str) -> str:
    """A text whose last line ends as the others do."""
    return text if text.endswith("\n") else text + "\n"


def cut_text(text: str, shares: tuple[float, float]) -> Cut | None:
    """Line ends by the number of lines, or, where lines are too few, word ends by the number of characters.

    Some corpora are one line. None where the text is too short for three parts.
    """
    lines = text.count("\n") + (not text.endswith("\n"))
    first, second = (round(share * lines) for share in shares)
    if 0 < first < second < lines:
        return Cut(_end_of_line(text, first), _end_of_line(text, second), "line ends")
    starts = [round(share * len(text)) for share in shares]
    for i, stop in ((1, len(text)), (0, starts[1])):
        if space := re.compile(r"\s(?=\S)").search(text, starts[i], stop):
            starts[i] = space.end()
    return Cut(starts[0], starts[1], "words") if 0 < starts[0] < starts[1] < len(text) else None


def _end_of_line(text: str, number: int) -> int:
    """Where the line of that number, counted from 1, has ended; without a list of all lines."""
    at = 0
    while (inside := text.count("\n", at, at + BLOCK)) < number:
        at += BLOCK
        number -= inside
    for _ in range(number):
        at = text.index("\n", at) + 1
    return at


def cut_song(
    sounds: np.ndarray, steps_per_beat: int, meters: Sequence[Meter], shares: tuple[float, float]
) -> Cut | None:
    """Ends of silences, or else bar lines, near the shares; `sounds` says of each step whether a note does.

    None where a part would be shorter than a bar.
    """
    room = min(shares[1] - shares[0], 1 - shares[1]) * len(sounds) / 2  # how far a cut may move
    quiet = _silence_ends(sounds, steps_per_beat)
    cuts, places = [], []
    for share in shares:
        target = share * len(sounds)
        silence = quiet[np.abs(quiet - target).argmin()] if len(quiet) else -1
        if abs(silence - target) <= room:
            cuts.append(int(silence))
            places.append("a silence")
        else:
            cuts.append(_nearest_bar(target, meters))
            places.append("a bar line")
    least = max(steps_per_beat, min(meter.bar for meter in meters))
    if np.diff([0, *cuts, len(sounds)]).min() < least:
        return None
    return Cut(cuts[0], cuts[1], " and ".join(dict.fromkeys(places)))


def _silence_ends(sounds: np.ndarray, steps_per_beat: int) -> np.ndarray:
    """The first sounding step after every rest of a beat or more."""
    sounding = np.flatnonzero(sounds)
    return sounding[1:][np.diff(sounding) > steps_per_beat]


def _nearest_bar(step: float, meters: Sequence[Meter]) -> int:
    meter = max((m for m in meters if m.start <= step), key=lambda m: m.start, default=meters[0])
    return round(meter.start + meter.bar * round((step - meter.start) / meter.bar))
