"""The one way files are written: whole or not at all.

A file is written under a temporary name beside its place, forced to disk and renamed. Whoever looks sees the old
content or the new; an error (a full disk, no permission, a device that fails) or a kill leaves the old one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from deeprnn.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = ".tmp"


class CannotWrite(UserError, OSError):
    """A file could not be written; what stood in its place still stands."""


class DiskFull(CannotWrite):
    """There was no room for a file."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Give `path` this content, whole or not at all; text is UTF-8."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: Any) -> None:
    """A JSON file, atomically."""
    write_atomically(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_new(path: Path, content: bytes | str) -> bool:
    """Give `path` this content unless something stands there, which then stays as it is; whether it was written."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = write_temporary(path, content.encode() if isinstance(content, str) else content)
        try:
            os.link(temporary, path)  # unlike a rename, never in place of another file
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        sync_folder(path.parent)
    return True


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write to that takes its place when the block ends without an error."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        if temporary != path:
            os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path for code that opens files itself; what it writes there becomes `path`."""
    if _is_device(path.absolute()):
        with explained(path):
            yield path  # /dev/stdout, /dev/null: to be written to, never to be replaced
        return
    with _attempt(path) as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)


def write_temporary(path: Path, content: bytes) -> Path:
    """Write under a temporary name in the folder of `path` and force it to disk; the caller renames it."""
    with _attempt(path) as temporary, temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder survive a loss of power."""
    if os.name == "nt":  # Windows cannot open a folder; its file system journals renames
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that killed processes left. Nobody else may be writing there."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the system while `path` is written, in a person's words."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(what: object, error: OSError) -> CannotWrite:
    """The error of a failed write in a person's words."""
    reason = error.strerror or str(error)
    if error.errno in NO_ROOM:
        return DiskFull(
            f"no room to write {what} ({reason}); what was there before is intact: free some space and try again"
        )
    return CannotWrite(f"cannot write {what} ({reason}); what was there before is intact")


# ---- parts


def _is_device(path: Path) -> bool:
    return path.is_relative_to("/dev") and not path.is_relative_to(
        "/dev/shm"
    )  # which is memory with ordinary files


@contextlib.contextmanager
def _attempt(path: Path) -> Iterator[Path]:
    """A temporary name for one attempt to write `path`; a failed one leaves nothing and is explained."""
    # A name of its own, so that two processes that write one file do not mix; short, as file systems limit names.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        yield temporary
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if (
            isinstance(error, OSError)
            and not isinstance(error, UserError)
            and _concerns(error, path, temporary)
        ):
            raise cannot_write(path, error) from error
        raise


def _concerns(error: OSError, path: Path, temporary: Path) -> bool:
    """Whether an error is about writing `path`, and not about another file that was read meanwhile."""
    if error.filename is None:
        return True
    about = Path(os.fsdecode(error.filename)).name
    return about in (path.name, temporary.name, *(folder.name for folder in path.parents))
