"""How a cell is unrolled over time: `unroll` takes the fastest backend that can serve."""

from __future__ import annotations

from deeprnn.backends.unrolling import unroll

__all__ = ["unroll"]
