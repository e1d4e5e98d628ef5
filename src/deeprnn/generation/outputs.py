"""What generation returns: Music and Text, with their one way to be saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deeprnn.data.text import END
from deeprnn.errors import UserError
from deeprnn.files import write_atomically

FORMATS = ("mid", "wav", "png")


@dataclass(frozen=True)
class Music:
    """Sampled pieces with what is needed to hear and see them."""

    pieces: list[np.ndarray]  # (T, K) uint8 each, the primer first where it was kept
    probabilities: list[np.ndarray] = field(
        default_factory=list
    )  # (T, K) each, what the notes were drawn from
    primer: int = 0  # frames at the beginning that were given, not sampled
    steps_per_beat: int = 4
    low: int = 21
    tempo: float = 90.0
    program: int = 0
    title: str = ""
    seed: int = 0
    temperature: float = 1.0
    seconds: float = 0.0  # that sampling took

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def sampled(self) -> list[np.ndarray]:
        """The pieces without their primer."""
        return [piece[self.primer :] for piece in self.pieces]

    @property
    def silent(self) -> list[int]:
        """Which pieces hold no note that was sampled, by their index."""
        return [index for index, piece in enumerate(self.sampled) if not piece.any()]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.pieces)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.pieces[index]

    def midi(self, index: int = 0) -> bytes:
        """One piece as a MIDI file."""
        from deeprnn.render import midi_bytes

        return midi_bytes(
            self.pieces[index], tempo=self.tempo, program=self.program, steps_per_beat=self.steps_per_beat,
            low=self.low, title=self.title,
        )  # fmt: skip

    def wav(self, index: int = 0, rate: int = 44100) -> bytes:
        """One piece as a WAV file."""
        from deeprnn.render import synthesise, wav_bytes

        sound = synthesise(
            self.pieces[index], tempo=self.tempo, program=self.program, steps_per_beat=self.steps_per_beat,
            low=self.low, rate=rate,
        )  # fmt: skip
        return wav_bytes(sound, rate)

    def png(self, index: int = 0, dpi: int = 150) -> bytes:
        """One piece as a picture, the model's probabilities glowing under the notes."""
        from deeprnn.render.pianoroll import pianoroll_png

        number = f" · piece {index + 1}" if len(self) > 1 else ""
        return pianoroll_png(
            self.pieces[index],
            probabilities=self.probabilities[index] if self.probabilities else None,
            primer=self.primer,
            steps_per_beat=self.steps_per_beat,
            low=self.low,
            title=self.title,
            subtitle=f"seed {self.seed}{number} · temperature {self.temperature:g}",
            dpi=dpi,
        )

    def save(self, stem: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
        """Write STEM.mid, STEM.wav and STEM.png; several pieces are numbered STEM-1, STEM-2, …"""
        for name in formats:
            if name not in FORMATS:
                raise UserError(f"music is saved as {', '.join(FORMATS)}, not {name!r}")
        makers = {"mid": self.midi, "wav": self.wav, "png": self.png}
        written = []
        for index, path in enumerate(numbered(stem, len(self))):
            for name in formats:
                place = path.with_name(f"{path.name}.{name}")
                write_atomically(place, makers[name](index))
                written.append(place)
        return written


@dataclass(frozen=True)
class Text:
    """Sampled texts."""

    texts: list[str]  # the primer first where it was kept
    ids: list[np.ndarray] = field(default_factory=list)  # the sampled symbols alone
    primer: int = 0  # characters at the beginning that were given, not sampled
    kind: str = "char"
    seed: int = 0
    temperature: float = 1.0
    seconds: float = 0.0  # that sampling took

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def sampled(self) -> list[np.ndarray]:
        """The ids of what was sampled, the primer not among them."""
        return self.ids

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def __str__(self) -> str:
        return "\n\n".join(self.texts)

    def save(self, stem: str | Path) -> list[Path]:
        """Write STEM.txt; several texts are numbered STEM-1.txt, STEM-2.txt, …"""
        written = []
        plain = str(stem).removesuffix(".txt")
        for text, path in zip(self.texts, numbered(plain, len(self)), strict=True):
            place = path.with_name(f"{path.name}.txt")
            write_atomically(place, text)
            written.append(place)
        return written


def numbered(stem: str | Path, count: int) -> list[Path]:
    """The stem itself for one work, else numbered stems of like width."""
    stem = Path(stem)
    if not stem.name:
        raise UserError(f"{str(stem)!r} names a folder: add the beginning of a file name, as in out/chorale")
    if count == 1:
        return [stem]
    width = len(str(count))
    return [stem.with_name(f"{stem.name}-{number:0{width}d}") for number in range(1, count + 1)]


def spell(
    ids: Iterable[int], vocabulary: Sequence[str], kind: str, after: Sequence[int] | np.ndarray = ()
) -> Iterator[str]:
    """Symbols as text, piece by piece: characters as they are, words with spaces and line ends between."""
    if kind == "char":
        yield from (vocabulary[int(i)] for i in ids)
        return
    fresh = not len(after) or vocabulary[int(after[-1])] == END  # at the beginning of a line
    for i in ids:
        word = vocabulary[int(i)]
        yield "\n" if word == END else word if fresh else f" {word}"
        fresh = word == END
