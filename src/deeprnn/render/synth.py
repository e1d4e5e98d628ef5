"""A small additive synthesiser in numpy: decaying partials, a soft attack, a room.

A partial is a damped oscillation Re(c·exp(s·n)), s = iω − d. Split n = kR + j and it factors into
exp(skR)·exp(sj), so that a note, all partials together, is one small matrix product instead of
millions of sines. A piece is made in blocks of about a second, each from the notes that sound in it:
beside the sound itself, memory holds one block, however many notes there are.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deeprnn.render.midi import check_playing
from deeprnn.render.notes import held_notes

ROW = 512  # samples to a row of the matrix product
ECHO = 1.1  # seconds of the room's
PEAK = 0.89  # -1 dB: converters downstream keep some headroom


@dataclass(frozen=True)
class Timbre:
    """What tells one instrument from another."""

    partials: tuple[float, ...]  # amplitudes of the harmonics
    decay: float  # seconds to fall by 60 dB at middle C, first harmonic; 0: sustained
    attack: float = 0.006
    release: float = 0.16
    stretch: float = 0.0  # inharmonicity: strings are stiff
    detune: float = 0.7  # cents between left and right
    room: float = 0.22


TIMBRES = {
    "piano": Timbre((1.0, 0.55, 0.32, 0.20, 0.13, 0.09, 0.05, 0.035, 0.02, 0.012), decay=7.0, stretch=2.2e-4),
    "organ": Timbre((1.0, 0.75, 0.30, 0.42, 0.06, 0.16, 0.03, 0.14), 0.0, 0.035, 0.14, detune=1.6, room=0.34),
    "strings": Timbre((1.0, 0.5, 0.36, 0.22, 0.16, 0.1, 0.07, 0.04), 0.0, 0.09, 0.28, detune=4.0, room=0.34),
    "guitar": Timbre((1.0, 0.62, 0.45, 0.25, 0.12, 0.1, 0.05, 0.03), 3.0, 0.004, 0.12, stretch=6e-5),
}


def timbre_name(program: int) -> str:
    """The nearest of our timbres to a General MIDI program."""
    if 16 <= program <= 23:
        return "organ"
    if 24 <= program <= 39:
        return "guitar"
    return "strings" if 40 <= program <= 103 else "piano"


def synthesise(
    frames: np.ndarray,
    *,
    tempo: float = 90.0,
    program: int = 0,
    steps_per_beat: int = 4,
    low: int = 21,
    rate: int = 44100,
) -> np.ndarray:
    """A piano roll as stereo sound (N, 2) float32 within ±0.89; the room rings out at the end."""
    piece = Synthesis(frames, tempo=tempo, program=program, steps_per_beat=steps_per_beat, low=low, rate=rate)
    for _ in piece.blocks():
        pass
    return piece.sound()


class Synthesis:
    """A piece that is rendered block by block, for a caller that may stop between two of them."""

    def __init__(
        self,
        frames: np.ndarray,
        *,
        tempo: float = 90.0,
        program: int = 0,
        steps_per_beat: int = 4,
        low: int = 21,
        rate: int = 44100,
    ) -> None:
        check_playing(tempo, program)
        self.timbre, self.rate = TIMBRES[timbre_name(program)], rate
        notes = sorted(held_notes(frames, low, steps_per_beat))
        per_frame = 60.0 / tempo / steps_per_beat
        table = np.array([(n.start, n.start + n.length, n.pitch, n.velocity) for n in notes]).reshape(-1, 4)
        on, off = np.rint(table[:, :2].T * per_frame * rate).astype(np.int64)
        self._on, self._lengths = on, off - on  # samples
        self._keys = [(int(pitch), int(velocity) // 8) for pitch, velocity in table[:, 2:]]
        self._release = max(1, round(self.timbre.release * rate))
        self._attack = max(1, round(self.timbre.attack * rate))
        self.seconds = len(frames) * per_frame
        self._partials: dict[tuple[int, int], _Partials] = {}
        self._sound: np.ndarray | None = None

    @property
    def note_seconds(self) -> float:
        """How long all notes sound together: the work, apart from the room's."""
        return float(self._lengths.sum() + len(self._lengths) * self._release) / self.rate

    def blocks(self) -> Iterator[None]:
        """Render; comes back to the caller after every block."""
        ringing = self.timbre.release + 1.2
        self._sound = sound = np.zeros((round((self.seconds + ringing) * self.rate), 2), np.float32)
        room = _Room(self.timbre.room, self.rate)
        for first in range(0, len(sound), room.step):
            dry = np.zeros((2, room.step), np.float32)
            self._play(first, dry)
            block = sound[first : first + room.step]
            block[:] = room.echo(dry).T[: len(block)]
            yield

    def sound(self) -> np.ndarray:
        """What was rendered, (N, 2), at full loudness."""
        assert self._sound is not None, "the blocks come first"
        peak = max(float(self._sound.max(initial=0.0)), -float(self._sound.min(initial=0.0)))
        if peak > 0:
            self._sound *= PEAK / peak
        return self._sound

    def _play(self, first: int, block: np.ndarray) -> None:
        """Add to a block (2, n) the parts of all notes that fall into it."""
        last = first + block.shape[1]
        end = self._on + self._lengths + self._release
        for i in np.flatnonzero((self._on < last) & (end > first)).tolist():
            start, stop = max(first, int(self._on[i])), min(last, int(end[i]))
            key = self._keys[i]
            if key not in self._partials:
                self._partials[key] = _Partials.of(*key, self.timbre, self.rate)
            part = self._partials[key].sound(start - int(self._on[i]), stop - start)
            self._shape(part, start - int(self._on[i]), int(self._lengths[i]))
            block[:, start - first : stop - first] += part

    def _shape(self, part: np.ndarray, at: int, length: int) -> None:
        """Give a note, seen from its sample `at` on, a smooth beginning and end: a corner would click."""
        rise = min(self._attack, length + self._release)
        if at < rise:
            angle = np.linspace(0, np.pi / 2, rise, dtype=np.float32)[at : at + part.shape[1]]
            part[:, : len(angle)] *= np.sin(angle) ** 2
        if at + part.shape[1] > length:
            skipped = max(0, at - length)
            angle = np.linspace(0, np.pi / 2, self._release, dtype=np.float32)[skipped:]
            angle = angle[: at + part.shape[1] - length - skipped]
            part[:, part.shape[1] - len(angle) :] *= np.cos(angle) ** 4


