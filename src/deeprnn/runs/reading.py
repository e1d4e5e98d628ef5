"""Reading files that anyone may have written: regular files alone, no further than a bound, links not followed.

A run folder is meant to be passed on, and its reader may be a server. A pipe would keep it waiting for ever, a
device never ends, a link leads out of the folder, and JSON nested deep enough ends whoever walks through it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from deeprnn.errors import UserError

LONGEST = 200  # characters of a name, a label, a version
DEEPEST = 32  # levels of nesting of a JSON file
# What a platform has not (Windows) is left out there: the look before opening has to do.
_FLAGS = (
    os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)


def regular(path: Path) -> os.stat_result | None:
    """What the file system says of a regular file, None for anything else and where there is nothing."""
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def open_regular(path: Path) -> BinaryIO:
    """A regular file, opened for reading; a link, a pipe or a device is a UserError, a missing one an OSError."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise UserError(f"{path.name} is a link, which is not followed: put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path.name} is not a regular file")
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:  # replaced by a link since the look above
            raise UserError(f"{path.name} is a link, which is not followed") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """All bytes of a regular file of at most `most`."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path.name} is larger than {most:,} bytes, the most that is read")
    return content


def read_json(path: Path, most: int) -> Any:
    """What a small JSON file holds; a UserError where it is none, or nested beyond reason."""
    try:
        value = json.loads(read_regular(path, most))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name} cannot be read: {error}") from None
    if _deeper(value, DEEPEST):
        raise UserError(f"{path.name} is nested more than {DEEPEST} levels deep")
    return value


def _deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        inner = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [item for items in inner for item in items]
    return bool(level)


# ---- values of a known type and a bounded length


def table(value: Any) -> dict[str, Any]:
    """A JSON object, empty where it is something else."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """A string that can be shown, cut where it is too long; empty where it is something else."""
    return printable(value) if isinstance(value, str) else ""


def printable(value: str, most: int = LONGEST) -> str:
    """Without what no encoding can hold, such as bytes of a folder's name that are not UTF-8; cut where too long."""
    value = value.encode("utf-8", "replace").decode()
    return value if len(value) <= most else value[: most - 1] + "…"


def number(value: Any) -> float | int | None:
    """A finite number, None where it is something else."""
    return value if finite(value) else None


def finite(value: Any) -> bool:
    """Whether something is a number that a float holds: JSON may spell one that does not fit."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) < 1e300 and not math.isnan(value)
