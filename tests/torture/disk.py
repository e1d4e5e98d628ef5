"""Between a process and its disk: every call that changes a file below a folder is announced first.

Whoever listens may look (and copy the folder as a kill at this moment would leave it), raise an error as a
full disk does, or end the process. Python's own calls are covered, which are all that deeprnn writes with;
what a library writes from C is covered by the system's own limit in `disk_full.py`.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock


class Step(NamedTuple):
    """A call that is about to change the disk."""

    kind: str
    """open, write, rest (the second half of a write), sync, rename, remove, mkdir, truncate"""
    path: str


CALLS = {
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace", "link", "symlink"),
    "remove": ("unlink", "remove", "rmdir"),
    "mkdir": ("mkdir",),
    "truncate": ("truncate", "ftruncate"),
}
"""functions of `os` by the kind of step they are, beside open and write"""
Listener = Callable[[Step], None]
GROWS = ("open", "write", "rest", "mkdir")
"""steps that a full disk refuses; sync too, where space is only claimed then"""


@contextmanager
def watched(root: Path, listener: Listener) -> Iterator[None]:
    """Announce every change below `root` that this process makes."""
    inside = f"{os.path.realpath(root)}{os.sep}"
    entered, alone = False, threading.RLock()  # other threads' changes wait while somebody looks

    def tell(kind: str, place: Any) -> None:
        nonlocal entered
        path = _path(place)
        if entered or not path.startswith(inside):
            return
        entered = True  # the listener's own calls are its own business
        try:
            listener(Step(kind, path[len(inside) :]))
        finally:
            entered = False

    with ExitStack() as patches:
        for target, name, replacement in _replacements(tell, alone):
            patches.enter_context(mock.patch.object(target, name, replacement))
        yield


def _replacements(
    tell: Callable[[str, Any], None], alone: contextlib.AbstractContextManager[Any]
) -> list[tuple[Any, str, Any]]:
    real_open, real_write, real_os_open = io.open, os.write, os.open

    def announced(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*places: Any, dir_fd: int | None = None, **more: Any) -> Any:
            place = places[1] if kind == "rename" else places[0]
            with alone:
                tell(kind, place if dir_fd is None else os.path.join(_path(dir_fd), place))
                return real(*places, **more, **({} if dir_fd is None else {"dir_fd": dir_fd}))

        return call

    def write(handle: int, content: Any) -> int:
        if not _regular(handle):
            return real_write(handle, content)
        view = memoryview(content)
        with alone:
            tell("write", handle)
            written = real_write(handle, view[: (len(view) + 1) // 2])
        if written < len(view):
            with alone:
                tell("rest", handle)
                written += real_write(handle, view[written:])
        return written

    def os_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        with alone:
            if flags & (os.O_CREAT | os.O_TRUNC):
                tell("open", path)
            return real_os_open(path, flags, *rest, **more)

    class File(io.FileIO):
        """A file whose writes are announced."""

        def write(self, content: Any) -> int:
            return write(self.fileno(), content)

        def truncate(self, size: int | None = None) -> int:
            with alone:
                tell("truncate", self.fileno())
                return super().truncate(size)

    def opened(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+"):
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        with alone:
            if not isinstance(file, int):
                tell("open", file)
            raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

    plain = [
        (os, name, announced(kind, getattr(os, name))) for kind, names in CALLS.items() for name in names
    ]
    return [
        *plain,
        (builtins, "open", opened),
        (io, "open", opened),
        (os, "write", write),
        (os, "open", os_open),
    ]


def _path(place: Any) -> str:
    try:
        if isinstance(place, int):
            return os.readlink(f"/proc/self/fd/{place}")
        path = os.fspath(place)
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        return os.path.join(os.path.realpath(folder), name)
    except (OSError, TypeError, ValueError):  # what cannot be named is not ours
        return ""


def _regular(handle: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(handle).st_mode)
    except OSError:
        return False


# ---- folders as they stand


def digest(folder: Path, temporaries: bool = True) -> str:
    """What a folder holds, to tell whether two are the same; of temporary files perhaps only that they are there."""
    told = hashlib.sha256()
    for root, folders, names in os.walk(folder):
        folders.sort()
        place = root[len(str(folder)) :]
        for name in sorted(names):
            looked_at = temporaries or not name.startswith(".")
            content = Path(root, name).read_bytes() if looked_at else b""
            told.update(f"{place} {_without_chance(name)} {len(content)} ".encode() + content)
        told.update(f"{place} {folders} ".encode())
    return told.hexdigest()


def _without_chance(name: str) -> str:
    """A temporary file's name without its random part."""
    return re.sub(r"^(\..*)\.[0-9a-f]{6,}(\.tmp)?$", r"\1\2", name)


def copy(source: Path, target: Path) -> None:
    """The folder again elsewhere, in place of what was there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)


def remove(folder: Path) -> None:
    """The folder and everything in it gone."""
    shutil.rmtree(folder, ignore_errors=True)
