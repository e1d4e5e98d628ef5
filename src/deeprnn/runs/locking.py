"""One process a run folder, by a lock that the system takes back from a process that dies."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from deeprnn.errors import UserError
from deeprnn.files import NO_ROOM, DiskFull
from deeprnn.runs.reading import regular

NAME = ".lock"
PATIENCE = 1.0
"""seconds before a lock counts as held: `held` takes it for a moment to see whether it can"""
LONG_PATIENCE = 30.0
"""seconds for the system to notice the end of a worker that was killed, elsewhere perhaps"""
_PAUSE = 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_WINDOWS = os.name == "nt"
_LOCKED_BYTE = 2**30
"""on Windows a locked byte cannot be read, so it is one far behind the holder's number"""


class InUse(UserError):
    """Another process holds the folder."""


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process.

    A second process is refused and changes nothing. An error that leaves the folder without a single file takes the
    folder away too.
    """
    with _acquire(folder) as file:
        # Unbuffered: on a full disk the holder's number is left out, and nothing is left for close() to fail on.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        try:
            yield
        except BaseException:
            _remove_empty(folder)
            raise
        finally:
            _release(file)


@contextlib.contextmanager
def lock_of_the_dead(folder: Path, received: Sequence[int] = ()) -> Iterator[None]:
    """Hold a folder, with patience for a worker whose end the system has not noticed yet; none after a signal."""
    deadline = time.monotonic() + LONG_PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock(folder))
                break
            except InUse:
                if time.monotonic() > deadline or received:
                    raise
        yield


def held(folder: Path) -> bool:
    """Whether some process holds a run folder now."""
    if not regular(folder / NAME):
        return False
    with open(folder / NAME) as file:
        if not _take(file, shared=True):
            return True
        _release(file)
    return False


def _acquire(folder: Path) -> IO[str]:
    """The folder's lock file, locked."""
    deadline = time.monotonic() + PATIENCE
    while True:
        file = _open(folder)
        try:
            taken = _take(file)
            if taken and _is_current(file, folder / NAME):
                return file
            file.seek(0)
            owner = file.read().strip() or "unknown"
        except BaseException:
            file.close()
            raise
        file.close()
        if not taken and time.monotonic() >= deadline:
            raise InUse(
                f"{folder} is in use by process {owner}: wait for it, stop it, or choose another folder"
            )
        time.sleep(_PAUSE)


def _open(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder / NAME) and not regular(folder / NAME):
            raise UserError(f"{folder / NAME} is no regular file: remove it")
        return open(folder / NAME, "a+")
    except OSError as error:
        full = error.errno in NO_ROOM
        remedy = "free some space" if full else "choose another folder, or give it the right to be written"
        raise (DiskFull if full else UserError)(
            f"cannot write in {folder} ({error.strerror}): {remedy}"
        ) from None


def _is_current(file: IO[str], path: Path) -> bool:
    """Whether the file is still the one of that name: its holder may have taken it away with the folder."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_empty(folder: Path) -> None:
    """Take away a folder in which nothing was begun; only its holder may."""
    with contextlib.suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {NAME}:
            (folder / NAME).unlink(
                missing_ok=True
            )  # Windows keeps a file that is open, and with it the folder
            folder.rmdir()


def _take(file: IO[str], shared: bool = False) -> bool:
    """Lock an open file if nobody has; Windows knows no shared locks."""
    try:
        if _WINDOWS:
            _windows_lock(file, "LK_NBLCK")
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise UserError(
            f"{file.name} cannot be locked ({error.strerror}): keep runs on a file system that knows locks"
        ) from error
    return True


def _release(file: IO[str]) -> None:
    if _WINDOWS:
        _windows_lock(file, "LK_UNLCK")
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def _windows_lock(file: IO[str], mode: str) -> None:
    import msvcrt

    os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
    msvcrt.locking(file.fileno(), getattr(msvcrt, mode), 1)  # type: ignore[attr-defined]
    os.lseek(file.fileno(), 0, os.SEEK_SET)
