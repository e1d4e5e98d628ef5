"""A small additive synthesiser in numpy: decaying partials, a soft attack, a room.

A partial is a damped oscillation Re(c·exp(s·n)), s = iω − d. Split n = kB + j and it factors into
exp(skB)·exp(sj), so that a whole note, all partials together, is one small matrix product
instead of millions of sines.
"""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass

import numpy as np

from deeprnn.render.midi import check_playing
from deeprnn.render.notes import Note, held_notes

BLOCK = 512  # samples to a row of the matrix product
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


def timbre_of(program: int) -> Timbre:
    """The nearest of our timbres to a General MIDI program."""
    if 16 <= program <= 23:
        return TIMBRES["organ"]
    if 24 <= program <= 39:
        return TIMBRES["guitar"]
    if 40 <= program <= 103:
        return TIMBRES["strings"]
    return TIMBRES["piano"]


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
    check_playing(tempo, program)
    timbre = timbre_of(program)
    seconds_per_frame = 60.0 / tempo / steps_per_beat
    tail = timbre.release + 1.2
    sound = np.zeros((2, round((len(frames) * seconds_per_frame + tail) * rate)), np.float32)
    tones: dict[tuple[int, int], np.ndarray] = {}
    for note in sorted(held_notes(frames, low, steps_per_beat), key=lambda n: -n.length):
        first = round(note.start * seconds_per_frame * rate)
        held = round((note.start + note.length) * seconds_per_frame * rate) - first
        key = (note.pitch, note.velocity // 8)
        # The longest note of a key comes first and the shorter ones are its beginning.
        if key not in tones:
            tones[key] = _tone(note, held + round(timbre.release * rate), timbre, rate)
        played = _shape(tones[key], held, timbre, rate)
        sound[:, first : first + played.shape[1]] += played
    _add_room(sound, timbre.room, rate)
    peak = float(np.abs(sound).max(initial=0.0))
    if peak > 0:
        sound *= PEAK / peak
    return np.ascontiguousarray(sound.T)


def wav_bytes(sound: np.ndarray, rate: int = 44100) -> bytes:
    """Sound (N,) or (N, channels) within ±1 as the bytes of a 16-bit WAV file."""
    sound = sound[:, None] if sound.ndim == 1 else sound
    samples = np.rint(np.clip(sound, -1, 1) * 32767).astype("<i2")
    with io.BytesIO() as buffer:
        with wave.open(buffer, "wb") as file:
            file.setnchannels(sound.shape[1])
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(samples.tobytes())
        return buffer.getvalue()


def _tone(note: Note, samples: int, timbre: Timbre, rate: int) -> np.ndarray:
    """The sound of a key that is never let go, (2, samples)."""
    harmonic = np.arange(1, len(timbre.partials) + 1)
    pitch_hz = 440.0 * 2.0 ** ((note.pitch - 69) / 12)
    loudness = (note.velocity // 8 * 8 + 4) / 127
    # A harder stroke is brighter, a higher key duller: each bends the roll-off of the harmonics.
    bend = harmonic ** (-0.9 * (1 - loudness) - max(0, note.pitch - 60) / 40)
    gain = np.array(timbre.partials) * bend * loudness**1.6 * 2.0 ** ((60 - note.pitch) / 60)
    decay = np.zeros(len(harmonic))
    if timbre.decay:  # high keys and high harmonics die sooner
        seconds = timbre.decay * 2.0 ** ((60 - note.pitch) / 14) / (1 + 0.35 * (harmonic - 1))
        decay = np.log(1000.0) / seconds
    position = float(np.clip((note.pitch - 62) / 60, -0.35, 0.35))  # bass left, treble right
    channels = []
    for side in (-1, 1):
        # Two strings a little apart: the first speaks and fades, the second rings on behind it.
        s, weight = [], []
        for cents, share, fade in ((side * timbre.detune / 2, 0.7, 1.5), (-side * timbre.detune, 0.4, 0.6)):
            hz = pitch_hz * harmonic * np.sqrt(1 + timbre.stretch * harmonic**2) * 2 ** (cents / 1200)
            audible = hz < 0.45 * rate  # what lies above would fold back as noise
            s.append((2j * np.pi * hz - fade * decay)[audible] / rate)
            # Sines start near zero; phases that differ between the ears widen the image.
            phase = np.exp(1j * (side * 0.4 * harmonic - np.pi / 2))
            weight.append((share * gain * (1 + side * position) * phase)[audible])
        channels.append(_damped(np.concatenate(s), np.concatenate(weight), samples))
    return np.stack(channels)


def _damped(s: np.ndarray, weight: np.ndarray, samples: int) -> np.ndarray:
    """Σ_p Re(weight_p·exp(s_p·n)) for n = 0..samples-1, as one product (blocks, 2P) @ (2P, BLOCK)."""
    row = np.exp(np.outer(np.arange(0, samples, BLOCK), s)) * weight  # (blocks, P)
    column = np.exp(np.outer(s, np.arange(BLOCK)))  # (P, BLOCK)
    a = np.concatenate([np.real(row), -np.imag(row)], axis=1).astype(np.float32)
    b = np.concatenate([np.real(column), np.imag(column)]).astype(np.float32)
    return (a @ b).reshape(-1)[:samples]


def _shape(tone: np.ndarray, held: int, timbre: Timbre, rate: int) -> np.ndarray:
    """Cut a tone to a note with a smooth beginning and end: a corner would click."""
    attack = max(1, round(timbre.attack * rate))
    release = max(1, round(timbre.release * rate))
    note = tone[:, : held + release].copy()
    rise = min(attack, note.shape[1])
    note[:, :rise] *= np.sin(np.linspace(0, np.pi / 2, rise, dtype=np.float32)) ** 2
    fall = note.shape[1] - held
    note[:, held:] *= np.cos(np.linspace(0, np.pi / 2, fall, dtype=np.float32)) ** 4
    return note


def _add_room(sound: np.ndarray, amount: float, rate: int, seconds: float = 1.1) -> None:
    """Add a small hall: the sound convolved with decaying noise, a different one for each ear."""
    if amount <= 0 or not sound.any():
        return
    n = round(seconds * rate)
    rng = np.random.default_rng(1)
    time = np.arange(n) / rate
    response = rng.standard_normal((2, n)) * np.exp(-6.0 * time / seconds) * (time > 0.012)
    # The walls swallow high tones: a short running mean darkens the echo.
    width = max(1, rate // 6000)
    response = np.stack([np.convolve(side, np.ones(width) / width, "same") for side in response])
    response /= np.sqrt((response**2).sum(axis=1, keepdims=True))
    step = 1 << n.bit_length()
    size = step * 2  # n < step, so that a block's echo ends within two
    spectrum = np.fft.rfft(response.astype(np.float32), size)
    echo = np.zeros((2, sound.shape[1] + size), np.float32)
    for first in range(0, sound.shape[1], step):
        block = np.fft.rfft(sound[:, first : first + step], size)
        echo[:, first : first + size] += np.fft.irfft(block * spectrum, size).astype(np.float32)
    sound += amount * echo[:, : sound.shape[1]]
