"""Standard MIDI files, written by hand: one track, delta times, nothing that needs a library.

Ours and not symusic's writer, which ends a file one tick after its last note: rests at the end would be lost.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np

from deeprnn.errors import UserError
from deeprnn.render.notes import Note, held_notes

TICKS_PER_BEAT = 480


def midi_bytes(
    frames: np.ndarray,
    *,
    tempo: float = 90.0,
    program: int = 0,
    steps_per_beat: int = 4,
    low: int = 21,
    title: str = "",
) -> bytes:
    """A piano roll (T, K) as the bytes of a MIDI file of format 0."""
    check_playing(tempo, program)
    if steps_per_beat < 1:
        raise UserError(f"steps_per_beat={steps_per_beat} must be at least 1")
    notes = held_notes(frames, low, steps_per_beat)
    track = _header_events(tempo, program, title) + _note_events(notes, steps_per_beat, len(frames))
    head = struct.pack(">4sIHHH", b"MThd", 6, 0, 1, TICKS_PER_BEAT)
    return head + struct.pack(">4sI", b"MTrk", len(track)) + track


def check_playing(tempo: float, program: int) -> None:
    """Refuse a tempo that a MIDI file cannot hold or nobody could follow, and programs that do not exist."""
    if not 4 <= tempo <= 1000:
        raise UserError(f"tempo={tempo} beats a minute is out of reach: choose 4 to 1000")
    if not 0 <= program <= 127:
        raise UserError(f"program={program} is no General MIDI program: choose 0 (piano) to 127")


def _header_events(tempo: float, program: int, title: str) -> bytes:
    name = title.encode()
    events = b""
    if name:
        events += b"\x00\xff\x03" + _variable(len(name)) + name
    events += b"\x00\xff\x51\x03" + round(60e6 / tempo).to_bytes(3, "big")
    events += b"\x00\xff\x58\x04\x04\x02\x18\x08"  # 4/4
    return events + bytes([0, 0xC0, program])


def _note_events(notes: list[Note], steps_per_beat: int, frames: int) -> bytes:
    def tick(frame: int) -> int:
        return round(frame * TICKS_PER_BEAT / steps_per_beat)

    events = []  # (tick, on, bytes): at one tick the offs come before the ons
    for note in notes:
        events.append((tick(note.start), 1, bytes([0x90, note.pitch, note.velocity])))
        events.append((tick(note.start + note.length), 0, bytes([0x80, note.pitch, 0])))
    events.sort()
    times = [0, *(time for time, _, _ in events)]
    body = b"".join(
        _variable(after - before) + message
        for (before, after), (_, _, message) in zip(pairwise(times), events, strict=True)
    )
    # The end stands where the roll ends, so that trailing rests survive a round trip.
    return body + _variable(tick(frames) - times[-1]) + b"\xff\x2f\x00"


def _variable(value: int) -> bytes:
    """MIDI's variable-length quantity: seven bits a byte, all but the last marked."""
    out = [value & 0x7F]
    while value := value >> 7:
        out.append(0x80 | value & 0x7F)
    return bytes(reversed(out))
