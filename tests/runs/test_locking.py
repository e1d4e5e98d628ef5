"""One process a run folder; whoever is refused changes nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from deeprnn.errors import UserError
from deeprnn.runs import locking
from deeprnn.runs.locking import held, lock

TRY = (
    "import sys; from pathlib import Path; from deeprnn.runs.locking import lock\n"
    "from deeprnn.errors import UserError\n"
    "try:\n  with lock(Path(sys.argv[1])): print('held')\n"
    "except UserError as e: print(e)"
)


def other_process(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", TRY, str(folder)], capture_output=True, text=True)
    return done.stdout


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path):
    with lock(tmp_path):
        assert f"in use by process {os.getpid()}" in other_process(tmp_path)
    assert other_process(tmp_path) == "held\n"


def test_who_is_refused_touches_nothing(tmp_path):
    folder = tmp_path / "r"
    with lock(folder):
        before = (folder / ".lock").stat()
        other_process(folder)
        after = (folder / ".lock").stat()
        assert (before.st_ino, before.st_mtime_ns, before.st_size) == (
            after.st_ino,
            after.st_mtime_ns,
            after.st_size,
        )
        assert held(folder)


def test_an_error_takes_an_empty_folder_away_and_leaves_any_other(tmp_path):
    for name, files in (("empty", ()), ("begun", ("recipe.toml",))):
        folder = tmp_path / name

        def begin(folder: Path = folder, files: tuple[str, ...] = files) -> None:
            with lock(folder):
                for file in files:
                    (folder / file).write_text("")
                raise UserError("found out later")

        with pytest.raises(UserError, match="later"):
            begin()
        assert folder.exists() == bool(files)


def test_a_lock_file_that_its_holder_took_away_is_no_lock(tmp_path, monkeypatch):
    """Whoever opened it before must not believe to hold the folder of a third."""
    folder, real, once = tmp_path / "r", locking._open, iter([1])

    def opened_too_early(place):
        file = real(place)
        for _ in once:
            (place / ".lock").unlink()
        return file

    monkeypatch.setattr(locking, "_open", opened_too_early)
    with lock(folder):
        assert (folder / ".lock").read_text().strip() == str(os.getpid())
        assert held(folder)


def test_looking_does_not_keep_a_process_from_its_folder(tmp_path):
    with lock(tmp_path):
        pass
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            held(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with lock(tmp_path):
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_full_disk_does_not_keep_a_folder_from_being_held(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with lock(tmp_path):
            assert held(tmp_path)
    assert not held(tmp_path)
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    import fcntl

    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.raises(UserError, match=r"cannot be locked .*file system"), lock(tmp_path):
        pass


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """`msvcrt.locking` as Windows has it: one byte at the file's position, for one open file; here by inode."""
    taken: dict[int, int] = {}

    def locking_call(handle: int, mode: int, count: int) -> None:
        assert (os.lseek(handle, 0, os.SEEK_CUR), count) == (2**30, 1)
        inode = os.fstat(handle).st_ino
        if mode == 0:
            assert taken.pop(inode) == handle
        elif inode in taken:
            raise OSError(errno.EACCES, "Permission denied")
        else:
            taken[inode] = handle

    fake = types.SimpleNamespace(locking=locking_call, LK_NBLCK=2, LK_UNLCK=0)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setattr(locking, "_WINDOWS", True)
    monkeypatch.setattr(locking, "PATIENCE", 0.0)
    yield taken
    assert not taken


def test_the_same_by_windows_locks(tmp_path, windows):
    with lock(tmp_path):
        assert held(tmp_path)
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), lock(tmp_path):
            pass
        assert held(tmp_path)
    assert not held(tmp_path)
    with lock(tmp_path):
        pass
