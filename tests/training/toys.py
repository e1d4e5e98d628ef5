"""Small data and recipes that train in a blink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.text import TextData, text_data
from deeprnn.training.recipe import (
    DataPart,
    ModelPart,
    Recipe,
    RegulariserPart,
    SavePart,
    SchedulePart,
    StopPart,
    override,
)
from deeprnn.training.session import recipe_of, run_recipe


def music(songs: int = 6, pitches: int = 12, length: int = 23) -> MusicData:
    """Songs that repeat a few chords, so that there is something to learn."""
    rng = np.random.default_rng(0)
    chords = (rng.random((4, pitches)) < 0.3).astype(np.uint8)

    def song(n: int) -> np.ndarray:
        return chords[(np.arange(n) + rng.integers(4)) % 4] ^ (rng.random((n, pitches)) < 0.02)

    def part(count: int) -> Songs:
        return Songs.pack([song(length + i) for i in range(count)], pitches)

    return MusicData("toy", {"train": part(songs), "valid": part(2), "test": part(2)}, Grid(low=60, high=71))


def text(kind: str = "char") -> TextData:
    """A few lines again and again."""
    lines = "the cat sat on the mat \na dog ran to the cat \n" * 6
    return text_data("toy-text", kind, {"train": lines, "valid": lines[:120], "test": lines[:90]})


def recipe(**changes: Any) -> Recipe:
    """An RNN of eight units with the paper's settings; `section__field=value` changes one."""
    base = Recipe(
        data=DataPart(name="toy", chunk=10),
        model=ModelPart(kind="rnn", hidden=(8,)),
        schedule=SchedulePart(beta=20.0, patience=2),
        regulariser=RegulariserPart(weight_noise=0.05),
        stop=StopPart(epochs=3),
        save=SavePart(seconds=0, updates=0),
    )
    return override(base, {name.replace("__", "."): value for name, value in changes.items()})


DEEP = {
    "model__kind": "dots",
    "model__intermediate": [7],
    "model__output_hidden": [6],
    "model__shortcut": "last",
    "model__input_to": "all",
}


def resume(folder: Path, **settings: Any) -> list[dict[str, Any] | None]:
    """Go on with the run in a folder, from its own recipe."""
    return run_recipe(recipe_of(folder), folder, **settings)
