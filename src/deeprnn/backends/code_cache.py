"""Compiled code on disk: where it is kept, and how it is read without ever taking damaged or foreign code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
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
    """Code that `keep` wrote under this name, None where there is none, or it is damaged, misplaced or not ours."""
    try:
        with (cache_folder() / name).open("rb") as file:
            if not _trusted(os.fstat(file.fileno())):
                return None
            whole = file.read()
    except OSError:
        return None
    code = whole[DIGEST:]
    return code if _digest(name, code) == whole[:DIGEST] else None


def keep(name: str, code: bytes) -> None:
    """Keep code for the next process; a full disk is no error."""
    with contextlib.suppress(CannotWrite):
        write_atomically(cache_folder() / name, _digest(name, code) + code)


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _trusted(status: os.stat_result) -> bool:
    """Whether only this user, or the machine's owner, can have written the file: it will be run."""
    if not hasattr(os, "getuid"):  # Windows, where a user's cache folder is closed to others
        return True
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & stat.S_IWOTH
