"""A made-up data set in the place of the paper's, and settings that train in a blink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.reproduction import run as running

TINY = (
    "jsb/rnn:model.hidden=6",
    "jsb/srnn:model.hidden=[6,6]",
    "jsb/d*:model.hidden=6",
    "jsb/d*:model.intermediate=5",
    "jsb/dots:model.output_hidden=4",
    "data.chunk=8",
    "stop.epochs=3",
)


def small_songs(seed: int = 0) -> MusicData:
    """Three short songs of noise in every part."""
    draw = np.random.default_rng(seed)
    rolls = [(draw.random((n, 88)) < 0.05).astype(np.uint8) for n in (20, 13, 9)]
    splits = {s: Songs.pack(rolls) for s in ("train", "valid", "test")}
    return MusicData("jsb", splits, Grid(steps_per_beat=1))


@contextmanager
def made_up_songs() -> Iterator[None]:
    """A made-up `jsb` in place of the benchmark set."""
    data = small_songs()
    with (
        mock.patch.object(running, "_load", return_value=data),
        mock.patch.object(running.sources, "find", return_value=()),
    ):
        yield