@dataclass(frozen=True)
class _Partials:
    """The oscillations of a key that is never let go: exponents and weights (2, P), left and right."""

    s: np.ndarray
    weight: np.ndarray
    column: np.ndarray  # (2, 2P, ROW): exp(s·j), real parts over imaginary ones

    @classmethod
    def of(cls, pitch: int, velocity: int, timbre: Timbre, rate: int) -> _Partials:
        """By pitch and velocity, the latter in eighths."""
        harmonic = np.arange(1, len(timbre.partials) + 1)
        pitch_hz = 440.0 * 2.0 ** ((pitch - 69) / 12)
        loudness = (velocity * 8 + 4) / 127
        # A harder stroke is brighter, a higher key duller: each bends the roll-off of the harmonics.
        bend = harmonic ** (-0.9 * (1 - loudness) - max(0, pitch - 60) / 40)
        gain = np.array(timbre.partials) * bend * loudness**1.6 * 2.0 ** ((60 - pitch) / 60)
        decay = np.zeros(len(harmonic))
        if timbre.decay:  # high keys and high harmonics die sooner
            seconds = timbre.decay * 2.0 ** ((60 - pitch) / 14) / (1 + 0.35 * (harmonic - 1))
            decay = math.log(1000.0) / seconds
        position = float(np.clip((pitch - 62) / 60, -0.35, 0.35))  # bass left, treble right
        s, weight = [], []
        for side in (-1, 1):
            # Two strings a little apart: the first speaks and fades, the second rings on behind it.
            for cents, share, fade in (
                (side * timbre.detune / 2, 0.7, 1.5),
                (-side * timbre.detune, 0.4, 0.6),
            ):
                hz = pitch_hz * harmonic * np.sqrt(1 + timbre.stretch * harmonic**2) * 2 ** (cents / 1200)
                audible = hz < 0.45 * rate  # what lies above would fold back as noise
                s.append((2j * np.pi * hz - fade * decay) / rate)
                # Sines start near zero; phases that differ between the ears widen the image.
                phase = np.exp(1j * (side * 0.4 * harmonic - np.pi / 2))
                weight.append(share * gain * (1 + side * position) * phase * audible)
        s, weight = np.reshape(s, (2, -1)), np.reshape(weight, (2, -1))
        turns = np.exp(s[:, :, None] * np.arange(ROW))
        return cls(s, weight, np.concatenate([np.real(turns), np.imag(turns)], axis=1).astype(np.float32))

    def sound(self, first: int, samples: int) -> np.ndarray:
        """Σ_p Re(weight_p·exp(s_p·n)) for n = first .. first+samples-1, as (rows, 2P) @ (2P, ROW) for each ear."""
        begin = first // ROW * ROW
        rows = np.arange(begin, first + samples, ROW)
        turns = np.exp(self.s[:, None, :] * rows[:, None]) * self.weight[:, None, :]  # (2, rows, P)
        row = np.concatenate([np.real(turns), -np.imag(turns)], axis=2).astype(np.float32)
        return (row @ self.column).reshape(2, -1)[:, first - begin : first - begin + samples]


