"""Where a sweep's trials are written down: a journal file, or a database by its URL, whose password is never shown.

Optuna decides what is written and reads it; here a place is opened, lines of a journal are added, and what goes wrong
becomes a sentence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from deeprnn.errors import MissingExtra, UserError, need
from deeprnn.files import CannotWrite, explained

JOURNAL = "journal.log"
BEGINNING = b'{"op_code"'
"""of a journal"""
CONNECT = 5
"""seconds for a database to answer"""
CREATIONS = 5
"""attempts at making the tables: of sweeps that begin at once, all but one find them half made"""
PAUSE = 0.5
"""seconds between two of them"""
DRIVERS = ("psycopg", "psycopg2")
"""for PostgreSQL: SQLAlchemy alone would insist on one, and on another in its next release"""


class Opened(NamedTuple):
    """A storage of Optuna's, and what forces to disk all that it was told."""

    storage: Any
    sync: Callable[[], None]


def open_storage(optuna: Any, folder: Path, storage: str) -> Opened:
    """Optuna's storage at a URL or in a journal file; without either in the folder's own journal."""
    if is_url(storage):
        return Opened(_database(optuna, storage), lambda: None)  # which forces each of its transactions
    return _journal(optuna, Path(storage) if storage else folder / JOURNAL)


def is_url(storage: str) -> bool:
    """Whether a database is meant."""
    return "://" in storage


def without_password(storage: str) -> str:
    """A storage for a person and for files: without password, and without options that may hold one."""
    if not is_url(storage):
        return storage
    return re.sub(r"\?.*", "?…", re.sub(r"(://[^:/@]*):.*@", r"\1:***@", storage))


def storage_note(storage: str) -> str:
    """A storage as a sweep's folder notes it, to be found again from elsewhere."""
    return without_password(storage) if is_url(storage) or not storage else str(Path(storage).absolute())


def same_place(first: str, second: str) -> bool:
    """Whether two spellings of a storage, with or without user and password, mean one place."""

    def plain(storage: str) -> str:
        if not is_url(storage):
            return storage_note(storage)
        scheme, _, rest = storage.partition("://")
        return f"{scheme.partition('+')[0]}://{rest.rpartition('@')[2].partition('?')[0]}"

    return plain(first) == plain(second)


# ---- a file


def _journal(optuna: Any, path: Path) -> Opened:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_journal(path)
        _append(path, b"", sync=False)  # makes it, or cuts off half a line
        backend = _backend(optuna, path)
        with damage_explained(str(path)):
            return Opened(optuna.storages.JournalStorage(backend), lambda: _append(path, b"", sync=True))
    except CannotWrite:
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be used as a journal ({error.strerror}): choose another --storage"
        ) from None


def _backend(optuna: Any, path: Path) -> Any:
    """Optuna's reader of a journal, with a way of writing that leaves no half lines and waits for the disk seldom."""

    class Journal(optuna.storages.journal.JournalFileBackend):
        def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            _append(path, lines.encode(), sync=any(map(_is_decisive, logs)))

    return Journal(str(path))


def _is_decisive(line: Mapping[str, Any]) -> bool:
    """Whether a line says how a trial ended, or what the study is.

    Those are forced to disk, and all that stands before them with them. Of the many scores of single epochs a loss of
    power may take the last.
    """
    return "state" in line or not {"trial_id", "datetime_start"} & line.keys()


def _append(path: Path, lines: bytes, sync: bool) -> None:
    """Add lines while nobody else does; half a line that a full disk or a loss of power left before is cut off."""
    with explained(path), _locked(path), open(path, "ab+", buffering=0) as file:
        _cut_torn_line(file)
        before = file.seek(0, os.SEEK_END)
        try:
            while lines:
                lines = lines[file.write(lines) :]
        except OSError:
            file.truncate(before)
            raise
        if sync:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A lock beside the journal that the system takes back from a process that dies."""
    import fcntl

    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _check_journal(path: Path) -> None:
    """Refuse a file that was never a journal, before anything is written beside it or into it."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file, and cannot be a journal: choose another --storage")
    if path.exists():
        with open(path, "rb") as file:
            content = file.read(len(BEGINNING))
        if not BEGINNING.startswith(content):
            raise UserError(f"{path} is no journal of a sweep: move it away, or choose another --storage")


def _cut_torn_line(file: FileIO) -> None:
    """Take away half a line at the end; nobody has acted on it."""
    if not file.seek(0, os.SEEK_END):
        return
    file.seek(-1, os.SEEK_END)
    if file.read() != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


@contextlib.contextmanager
def damage_explained(storage: str) -> Iterator[None]:
    """A journal or a study that was damaged, as a sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{without_password(storage)}: {error}") from None
    except (ValueError, KeyError, AssertionError, TypeError, AttributeError) as error:
        raise UserError(
            f"{without_password(storage)} is no journal of a sweep, or is damaged ({error}): move it away, or choose "
            "another folder"
        ) from None


# ---- a database


def _database(optuna: Any, url: str) -> Any:
    """A storage behind a URL; one that does not answer is an error within seconds."""
    if url.partition("://")[2].partition("?")[0].count("@") > 1:
        raise UserError(f"--storage {without_password(url)}: an @ in a password or a name is written %40")
    with_driver = _with_driver(url)
    options: dict[str, Any] = {}
    if with_driver.startswith(("postgresql", "mysql")):
        # One that was started anew meanwhile is connected to again.
        options = {"connect_args": {"connect_timeout": CONNECT}, "pool_pre_ping": True}
    for attempt in range(CREATIONS):
        try:
            return optuna.storages.get_storage(optuna.storages.RDBStorage(with_driver, engine_kwargs=options))
        except ImportError as error:
            raise MissingExtra(
                f"--storage {without_password(url)}: its driver is not installed ({error})"
            ) from None
        except (*database_errors(optuna), ValueError, OSError) as error:
            if attempt == CREATIONS - 1 or not _made_by_another(error):
                raise UserError(
                    f"--storage {without_password(url)} cannot be used: {first_line(error, url)}"
                ) from None
            time.sleep(PAUSE)
    raise AssertionError("the last attempt returns or raises")


def _with_driver(url: str) -> str:
    """The URL with the PostgreSQL driver that is installed."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        return url
    for driver in DRIVERS:
        if importlib.util.find_spec(driver) is not None:
            return f"postgresql+{driver}://{rest}"
    raise MissingExtra(
        f"--storage {without_password(url)} needs the package 'psycopg': pip install 'deeprnn[postgresql]'"
    )


def _made_by_another(error: Exception) -> bool:
    """Whether another sweep made a table or a row at the same moment: there already, or not quite yet."""
    sql = need("sqlalchemy.exc", extra="sweep")
    return isinstance(error, sql.IntegrityError | sql.ProgrammingError) or "already exists" in str(error)


def database_errors(optuna: Any) -> tuple[type[Exception], ...]:
    """What a database raises that cannot be reached, or no longer."""
    sql = need("sqlalchemy.exc", extra="sweep")
    return (sql.SQLAlchemyError, optuna.exceptions.StorageInternalError)


def first_line(error: BaseException, url: str) -> str:
    """The first line of what a driver says, which Optuna wraps, without the password."""
    while error.__cause__ is not None and type(error).__name__ == "StorageInternalError":
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text, user = lines[0], url.partition("://")[2].rpartition("@")[0]
    password = user.partition(":")[2]
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, "***")
    return text[:200]
