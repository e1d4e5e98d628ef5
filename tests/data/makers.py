"""Small files made on the spot: MIDI, and mutations of any bytes."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

Event = tuple[int, bytes]  # ticks since the event before, the event's bytes


def variable_length(value: int) -> bytes:
    parts = [value & 0x7F]
    while value := value >> 7:
        parts.append(0x80 | value & 0x7F)
    return bytes(reversed(parts))


def midi_file(tracks: Sequence[Sequence[Event]], *, kind: int = 1, division: int = 480) -> bytes:
    """A MIDI file of these tracks."""
    data = b"MThd" + struct.pack(">IHHH", 6, kind, len(tracks), division)
    for track in tracks:
        body = b"".join(variable_length(wait) + event for wait, event in track) + b"\x00\xff\x2f\x00"
        data += b"MTrk" + struct.pack(">I", len(body)) + body
    return data


def note_track(notes: Sequence[tuple[int, int, int]], channel: int = 0) -> list[Event]:
    """A track of (onset, end, pitch) in ticks."""
    changes = [(onset, 1, pitch) for onset, _, pitch in notes] + [(end, 0, pitch) for _, end, pitch in notes]
    track, now = [], 0
    for time, on, pitch in sorted(changes):
        track.append((time - now, bytes([0x90 | channel, pitch, 80 * on])))
        now = time
    return track


def tempo(microseconds: int) -> bytes:
    return b"\xff\x51\x03" + microseconds.to_bytes(3, "big")


def npz_bytes(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def plain_npz(**arrays: np.ndarray) -> bytes:
    """Without compression, so that a changed byte reaches the array readers and not only zip's checksum."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


@st.composite
def mutations(draw: st.DrawFn, original: bytes) -> bytes:
    """The original with a few bytes changed, cut out, repeated or put in."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["set", "cut", "insert", "truncate", "repeat"])):
            case "set" if data:
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFE, 0xFF]) | st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 12))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=12))
            case "truncate":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)
