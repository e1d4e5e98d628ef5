"""Files are written whole or not at all, and an error is one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.files import CannotWrite, DiskFull, open_atomically, replacing, write_atomically
from tests.small_runs import music_folder, small_run, text_file

SRC = Path(__file__).parents[1] / "src" / "deeprnn"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_replaces_content_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "page.html"
    write_atomically(path, "grün")
    assert path.read_bytes() == "grün".encode()
    with open_atomically(path) as file:
        file.write(b"blue")
        assert path.read_bytes() == "grün".encode()
    assert path.read_bytes() == b"blue"
    with replacing(path) as temporary:
        temporary.write_bytes(b"red")
    assert path.read_bytes() == b"red"
    assert names(path.parent) == ["page.html"]


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EIO, CannotWrite)])
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, code, kind, where):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    def write() -> None:
        with open_atomically(path) as file:
            file.write(b"half")
            if where == "write":
                fail()

    with monkeypatch.context() as patch:
        if where != "write":
            patch.setattr(os, where, fail)
        with pytest.raises(kind, match=r"a\.txt \(.*\)") as raised:
            write()
    assert isinstance(raised.value, UserError)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_an_interrupt_or_a_fault_of_the_writer_passes_through(tmp_path):
    def write(error: BaseException) -> None:
        with open_atomically(tmp_path / "a.txt") as file:
            file.write(b"half")
            raise error

    for error in (KeyboardInterrupt(), ZeroDivisionError(), FileNotFoundError(2, "none", "/elsewhere/b.txt")):
        with pytest.raises(type(error)) as raised:
            write(error)
        assert raised.value is error
    assert names(tmp_path) == []


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", tmp_path):
        with pytest.raises(CannotWrite, match=f"cannot write {path} "):
            write_atomically(path, "")


def test_a_long_name_is_no_obstacle(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(path, "x")
    assert path.read_text() == "x"


def test_a_device_is_written_to_and_never_replaced():
    before = os.stat("/dev/null")
    write_atomically(Path("/dev/null"), "away")
    assert os.path.samestat(before, os.stat("/dev/null"))
    with pytest.raises(DiskFull, match="/dev/full"):
        write_atomically(Path("/dev/full"), "x")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory here")
def test_the_file_system_in_memory_is_no_device():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = Path(place) / "new" / "file"
        write_atomically(path, "old")
        with pytest.raises(ValueError), open_atomically(path) as file:  # noqa: PT012
            file.write(b"half of the ne")
            raise ValueError
        assert path.read_bytes() == b"old"


def test_nothing_else_in_the_package_writes_files():
    """One writer: whoever opens a file to write it another way is on this list, with a reason."""
    import ast

    allowed = {
        "files.py",
        "runs/locking.py",  # a lock file has no content to lose
        "training/saving.py",  # appends lines to metrics.jsonl, whose length the checkpoint holds
        "training/tracking.py",  # appends records to an event file, whose reader leaves out half of one
        "training/progress.py",  # appends lines for whoever looks on, which go with their epoch
        "sweeps/trial_storage.py",  # appends lines to a journal, half of one is cut off
        "data/download.py",  # goes on with a half-received file
        "bench/measure.py",  # tells the kernel to count memory anew
    }
    writers = {"write_bytes", "write_text", "savefig", "mkstemp", "NamedTemporaryFile"}
    found = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            opens = name == "open" and any(
                set(text) <= set("rwaxbt+") and set(text) & set("wax") for text in texts
            )
            if (opens or name in writers) and not _to_memory(node):
                found.add(path.relative_to(SRC).as_posix())
    assert found <= allowed, sorted(found - allowed)


def _to_memory(node) -> bool:
    """Whether a call's first argument is a buffer or an open file, by its name."""
    import ast

    return bool(node.args) and isinstance(node.args[0], ast.Name) and node.args[0].id in ("buffer", "file")


@pytest.mark.parametrize(
    "words", ["--help", "describe dots", "describe dots --png /dev/full", "train --help"]
)
def test_a_full_disk_behind_the_output_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deeprnn", *words.split()], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("generate {text} --length 9000 --out {out} --no-copy-check --seed 1", "char-rnn-1-seed1.txt"),
        (
            "generate {music} --length 64 --formats wav --out {out} --no-copy-check --seed 1",
            "music-rnn-1-seed1.wav",
        ),
        ("report {text} --html {out}/report.html", "report.html"),
        ("describe dots --png {out}/dots.png", "dots.png"),
        ("data import {book} --out {out}/book.npz", "book.npz"),
        ("data show {tunes} --png {out}/roll.png", "roll.png"),
    ],
)
def test_a_command_that_finds_the_disk_full_says_so_and_leaves_no_half_a_file(words, place, tmp_path, capsys):
    import resource

    runs = {kind: small_run(kind).path for kind in ("music", "char")}
    names = {"text": runs["char"], "music": runs["music"], "book": text_file(), "tunes": music_folder()}
    argv = [word.format(out=tmp_path / "out", **names) for word in words.split()]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        status = main(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert said.startswith(f"error: no room to write {tmp_path / 'out' / place}")
    assert not [
        path for path in (tmp_path / "out").iterdir() if path.stat().st_size > 1000 or path.name == place
    ]
    assert not list((tmp_path / "out").glob(".*"))


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m deeprnn --help | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
