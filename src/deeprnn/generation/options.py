"""The options of `Run.generate` as types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

import numpy as np


class GenerateOptions(TypedDict, total=False):
    """What `deeprnn.generation.generate.from_run` takes, which explains each."""

    primer: np.ndarray | str | None
    length: int | None
    count: int
    seed: int
    temperature: float
    keep_primer: bool
    max_notes: int | None
    independent: bool
    ending: Literal["cadence", "cut"]
    tempo: float
    program: int
    top_k: int | None
    top_p: float | None
    avoid: Iterable[str]
