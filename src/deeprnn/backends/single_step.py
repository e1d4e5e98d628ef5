"""Calls of one step on a CPU, which streams make: a few of torch's own operations take less time than calling a kernel.

Nothing is kept between calls, so no change of a parameter, however it is made, can be missed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeprnn.backends.transformations import plain_tensors


def prefers_torch_ops(backend: str, x: Tensor, *states: Tensor) -> bool:
    """Whether a call on x (T, B, ·) is one step that is best left to torch's operations."""
    return (
        backend == "auto"
        and not torch.compiler.is_compiling()  # a length of 1 may be the example of a dynamic one
        and x.shape[0] == 1
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and plain_tensors(x, *states)
    )


def as_sequence(y: Tensor) -> Tensor:
    """(B, n) as (1, B, n); a copy while gradients are recorded, so that the user may change it in place.

    A trace is checked with and without gradients, and copies in both.
    """
    copied = y.requires_grad or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return torch.stack([y]) if copied else y.unsqueeze(0)
