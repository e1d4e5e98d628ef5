"""Hashes of all windows of a sequence at once.

With a 64-bit value v for every symbol and an odd base B, the prefix sums G_i = Σ_{j<i} v_j·B^j (modulo 2^64) give the
hash of the window of length L at i as (G_{i+L} − G_i)·B^{-i}: whole-array arithmetic, no loop over the data.
"""

from __future__ import annotations

import numpy as np

BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 1 << 64)


def values(sequence: np.ndarray) -> np.ndarray:
    """A 64-bit value for every frame (T, K) or symbol (T,): equal for equal ones, else different but for chance."""
    sequence = np.asarray(sequence)
    if sequence.ndim == 2:
        weights = random_values(sequence.shape[1], seed=1)
        return ((sequence != 0).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64) + np.uint64(1)
    top = int(sequence.max(initial=0)) + 1
    return random_values(top, seed=1)[sequence]


def random_values(count: int, seed: int) -> np.ndarray:
    """So many random numbers of 64 bits, always the same ones."""
    return np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64, endpoint=False)


def powers(base: int, count: int) -> np.ndarray:
    """1, base, base², … modulo 2^64."""
    out = np.full(count, base, np.uint64)
    out[:1] = 1
    return np.cumprod(out, dtype=np.uint64)


def prefix_sums(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G of n + 1 sums, and B^{-i} that shifts a window back to the beginning."""
    prefix = np.zeros(len(v) + 1, np.uint64)
    np.cumsum(v * powers(BASE, len(v)), out=prefix[1:], dtype=np.uint64)
    return prefix, powers(INVERSE, len(v))


def windows(prefix: np.ndarray, unshift: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """The hashes of the windows of one length at some places."""
    return (prefix[starts + length] - prefix[starts]) * unshift[starts]
