"""Tiny runs, trained for real on made-up data in a second or two."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from deeprnn.render import midi_bytes
from deeprnn.runs.folder import Run, load_run
from deeprnn.training.recipe import Recipe, override
from deeprnn.training.session import run_recipe

SENTENCES = ("the cat sat on the mat", "a dog ran to the cat", "the mat lay under a dog", "on it sat the cat")


@cache
def _root() -> Path:
    folder = Path(mkdtemp(prefix="deeprnn-small-runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def tune(seed: int, frames: int = 48) -> np.ndarray:
    """A wandering melody over a held bass, (T, 88)."""
    rng = np.random.default_rng(seed)
    roll = np.zeros((frames, 88), np.uint8)
    melody = 40 + np.cumsum(rng.integers(-2, 3, frames // 2)).clip(-12, 12)
    for beat, key in enumerate(melody):
        roll[2 * beat : 2 * beat + 2, key] = 1
        roll[2 * beat : 2 * beat + 2, 20 + 5 * (beat // 4 % 3)] = 1
    return roll


@cache
def music_folder() -> Path:
    """A folder of MIDI files."""
    folder = _root() / "tunes"
    folder.mkdir()
    for seed in range(12):
        (folder / f"tune-{seed:02d}.mid").write_bytes(midi_bytes(tune(seed), steps_per_beat=4))
    return folder


@cache
def text_file() -> Path:
    """A text of some sixty lines."""
    path = _root() / "book.txt"
    rng = np.random.default_rng(0)
    path.write_text("".join(f"{SENTENCES[i]}\n" for i in rng.integers(0, len(SENTENCES), 60)), "utf-8")
    return path


@cache
def small_run(kind: str, seed: int = 1, model: str = "rnn") -> Run:
    """A trained run of kind music, char or word."""
    changes = {
        "data.name": str(music_folder() if kind == "music" else text_file()),
        "data.level": kind,
        "data.chunk": 60,
        "data.lanes": 4,
        "model.hidden": (12,),
        "regulariser.weight_noise": 0.0,
        "optimiser.rate": 0.5,
        "stop.epochs": 1,
        "seeds": (seed,),
    }
    if model == "dots":
        changes |= {"model.kind": "dots", "model.intermediate": (10,), "model.output_hidden": (8,),
                    "model.shortcut": "last", "model.input_to": "all"}  # fmt: skip
    folder = _root() / f"{kind}-{model}-{seed}"
    run_recipe(override(Recipe(), changes), folder)
    return load_run(folder)
