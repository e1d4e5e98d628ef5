"""A made-up data set in the place of the paper's, and settings that train in a blink."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.rolls import save_npz
from deeprnn.reproduction import run as running
from deeprnn.training import loading

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
        mock.patch.object(loading, "_load", return_value=data),
        mock.patch.object(running.sources, "find", return_value=()),
    ):
        yield


STUDY = """
question = "Does depth help the toy?"
tested = "deep"
control = "shallow"
search_seeds = [1]
seeds = [11, 12]
least_seeds = 2
pairs = [["main/dots", "main/long"]]

[[family]]
name = "main"
data = ["toy"]
[family.settings]
"data.name" = "{songs}"
"data.chunk" = 8
"data.order" = "own"
"data.lanes" = 1
"model.hidden" = 4
"schedule.name" = "cosine"
"stop.epochs" = 1
"optimiser.name" = "adamw"
[family.grid]
"optimiser.rate" = [0.01, 0.03]
"optimiser.weight_decay" = [0.1]

[[contender]]
name = "rnn"
family = "main"
label = "RNN"
recipe = "paper/jsb/rnn"

[[contender]]
name = "long"
family = "main"
label = "RNN, long"
recipe = "paper/jsb/rnn"
length = 2.0

[[contender]]
name = "dts"
family = "main"
label = "DT(S)"
tested = true
recipe = "paper/jsb/dts"
[contender.settings]
"model.intermediate" = 3

[[contender]]
name = "dots"
family = "main"
label = "DOT(S)"
tested = true
recipe = "paper/jsb/dots"
[contender.settings]
"model.intermediate" = 3
"model.output_hidden" = 3
"""


def write_study(folder: Path) -> Path:
    """The plan of a small study in a file, beside songs of its own."""
    draw = np.random.default_rng(0)
    rolls = {
        s: Songs.pack([(draw.random((n, 6)) < 0.3) for n in (17, 9)], 6) for s in ("train", "valid", "test")
    }
    save_npz(folder / "songs.npz", MusicData("songs", rolls))
    path = folder / "toy.toml"
    path.write_text(STUDY.replace("{songs}", str(folder / "songs.npz")))
    return path
