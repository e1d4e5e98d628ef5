"""Bounds on what a file may make us hold in memory, each with an override."""

from __future__ import annotations

import os
from pathlib import Path

from deeprnn.errors import UserError

MAX_BYTES = 512 * 2**20
"""Largest file read, and largest decompressed content, unless `DEEPRNN_MAX_BYTES` says otherwise."""

MAX_FRAMES = 1_000_000
"""Longest song, in grid steps: a stray note hours away must not become gigabytes of silence."""

MAX_SONGS = 100_000
"""Most songs of one split in a file: an empty song takes a byte there and a hundred here."""

MEMORY_TIMES, LEAST_MEMORY = 10, 64 * 2**20
"""What a file may take in memory: so many times its size, and so many bytes at least."""


def byte_limit() -> int:
    """The limit in force: `DEEPRNN_MAX_BYTES`, or 512 MiB."""
    return _from_environment("DEEPRNN_MAX_BYTES", MAX_BYTES, "bytes")


def _from_environment(variable: str, default: int, what: str) -> int:
    text = os.environ.get(variable, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UserError(f"{variable}={text!r} is not a whole number of {what}") from None


def check_bytes(size: int, what: str) -> None:
    """Refuse more than the limit, naming the override."""
    limit = byte_limit()
    if size > limit:
        raise UserError(
            f"{what} holds {size:,} bytes, more than the limit of {limit:,}: set DEEPRNN_MAX_BYTES to read it"
        )


def read_bytes(path: Path) -> bytes:
    """A file's content, refused beyond the limit before it is read."""
    try:
        check_bytes(path.stat().st_size, str(path))
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def check_frames(count: int, what: str) -> None:
    """Refuse a song beyond `MAX_FRAMES` (or `DEEPRNN_MAX_FRAMES`) steps."""
    limit = _from_environment("DEEPRNN_MAX_FRAMES", MAX_FRAMES, "grid steps")
    if count > limit:
        raise UserError(
            f"{what} spans {count:,} grid steps, more than the limit of {limit:,}: "
            "set DEEPRNN_MAX_FRAMES to read it"
        )


def check_songs(count: int, what: str) -> None:
    """Refuse a split of more than `MAX_SONGS` (or `DEEPRNN_MAX_SONGS`) songs."""
    limit = _from_environment("DEEPRNN_MAX_SONGS", MAX_SONGS, "songs")
    if count > limit:
        raise UserError(
            f"{what} holds more than {limit:,} songs: set DEEPRNN_MAX_SONGS to read it, "
            "or store short songs end to end"
        )


def memory_limit(size: int) -> int:
    """The bytes of memory that a file of `size` bytes may take: `DEEPRNN_MAX_MEMORY` where that is more."""
    least = _from_environment("DEEPRNN_MAX_MEMORY", LEAST_MEMORY, "bytes")
    return max(least, MEMORY_TIMES * size)


def check_memory(needed: int, size: int, what: str) -> None:
    """Refuse content that would take more than `memory_limit`."""
    limit = memory_limit(size)
    if needed > limit:
        raise UserError(
            f"{what} needs more than {limit:,} bytes of memory, {MEMORY_TIMES} times its size: "
            "set DEEPRNN_MAX_MEMORY (in bytes) to read it"
        )
