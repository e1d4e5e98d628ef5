"""Whole little files of every format, from which mutations begin."""

from __future__ import annotations

import io
import json
import pickle
import struct
from functools import cache
from typing import Any

import numpy as np

from tests.data.makers import midi_file, note_track, plain_npz, tempo
from tests.small_runs import tune

NOTES = [(0, 480, 60), (240, 960, 64), (480, 720, 67), (960, 1440, 60)]
SONGS = {"train": [[[60, 64], [62], []], [[60]]], "valid": [[[60]]], "test": [[[], [61]]]}


class Harm:
    """What a pickle can do to a program that trusts it."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch canary",)


@cache
def midi() -> tuple[bytes, ...]:
    """MIDI files of every type."""
    from deeprnn.render import midi_bytes

    one, two = note_track(NOTES), note_track([(on, off, pitch + 5) for on, off, pitch in NOTES], channel=9)
    return (
        midi_file([one]),
        midi_file([[(0, tempo(500_000)), *one], two], kind=1),
        midi_file([one, two], kind=2, division=96),
        midi_bytes(tune(1, frames=8), steps_per_beat=4),
    )


@cache
def pickles() -> tuple[bytes, ...]:
    """Pickles of songs, and of code that wants to run."""
    songs = {name: [[tuple(frame) for frame in song] for song in part] for name, part in SONGS.items()}
    scalars = {**songs, "train": [[(np.int64(60), np.float32(64))]]}
    harm = {**songs, "train": Harm()}
    by_hand = b"cos\nsystem\n(S'touch canary'\ntR.", b'cbuiltins\neval\n(S\'open("canary","w")\'\ntR.'
    return (*(pickle.dumps(x, protocol) for x in (songs, scalars, harm) for protocol in (0, 2, 4)), *by_hand)


@cache
def mats() -> tuple[bytes, ...]:
    """MATLAB files as scipy writes them."""
    from scipy.io import savemat

    roll = tune(1, frames=4)
    cells = np.empty((1, 2), object)
    cells[0, 0], cells[0, 1] = roll, roll[:2]
    out = []
    for compressed in (False, True):
        file = io.BytesIO()
        splits = {f"{split}data": cells for split in ("train", "valid", "test")}
        savemat(file, splits, do_compression=compressed)
        out.append(file.getvalue())
    return tuple(out)


@cache
def npzs() -> tuple[bytes, ...]:
    """Arrays with lengths, and a text with its vocabulary."""
    roll = tune(2, frames=4)
    plain = dict.fromkeys(("train", "valid", "test"), roll)
    lengths = {f"{split}_len": np.array([2, 2]) for split in plain}
    text = {split: np.array([0, 1, 2], np.uint8) for split in plain}
    words = {"vocabulary": np.array(["a", "b", "<unk>"]), "kind": np.array("char")}
    pickled = io.BytesIO()
    np.savez(pickled, train=np.array([Harm()], object), allow_pickle=True)
    return plain_npz(**plain, **lengths), plain_npz(**text, **words), pickled.getvalue()


@cache
def texts() -> tuple[bytes, ...]:
    """A few lines, in several encodings."""
    line = "the cat sat on the mat \n" * 12
    return line.encode(), ("é€😀\n" * 20).encode(), line.encode("utf-16"), b"\xef\xbb\xbf" + line.encode()


def safetensors_file(header: Any, body: bytes) -> bytes:
    """The format by hand: a length, JSON, bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
