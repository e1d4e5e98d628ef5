"""Music for the page: a primer from MIDI, what the model expects, its continuation, MIDI and WAV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deeprnn.generation.chords import note_probabilities
from deeprnn.generation.generate import stream_music
from deeprnn.model.nade import NadePredict
from deeprnn.model.scoring import nats as step_nats
from deeprnn.model.scoring import note_logits
from deeprnn.render.browser import encode_probabilities, to_lists
from deeprnn.render.synth import Synthesis, wav_bytes
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Fields, Refusal
from deeprnn.web.shelf import Loaded

if TYPE_CHECKING:
    from deeprnn.data import Grid

CHUNK = 16  # frames between two looks at whether the client is still there


def grid_of(loaded: Loaded) -> Grid:
    """The run's grid, or the benchmark sets' usual one."""
    from deeprnn.data import Grid

    return loaded.grid or Grid(steps_per_beat=1)


def to_roll(frames: list[list[int]], keys: int) -> np.ndarray:
    """Lists of sounding keys as (T, K) uint8."""
    roll = np.zeros((len(frames), keys), np.uint8)
    for t, frame in enumerate(frames):
        roll[t, frame] = 1
    return roll


def read_primer(loaded: Loaded, content: bytes, limits: Limits) -> dict[str, Any]:
    """A MIDI file on the run's grid."""
    from deeprnn.data.midi import midi_bytes_to_song

    roll = midi_bytes_to_song(content, grid_of(loaded), what="the file").roll
    if not roll.any():
        raise Refusal(422, "the file has no notes within the run's range of keys")
    if roll.shape[1] != loaded.keys:
        raise Refusal(409, f"the run does not tell its grid, and its model takes {loaded.keys} keys")
    cut = len(roll) > limits.frames // 2  # room is left for the continuation
    roll = roll[: limits.frames // 2]
    return {"frames": to_lists(roll), "cut": cut}


def predict(loaded: Loaded, fields: Fields, limits: Limits) -> dict[str, Any]:
    """What the model expects in every frame of a roll and in the one after it, and its surprise."""
    roll = to_roll(fields.frames(loaded.keys, limits.frames), loaded.keys)
    with torch.inference_mode():
        inputs = torch.from_numpy(np.concatenate([np.zeros((1, loaded.keys), np.uint8), roll]))
        out, _ = loaded.model(inputs[:, None].float())
        target = torch.from_numpy(roll).float()
        heat = torch.sigmoid(note_logits(loaded.model, out[:-1, 0], target)).numpy()
        nats = step_nats(loaded.model, out[:-1, 0], target)
        if isinstance(output := loaded.model.predict, NadePredict):
            following = note_probabilities(output, out[-1, 0])
        else:
            following = torch.sigmoid(out[-1, 0]).numpy()
    return {
        "next": encode_probabilities(following),
        "heat": encode_probabilities(heat),
        "nats": [round(value, 3) for value in nats.tolist()],
        "mean": round(float(nats.mean()), 4) if len(roll) else None,
    }


def continuation(loaded: Loaded, fields: Fields, limits: Limits) -> Iterator[dict[str, Any]]:
    """Frames sampled one by one after a roll, in chunks with the probabilities they were drawn from.

    The same seed gives the same music as `deeprnn generate`.
    """
    frames = fields.frames(loaded.keys, limits.frames)
    length = fields.whole("length", 1, limits.new_frames, 64)
    if len(frames) + length > limits.frames:
        raise Refusal(422, f"{len(frames)} frames and {length} more exceed the roll's {limits.frames:,}")
    most = loaded.most_notes or 0  # as `deeprnn generate`: no more at once than where the model learnt
    steps = stream_music(
        loaded.model,
        length=length,
        seed=fields.whole("seed", 0, 2**53, 0),
        temperature=fields.number("temperature", 0.0, 4.0, 1.0),
        primer=to_roll(frames, loaded.keys),
        max_notes=fields.whole("max_notes", 1, 128, min(most, 128) or 128),
    )
    return _chunks(steps)


def _chunks(steps: Iterator[tuple[np.ndarray, np.ndarray]]) -> Iterator[dict[str, Any]]:
    while part := list(islice(steps, CHUNK)):
        notes, p = np.concatenate([n for n, _ in part]), np.concatenate([q for _, q in part])
        yield {"frames": to_lists(notes), "heat": encode_probabilities(p)}
    yield {"done": True}


def midi_file(loaded: Loaded, fields: Fields, limits: Limits) -> bytes:
    """The roll as a MIDI file."""
    from deeprnn.render import midi_bytes

    roll, grid, tempo = _piece(loaded, fields, limits)
    return midi_bytes(roll, tempo=tempo, steps_per_beat=grid.steps_per_beat, low=grid.low, title="deeprnn")


def wav_file(loaded: Loaded, fields: Fields, limits: Limits) -> Iterator[bytes]:
    """The roll as sound: nothing for every second or so while it is rendered, then the file."""
    roll, grid, tempo = _piece(loaded, fields, limits)
    piece = Synthesis(roll, tempo=tempo, steps_per_beat=grid.steps_per_beat, low=grid.low)
    for value, most, what in (
        (piece.seconds, limits.sound_seconds, "lasts"),
        (piece.note_seconds, limits.note_seconds, "has notes that together last"),
    ):
        if value > most:
            raise Refusal(422, f"the piece {what} {math.ceil(value):,} seconds; at most {most:,g} are "
                               "rendered: shorten it or raise the tempo")  # fmt: skip
    return _rendered(piece)


def _rendered(piece: Synthesis) -> Iterator[bytes]:
    for _ in piece.blocks():
        yield b""
    yield wav_bytes(piece.sound())


def _piece(loaded: Loaded, fields: Fields, limits: Limits) -> tuple[np.ndarray, Grid, float]:
    frames = fields.frames(loaded.keys, limits.frames)
    if not any(frames):
        raise Refusal(422, "the roll has no notes: draw some, or let the model continue")
    return to_roll(frames, loaded.keys), grid_of(loaded), fields.number("tempo", 20, 400, 100)
