"""Piano rolls as MIDI, sound and pictures."""

from __future__ import annotations

import io
import tracemalloc
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprnn.render import held_notes, midi_bytes, synthesise, wav_bytes
from deeprnn.render.curves import comparison_png, curves_png, series
from deeprnn.render.midi import TICKS_PER_BEAT, _variable
from deeprnn.render.pianoroll import pianoroll_png
from deeprnn.render.synth import PEAK, TIMBRES

PNG = b"\x89PNG\r\n\x1a\n"


def roll_of(*notes: tuple[int, int, int], frames: int = 16) -> np.ndarray:
    """A roll from (start, length, MIDI pitch)."""
    roll = np.zeros((frames, 88), np.uint8)
    for start, length, pitch in notes:
        roll[start : start + length, pitch - 21] = 1
    return roll


def roll_from_midi(data: bytes, frames: int, steps_per_beat: int) -> np.ndarray:
    """Read with another library what our writer wrote."""
    symusic = pytest.importorskip("symusic")
    score = symusic.Score.from_midi(data)
    roll = np.zeros((frames, 88), np.uint8)
    step = score.tpq // steps_per_beat
    for track in score.tracks:
        for note in track.notes:
            roll[note.start // step : (note.start + note.duration) // step, note.pitch - 21] = 1
    return roll


def test_runs_of_frames_become_one_note_each():
    notes = held_notes(roll_of((0, 4, 60), (4, 2, 62), (8, 1, 60), (15, 1, 108)))
    assert [(n.start, n.length, n.pitch) for n in notes] == [(0, 4, 60), (4, 2, 62), (8, 1, 60), (15, 1, 108)]


def test_melody_is_louder_than_inner_voices():
    notes = {n.pitch: n.velocity for n in held_notes(roll_of((0, 4, 48), (0, 4, 60), (0, 4, 72)))}
    assert notes[72] > notes[48] > notes[60]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_midi_round_trip_through_another_reader(data: st.DataObject):
    frames = data.draw(st.integers(1, 40))
    steps = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    seed = data.draw(st.integers(0, 1000))
    roll = (np.random.default_rng(seed).random((frames, 88)) < 0.05).astype(np.uint8)
    assert (roll_from_midi(midi_bytes(roll, steps_per_beat=steps), frames, steps) == roll).all()


def test_midi_holds_tempo_program_title_and_trailing_rest():
    data = midi_bytes(roll_of((0, 2, 60)), tempo=120, program=19, steps_per_beat=4, title="Aria")
    assert data[:4] == b"MThd"
    assert b"\xff\x51\x03" + (500_000).to_bytes(3, "big") in data
    assert bytes([0xC0, 19]) in data
    assert b"Aria" in data
    # The note ends after 2 of 16 steps; the rest is the end's delta.
    assert data.endswith(_variable(14 * TICKS_PER_BEAT // 4) + b"\xff\x2f\x00")


@pytest.mark.parametrize(("value", "expected"), [(0, "00"), (127, "7f"), (128, "8100"), (0x1FFFFF, "ffff7f")])
def test_variable_length_quantities(value: int, expected: str):
    assert _variable(value).hex() == expected


@pytest.mark.parametrize(
    ("options", "word"),
    [({"tempo": 0}, "tempo=0"), ({"program": 128}, "program=128"), ({"low": 60}, "60..147")],
)
def test_midi_refuses_what_it_cannot_hold(options: dict, word: str):
    with pytest.raises(ValueError, match=word):
        midi_bytes(roll_of((0, 1, 60)), **options)


def test_an_a_sounds_at_440_hertz():
    sound = synthesise(roll_of((0, 8, 69)), tempo=60, steps_per_beat=4)[: 2 * 44100, 0]
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    assert abs(np.argmax(spectrum) / 2 - 440) <= 0.5


@pytest.mark.parametrize("program", [0, 16, 25, 48])
def test_sound_is_normalised_and_free_of_clicks(program: int):
    roll = roll_of((0, 4, 60), (4, 4, 62), (8, 3, 60), (12, 4, 64), (0, 16, 43))
    sound = synthesise(roll, tempo=90, program=program)
    assert sound.dtype == np.float32
    assert sound.shape[1] == 2
    assert abs(np.abs(sound).max() - PEAK) < 1e-4
    assert np.abs(sound[-50:]).max() < 1e-4
    assert np.abs(sound.mean(axis=0)).max() < 1e-3
    # No partial of these notes reaches 12 kHz: what is there comes from corners in the envelopes.
    spectrum = np.fft.rfft(sound[:, 0])
    spectrum[np.fft.rfftfreq(len(sound), 1 / 44100) < 12000] = 0
    assert np.abs(np.fft.irfft(spectrum, len(sound))).max() < 2e-3


def test_many_long_notes_take_no_more_memory_than_the_sound():
    roll = np.zeros((4, 88), np.uint8)
    roll[:, 20:50] = 1
    tracemalloc.start()
    sound = synthesise(roll, tempo=8, steps_per_beat=1)  # thirty notes of 30 s
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * sound.nbytes


def test_blocks_join_without_a_seam():
    """Where blocks begin does not matter: a piece that starts later is the same piece later."""
    notes = [(0, 200, 57), (20, 150, 64)]
    now = synthesise(roll_of(*notes, frames=200), tempo=1000)
    later = synthesise(roll_of(*((t + 64, n, p) for t, n, p in notes), frames=264), tempo=1000)
    shift = len(later) - len(now)
    assert len(now) > 2 * 65536
    assert shift % 65536
    np.testing.assert_allclose(later[shift:], now, atol=2e-5)


def test_high_keys_do_not_alias():
    sound = synthesise(roll_of((0, 16, 108)), rate=16000)[:16000, 0]
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    below = spectrum[:3500].max()  # the key is at 4186 Hz: folded harmonics would fall below it
    assert below < 0.02 * spectrum.max()


def test_silence_and_the_empty_roll_are_silent():
    for roll in (np.zeros((4, 88), np.uint8), np.zeros((0, 88), np.uint8)):
        assert not synthesise(roll).any()
        assert held_notes(roll) == []
        assert midi_bytes(roll).endswith(b"\xff\x2f\x00")


def test_the_same_roll_gives_the_same_sound():
    roll = roll_of((0, 4, 60), (2, 4, 67))
    assert (synthesise(roll) == synthesise(roll)).all()


def test_wav_is_what_it_says():
    sound = synthesise(roll_of((0, 4, 60)))
    with wave.open(io.BytesIO(wav_bytes(sound))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 44100)
        samples = np.frombuffer(file.readframes(-1), "<i2").reshape(-1, 2)
    assert np.abs(samples / 32767 - sound).max() < 1e-4


def test_wav_clips_rather_than_wraps():
    with wave.open(io.BytesIO(wav_bytes(np.array([2.0, -2.0])))) as file:
        assert np.frombuffer(file.readframes(-1), "<i2").tolist() == [32767, -32767]


def test_every_timbre_has_falling_or_audible_partials():
    for timbre in TIMBRES.values():
        assert timbre.partials[0] == max(timbre.partials)
        assert timbre.attack > 0
        assert timbre.release > 0


@pytest.mark.parametrize("frames", [0, 1, 16, 300])
def test_pianoroll_png_of_any_length(frames: int):
    pytest.importorskip("matplotlib")
    roll = (np.random.default_rng(0).random((frames, 88)) < 0.04).astype(np.uint8)
    data = pianoroll_png(roll, probabilities=roll * 0.5, primer=min(5, frames), title="x", dpi=40)
    assert data.startswith(PNG)
    assert data == pianoroll_png(roll, probabilities=roll * 0.5, primer=min(5, frames), title="x", dpi=40)


def test_pianoroll_refuses_other_shapes():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"\(4, 80\)"):
        pianoroll_png(np.zeros((4, 88)), probabilities=np.zeros((4, 80)))
    with pytest.raises(ValueError, match="time, pitch"):
        pianoroll_png(np.zeros(88))


def test_curves_draw_with_gaps_and_without_rows():
    pytest.importorskip("matplotlib")
    rows = [
        {"epoch": e, "train": 9 - e / 10, "valid": 9.0, "rate": 1.0, "grad_norm": 0.5} for e in range(1, 12)
    ]
    rows[3]["valid"] = float("nan")
    rows[4].pop("rate")
    for these in (rows, rows[:1], []):
        assert curves_png(these, metric="nats", paper=8.3, dpi=40).startswith(PNG)
        assert comparison_png({"a": these, "b": these}, dpi=40).startswith(PNG)
    assert len(series(rows, "valid")[0]) == 10
    assert len(series(rows, "rate")[0]) == 10
