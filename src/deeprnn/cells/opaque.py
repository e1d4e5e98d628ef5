"""Objects that hold something which is no attribute: arrays, and generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

LARGE = 2**16
"""bytes of an array whose numbers are not looked at: a tensor made of it shares them"""


def content_of(value: Any) -> Any:
    """What such an object holds, as a hashable value; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.ndarray) and value.nbytes <= LARGE:
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return None


def restorer(value: Any) -> Callable[[], None]:
    """What lets such an object hold what it holds now."""
    if isinstance(value, np.ndarray):
        numbers = value.copy()
        return lambda: value.__setitem__(Ellipsis, numbers)
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, np.random.Generator):
        generator, numbers = value.bit_generator, value.bit_generator.state
        return lambda: setattr(generator, "state", numbers)
    if isinstance(value, torch.Generator):
        drawn = value.get_state()

        def restore() -> None:
            value.set_state(drawn)

        return restore
    known = value.get_state(legacy=False)
    return lambda: value.set_state(known)
