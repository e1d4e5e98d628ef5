"""MIDI files as songs, read by symusic: time in beats, so tempo changes alter nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.cutting import Meter
from deeprnn.data.limits import read_bytes
from deeprnn.data.music import Grid
from deeprnn.data.quantise import render
from deeprnn.data.song import Song
from deeprnn.errors import UserError, need

SUFFIXES = (".mid", ".midi", ".kar")


def read_midi(path: Path, grid: Grid | None = None, drums: bool = False) -> Song:
    """The piano roll of a MIDI file; `drums` keeps channel 10 as pitches instead of dropping it."""
    return midi_bytes_to_song(read_bytes(path), grid or Grid(), drums=drums, what=str(path))


def midi_bytes_to_song(
    data: bytes, grid: Grid | None = None, *, drums: bool = False, what: str = "MIDI data"
) -> Song:
    """A MIDI file's bytes as a song; a damaged file is a `UserError` with the reason."""
    grid = grid or Grid()
    symusic = need("symusic", extra="midi")
    header = _header(data, what)
    per_beat = int.from_bytes(data[12:14], "big")
    try:
        scores = [symusic.Score.from_midi(part) for part in (_single_tracks(data) if header == 2 else [data])]
        songs = [[(track.is_drum, track.notes.numpy()) for track in score.tracks] for score in scores]
        tempo_changes = sum(max(0, len(score.tempos) - 1) for score in scores)
        meters = _meters(scores[0].time_signatures if len(scores) == 1 else (), grid, per_beat)
        del scores  # as large as all that is kept of it
    except (RuntimeError, ValueError, MemoryError, OverflowError) as error:
        raise UserError(f"{what} is not a readable MIDI file: {error}") from error
    ons = _note_ons(data)
    tracks = [(is_drum, len(notes["time"])) for song in songs for is_drum, notes in song]
    onset, end, pitch = _join([[notes for is_drum, notes in song if drums or not is_drum] for song in songs])
    del songs
    roll, losses = render(onset, end, pitch, grid, what, per_beat, file_size=len(data))
    losses.drums = sum(count for is_drum, count in tracks if is_drum and not drums)
    losses.notes += losses.drums
    if ons is not None:
        losses.unclosed = max(0, sum(ons) - losses.notes)
        losses.notes += losses.unclosed
    remarks = _remarks(header, ons or [1] * len(tracks), tempo_changes)
    return Song(roll, losses, meters, remarks)


def _remarks(kind: int, notes: Sequence[int], tempo_changes: int) -> tuple[str, ...]:
    """What a report says of a file of that MIDI type, with so many notes in each track."""
    remarks = []
    if kind == 2:  # independent tracks
        remarks.append(f"type 2: {len(notes)} tracks laid one after another")
    if empty := sum(count == 0 for count in notes):
        remarks.append(f"{empty} of {len(notes)} tracks are empty")
    if tempo_changes:
        remarks.append(f"{tempo_changes} tempo changes (the grid follows beats)")
    return tuple(remarks)


def _header(data: bytes, what: str) -> int:
    if data[:4] != b"MThd" or len(data) < 14:
        raise UserError(f"{what} is not a MIDI file: it does not begin with a MIDI header")
    if data[12] & 0x80:
        raise UserError(f"{what} counts time in SMPTE frames, not beats: convert it to ticks per quarter")
    if data[12:14] == b"\0\0":
        raise UserError(f"{what} has a time division of 0 ticks per beat; it must be positive")
    kind = int.from_bytes(data[8:10], "big")
    if kind > 2:
        raise UserError(f"{what} is of MIDI type {kind}; types 0, 1 and 2 exist")
    return kind


def _meters(signatures: Iterable[Any], grid: Grid, per_beat: int) -> tuple[Meter, ...]:
    """Where bars begin, from a file's time signatures: four beats each where it has none."""
    steps = grid.steps_per_beat
    meters = [
        Meter(s.time * steps / per_beat, steps * 4 * s.numerator / s.denominator)
        for s in signatures
        if s.numerator > 0 and s.denominator > 0
    ]
    return tuple(meters) or (Meter(0, 4 * steps),)


def _single_tracks(data: bytes) -> list[bytes]:
    """Each track as a file of its own: the parser divides a track by channels, whose notes belong together."""
    head = b"MThd\0\0\0\6\0\0\0\1" + data[12:14]
    files, at = [], 8 + int.from_bytes(data[4:8], "big")
    while at + 8 <= len(data) and len(files) < 0xFFFF:  # the header can count no more
        stop = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
        if data[at : at + 4] == b"MTrk":
            files.append(head + data[at:stop])
        at = stop
    return files


def _join(songs: list[list[dict[str, np.ndarray]]]) -> tuple[np.ndarray, ...]:
    """Onsets, ends and pitches of all notes: a song's tracks together, the songs one after another."""
    onsets, ends, pitches, shift = [], [], [], 0
    for tracks in songs:
        last = shift
        for notes in tracks:
            onset = notes["time"].astype(np.int64) + shift
            end = onset + notes["duration"].astype(np.int64)
            onsets.append(onset)
            ends.append(end)
            pitches.append(notes["pitch"].astype(np.int16))
            last = max(last, int(end.max(initial=0)))
        shift = last
    empty = [np.zeros(0, np.int64)]
    return tuple(np.concatenate(parts or empty) for parts in (onsets, ends, pitches))


def _note_ons(data: bytes) -> list[int] | None:
    """How many notes begin in each track, counted event by event; None where the bytes do not add up.

    The parser leaves out a note that never ends; comparing with this count shows that it did.
    """
    counts, at = [], 8 + int.from_bytes(data[4:8], "big")
    try:
        while at + 8 <= len(data):
            size = int.from_bytes(data[at + 4 : at + 8], "big")
            if data[at : at + 4] == b"MTrk":
                counts.append(_track_note_ons(data, at + 8, min(at + 8 + size, len(data))))
            at += 8 + size
    except IndexError:
        return None
    return counts


def _track_note_ons(data: bytes, at: int, stop: int) -> int:
    count, status = 0, 0
    while at < stop:
        while data[at] & 0x80:  # delta time
            at += 1
        at += 1
        if data[at] & 0x80:
            status = data[at]
            at += 1
        if status >= 0xF0:  # meta or system exclusive: a length, then that many bytes
            if status == 0xFF:
                if data[at] == 0x2F:
                    return count
                at += 1
            length = 0
            while data[at] & 0x80:
                length = length << 7 | data[at] & 0x7F
                at += 1
            at += 1 + (length << 7 | data[at])
            status = 0
        elif status >= 0x80:
            kind = status & 0xF0
            count += kind == 0x90 and data[at + 1] > 0
            at += 1 if kind in (0xC0, 0xD0) else 2
        else:
            raise IndexError(at)  # data before any status byte
    return count
