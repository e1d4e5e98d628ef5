"""MIDI: where notes land on the grid, and that what the grid loses is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deeprnn.data.midi import Grid, midi_bytes_to_song
from deeprnn.data.quantise import render
from deeprnn.data.transposing import key_of, to_common_tonic, transpose
from deeprnn.errors import UserError
from tests.data.makers import midi_file, mutations, note_track, tempo

pytest.importorskip("symusic")
Q = 480  # ticks per beat in these files


def sounding(song, grid=None):
    """{MIDI number: steps where it sounds}."""
    grid = grid or Grid()
    return {
        int(p) + grid.low: np.flatnonzero(song.roll[:, p]).tolist() for p in np.flatnonzero(song.roll.any(0))
    }


def test_notes_land_on_their_steps():
    song = midi_bytes_to_song(midi_file([note_track([(0, Q, 60), (Q, 2 * Q, 64)])]))
    assert sounding(song) == {60: [0, 1, 2, 3], 64: [4, 5, 6, 7]}
    assert song.roll.shape == (8, 88)
    assert song.losses.notes == 2
    assert str(song.losses) == "nothing lost"


@pytest.mark.parametrize(("steps", "frames"), [(1, 2), (2, 4), (4, 8), (12, 24)])
def test_grid_per_beat(steps, frames):
    data = midi_file([note_track([(0, 2 * Q, 60)])])
    assert len(midi_bytes_to_song(data, Grid(steps_per_beat=steps)).roll) == frames


def test_off_grid_notes_move_to_the_nearest_step_and_are_counted():
    song = midi_bytes_to_song(midi_file([note_track([(50, Q + 70, 60), (2 * Q, 3 * Q, 62)])]))
    assert sounding(song)[60] == [0, 1, 2, 3, 4]  # 50 -> step 0; 550 ticks is 4.58 steps -> 5
    assert song.losses.moved == 1


def test_a_grace_note_keeps_one_step():
    song = midi_bytes_to_song(midi_file([note_track([(0, 10, 60)])]))
    assert sounding(song) == {60: [0]}
    assert song.losses.lengthened == 1


def test_overlapping_notes_of_one_pitch_merge_and_repeats_join():
    tracks = [note_track([(0, Q, 60)]), note_track([(Q // 2, 2 * Q, 60)]), note_track([(2 * Q, 3 * Q, 60)])]
    song = midi_bytes_to_song(midi_file(tracks))
    assert sounding(song) == {60: list(range(12))}
    assert (song.losses.merged, song.losses.joined) == (1, 1)


def test_notes_outside_the_range_are_dropped_and_counted():
    data = midi_file([note_track([(0, Q, 20), (0, Q, 21), (0, Q, 108), (0, Q, 109)])])
    song = midi_bytes_to_song(data)
    assert set(sounding(song)) == {21, 108}
    assert (song.losses.out_of_range, song.losses.dropped) == (2, 2)
    assert midi_bytes_to_song(data, Grid(low=0, high=127)).losses.out_of_range == 0


def test_drums_are_dropped_or_kept():
    data = midi_file([note_track([(0, Q, 60)]), note_track([(0, Q, 36), (Q, 2 * Q, 38)], channel=9)])
    dropped, kept = midi_bytes_to_song(data), midi_bytes_to_song(data, drums=True)
    assert set(sounding(dropped)) == {60}
    assert (dropped.losses.drums, dropped.losses.notes) == (2, 3)
    assert set(sounding(kept)) == {36, 38, 60}
    assert kept.losses.drums == 0


def test_tempo_changes_do_not_move_beats():
    track = [(0, tempo(500_000)), *note_track([(0, Q, 60)]), (0, tempo(250_000)), *note_track([(0, Q, 64)])]
    song = midi_bytes_to_song(midi_file([track], kind=0))
    assert sounding(song) == {60: [0, 1, 2, 3], 64: [4, 5, 6, 7]}
    assert song.remarks == ("1 tempo changes (the grid follows beats)",)


def test_types_zero_and_one_sound_together_and_two_one_after_another():
    one, other = note_track([(0, Q, 60)]), note_track([(0, Q, 64)])
    assert sounding(midi_bytes_to_song(midi_file([one, other], kind=1))) == {
        60: [0, 1, 2, 3],
        64: [0, 1, 2, 3],
    }
    two = midi_bytes_to_song(midi_file([one, other], kind=2))
    assert sounding(two) == {60: [0, 1, 2, 3], 64: [4, 5, 6, 7]}
    assert two.remarks == ("type 2: 2 tracks laid one after another",)


def test_the_channels_of_one_track_of_type_two_sound_together():
    chord = [(0, b"\x90\x3c\x50"), (0, b"\x91\x40\x50"), (Q, b"\x80\x3c\x00"), (0, b"\x81\x40\x00")]
    other_sound = [(0, b"\xc0\x05"), (0, b"\x90\x3e\x50"), (Q, b"\x80\x3e\x00")]
    song = midi_bytes_to_song(midi_file([[*chord, *other_sound], note_track([(0, Q, 67)])], kind=2))
    assert [(row.nonzero()[0] + 21).tolist() for row in song.roll[::4]] == [[60, 64], [62], [67]]
    assert song.remarks == ("type 2: 2 tracks laid one after another",)


def test_empty_tracks_are_counted():
    song = midi_bytes_to_song(midi_file([[], note_track([(0, Q, 60)]), []]))
    assert song.remarks == ("2 of 3 tracks are empty",)
    silent = midi_bytes_to_song(midi_file([[]]))
    assert silent.roll.shape == (0, 88)


def test_a_note_that_never_ends_is_counted():
    track = [(0, bytes([0x90, 60, 80])), (Q, bytes([0x90, 64, 80])), (Q, bytes([0x80, 64, 0]))]
    song = midi_bytes_to_song(midi_file([track]))
    assert set(sounding(song)) == {64}
    assert (song.losses.unclosed, song.losses.notes) == (1, 2)


def test_a_stray_note_hours_away_is_refused_not_rendered(monkeypatch):
    far = midi_file([note_track([(0, Q, 60), (200_000_000, 200_000_480, 60)])])
    with pytest.raises(UserError, match="DEEPRNN_MAX_FRAMES"):
        midi_bytes_to_song(far)
    near = midi_file([note_track([(1000 * Q, 1001 * Q, 60)])])
    assert len(midi_bytes_to_song(near).roll) == 4004
    monkeypatch.setenv("DEEPRNN_MAX_FRAMES", "4000")
    with pytest.raises(UserError, match="limit of 4,000"):
        midi_bytes_to_song(near)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header"),
        (b"not midi at all, really", "header"),
        (midi_file([[]], division=0xE728), "SMPTE"),
        (midi_file([[]], kind=5), "type 5"),
        (midi_file([note_track([(0, Q, 60)])], division=0), "0 ticks"),
        (midi_file([note_track([(0, Q, 60)])])[:-6], "not a readable MIDI file"),
    ],
)
def test_unreadable_files_give_their_reason(data, reason):
    with pytest.raises(UserError, match=reason):
        midi_bytes_to_song(data)


ORIGINAL = midi_file(
    [[(0, tempo(400_000))], note_track([(0, Q, 60), (Q, 900, 64)]), note_track([(0, 60, 36)], channel=9)]
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations(ORIGINAL))
def test_a_mutated_file_is_a_song_or_a_clean_error(data):
    try:
        song = midi_bytes_to_song(data)
    except UserError:
        return
    assert song.roll.dtype == np.uint8
    assert song.roll.shape[1] == 88


notes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(15, 112)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(notes, st.integers(1, 6))
def test_rendering_agrees_with_a_plain_loop(notes, steps):
    grid = Grid(steps_per_beat=steps)
    onset = np.array([a for a, _, _ in notes], np.int64)
    end = onset + np.array([d for _, d, _ in notes], np.int64)
    pitch = np.array([p for _, _, p in notes], np.int64)
    roll, losses = render(onset, end, pitch, grid, "notes", per_beat=4)
    expected = set()
    for a, b, p in zip(onset, end, pitch, strict=True):
        if 21 <= p <= 108:
            first = int(a * steps / 4 + 0.5)
            last = max(int(b * steps / 4 + 0.5), first + 1)
            expected |= {(t, int(p) - 21) for t in range(first, last)}
    assert set(zip(*map(list, np.nonzero(roll)), strict=True)) == expected
    assert losses.out_of_range == sum(not 21 <= p <= 108 for p in pitch)


def test_key_and_transposition():
    grid = Grid()
    scale = [62, 64, 66, 67, 69, 71, 73, 74, 69, 66, 62]  # D major
    roll = np.zeros((len(scale), 88), np.uint8)
    roll[np.arange(len(scale)), np.array(scale) - 21] = 1
    assert key_of(roll, grid) == (2, "major")
    moved, fallen = to_common_tonic(roll, grid)
    assert key_of(moved, grid) == (0, "major")
    assert fallen == 0
    assert (transpose(moved, 2)[0] == roll).all()
    edge = np.zeros((1, 88), np.uint8)
    edge[0, 87] = 1
    assert transpose(edge, 1)[1] == 1
    assert key_of(np.zeros((3, 88), np.uint8), grid) == (0, "major")