class _Room:
    """A small hall: the sound convolved with decaying noise, a different one for each ear."""

    def __init__(self, amount: float, rate: int) -> None:
        self.amount = amount
        n = round(ECHO * rate)
        self.step = 1 << n.bit_length()  # samples to a block: more than the echo is long
        time = np.arange(n) / rate
        noise = np.random.default_rng(1).standard_normal((2, n))
        response = noise * np.exp(-6.0 * time / ECHO) * (time > 0.012)
        # The walls swallow high tones: a short running mean darkens the echo.
        width = max(1, rate // 6000)
        response = np.stack([np.convolve(side, np.ones(width) / width, "same") for side in response])
        response /= np.sqrt((response**2).sum(axis=1, keepdims=True))
        self._spectrum = np.fft.rfft(response.astype(np.float32), 2 * self.step)
        self._tail = np.zeros((2, self.step), np.float32)  # what the blocks so far still send into the next

    def echo(self, dry: np.ndarray) -> np.ndarray:
        """The next block (2, step) with its own echo and that of the block before."""
        wet = np.fft.irfft(np.fft.rfft(dry, 2 * self.step) * self._spectrum, 2 * self.step).astype(np.float32)
        out = dry + self.amount * (wet[:, : self.step] + self._tail)
        self._tail = wet[:, self.step :]
        return out


def wav_bytes(sound: np.ndarray, rate: int = 44100) -> bytes:
    """Sound (N,) or (N, channels) within ±1 as the bytes of a 16-bit WAV file."""
    sound = sound[:, None] if sound.ndim == 1 else sound
    with io.BytesIO() as buffer:
        with wave.open(buffer, "wb") as file:
            file.setnchannels(sound.shape[1])
            file.setsampwidth(2)
            file.setframerate(rate)
            file.setnframes(len(sound))
            for first in range(0, len(sound), 1 << 16):  # in parts: only the file itself is held whole
                part = np.clip(sound[first : first + (1 << 16)], -1, 1)
                file.writeframesraw(np.rint(part * 32767).astype("<i2").tobytes())
        return buffer.getvalue()
