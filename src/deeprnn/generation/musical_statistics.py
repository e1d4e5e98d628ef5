"""What a musician would count in a piece, so that a model's music can stand beside the music it learned from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from deeprnn.data.music import Grid, MusicData
    from deeprnn.generation.copy_check import Corpus

CONSONANT = (0, 3, 4, 5, 7, 8, 9)
"""semitones, octaves taken off: unison, thirds, fourth, fifth, sixths"""
COPIED_BEATS = 8
"""a passage as long as two bars of four beats, frame for frame, counts as copied"""


class Shown(NamedTuple):
    """How a statistic is called and written."""

    name: str
    format: str


SHOWN = {
    "notes_at_once": Shown("notes sounding at once", "{:.2f}"),
    "silence": Shown("silent frames", "{:.0%}"),
    "short_notes": Shown("notes no longer than an eighth", "{:.0%}"),
    "consonant": Shown("consonant intervals between voices", "{:.0%}"),
    "repeated_chords": Shown("beats that repeat the chord before", "{:.0%}"),
    "copied": Shown("frames copied from the training data", "{:.0%}"),
}
"""by field of `MusicalStatistics`, in the order in which they are shown"""


@dataclass(frozen=True)
class MusicalStatistics:
    """Of some pieces together; None where nothing could be counted."""

    notes_at_once: float | None
    """on average, where anything sounds"""
    silence: float | None
    short_notes: float | None
    """a note is a key held over frames; repeated notes that a roll does not part count as one"""
    consonant: float | None
    """of the intervals between a voice and the next one above it"""
    repeated_chords: float | None
    """of the beats at which something sounds, those with the notes of the beat before"""
    copied: float | None = None
    """of the frames, those inside a passage of eight beats that stands in the training data"""

    def text(self, name: str) -> str:
        """The statistic of a name for a person: "3.91", "84 %", or a dash."""
        value = getattr(self, name)
        return "-" if value is None else SHOWN[name].format.format(value).replace("%", " %")


def musical_statistics(
    pieces: Iterable[np.ndarray], grid: Grid, training: Corpus | None = None
) -> MusicalStatistics:
    """Count in rolls (T, pitches); with the training data, how much stands in it note for note."""
    rolls = [np.asarray(piece) != 0 for piece in pieces]
    sounding = np.concatenate([roll.sum(1) for roll in rolls]) if rolls else np.zeros(0)
    return MusicalStatistics(
        notes_at_once=_mean(sounding[sounding > 0]),
        silence=_mean(sounding == 0),
        short_notes=_mean(np.concatenate([_durations(roll) for roll in rolls]) <= grid.steps_per_beat / 2)
        if rolls
        else None,
        consonant=_mean(np.isin(_intervals(rolls) % 12, CONSONANT)),
        repeated_chords=_mean(_repeats(rolls, grid.steps_per_beat)),
        copied=None if training is None else _copied(rolls, training, COPIED_BEATS * grid.steps_per_beat),
    )


def compare_with_data(
    samples: Iterable[np.ndarray], data: MusicData
) -> tuple[MusicalStatistics, MusicalStatistics]:
    """Statistics of samples, and of pieces that the model has not seen."""
    from deeprnn.data.music import Grid
    from deeprnn.generation.copy_check import Corpus

    training = Corpus(data.splits["train"])
    unseen = next(data.splits[name] for name in ("test", "valid", "train") if len(data.splits.get(name, ())))
    grid = data.grid or Grid()
    return musical_statistics(samples, grid, training), musical_statistics(unseen, grid, training)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


def _durations(roll: np.ndarray) -> np.ndarray:
    """Frames for which each note of a roll is held."""
    edges = np.diff(np.pad(roll.astype(np.int8), ((1, 1), (0, 0))), axis=0)  # (T + 1, pitches)
    begins, ends = (np.argwhere(sign == edges.T) for sign in (1, -1))  # by pitch, then by time: they pair up
    return ends[:, 1] - begins[:, 1]


def _intervals(rolls: Sequence[np.ndarray]) -> np.ndarray:
    """Semitones from every sounding note to the next one above it in its frame."""
    steps = []
    for roll in rolls:
        frame, pitch = np.nonzero(roll)  # by frame, then by pitch
        together = frame[1:] == frame[:-1]
        steps.append((pitch[1:] - pitch[:-1])[together])
    return np.concatenate(steps) if steps else np.zeros(0, np.int64)


def _repeats(rolls: Sequence[np.ndarray], steps: int) -> np.ndarray:
    """For each beat but a piece's first at which something sounds: whether its notes are those of the beat before."""
    repeats = []
    for roll in rolls:
        beats = roll[::steps]
        sounds = beats[1:].any(1)
        repeats.append((beats[1:] == beats[:-1]).all(1)[sounds])
    return np.concatenate(repeats) if repeats else np.zeros(0, bool)


def _copied(rolls: Sequence[np.ndarray], training: Corpus, length: int) -> float | None:
    """The share of frames that lie in a window of `length` frames which the training data holds."""
    covered = total = 0
    for roll in rolls:
        marks = np.zeros(len(roll) + 1, np.int64)
        for start in training.shared_windows(roll, length):
            marks[start] += 1
            marks[min(start + length, len(roll))] -= 1
        covered, total = covered + int((np.cumsum(marks[:-1]) > 0).sum()), total + len(roll)
    return covered / total if total else None
