"""Compiled code on disk: what is read back, and what never is."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from deeprnn.backends import code_cache

CODE = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def test_code_comes_back_as_it_was():
    assert code_cache.read("one.o") is None
    code_cache.keep("one.o", CODE)
    assert code_cache.read("one.o") == CODE


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"!" + b[41:], lambda b: b + b"0"]
)
def test_damaged_code_is_not_taken(folder, damage):
    code_cache.keep("one.o", CODE)
    (folder / "one.o").write_bytes(damage((folder / "one.o").read_bytes()))
    assert code_cache.read("one.o") is None


def test_whole_code_under_another_name_is_not_taken(folder):
    """Its function would not be found, and address 0 be called."""
    code_cache.keep("one.o", CODE)
    (folder / "one.o").rename(folder / "two.o")
    assert code_cache.read("two.o") is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without owners of files")
def test_code_that_others_may_write_is_not_taken(folder, monkeypatch):
    code_cache.keep("one.o", CODE)
    (folder / "one.o").chmod(0o666)
    assert code_cache.read("one.o") is None
    (folder / "one.o").chmod(0o664)  # a group of its own is a user's default on many systems
    assert code_cache.read("one.o") == CODE
    owner = os.stat(folder / "one.o").st_uid
    os.chown(folder / "one.o", owner, -1)
    if owner:  # a file of another user's, seen from here
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        assert code_cache.read("one.o") is None


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("no folder")
    code_cache.keep("one.o", CODE)
    assert code_cache.read("one.o") is None


def write_often(seed: int) -> None:
    for _ in range(30):
        code_cache.keep("one.o", bytes([seed]) * 50_000)


def test_two_processes_may_write_the_same_file_while_a_third_reads(folder):
    code_cache.keep("one.o", bytes([1]) * 50_000)
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_often, args=(seed,)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        code = code_cache.read("one.o")
        assert code is not None
        seen.add((len(code), code[0]))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {(50_000, 1), (50_000, 2)}
    assert [path.name for path in folder.iterdir()] == ["one.o"]
