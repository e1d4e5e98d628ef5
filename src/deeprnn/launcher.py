"""What `torchrun` tells the processes it starts, read from the environment; one process alone is rank 0 of 1."""

from __future__ import annotations

import os

from deeprnn.errors import UserError


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not text:  # other launchers use some of these names too
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} is no number: torchrun sets it, so leave it alone") from None


def rank() -> int:
    """Which of the processes this one is, from 0."""
    return _number("RANK", 0)


def count() -> int:
    """How many processes run the command together, on all machines."""
    return _number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Which of the processes on this machine this one is: the GPU it uses."""
    return _number("LOCAL_RANK", 0)


def local_count() -> int:
    """How many of the processes run on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def restarts() -> int:
    """How often the processes have been started again after one of them died."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def most_restarts() -> int:
    """How often they would be: `torchrun --max-restarts`."""
    return _number("TORCHELASTIC_MAX_RESTARTS", 0)
