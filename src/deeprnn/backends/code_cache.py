"""Compiled code on disk: where it is kept, and how it is read without ever taking damaged code."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from deeprnn.files import CannotWrite, write_atomically

DIGEST = 32
"""bytes in front of the code: a damaged file is noticed and made again"""


def cache_folder() -> Path:
    """Where compiled code is kept: $DEEPRNN_CACHE, or the user's cache folder."""
    if override := os.environ.get("DEEPRNN_CACHE"):
        return Path(override) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "deeprnn" / "kernels"


def read(name: str) -> bytes | None:
    """Code that `keep` wrote, None where there is none or it is damaged."""
    try:
        whole = (cache_folder() / name).read_bytes()
    except OSError:
        return None
    code = whole[DIGEST:]
    return code if hashlib.sha256(code).digest() == whole[:DIGEST] else None


def keep(name: str, code: bytes) -> None:
    """Keep code for the next process; a full disk is no error."""
    with contextlib.suppress(CannotWrite):
        write_atomically(cache_folder() / name, hashlib.sha256(code).digest() + code)
