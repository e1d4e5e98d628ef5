"""Checkpoints: whole at every moment, checked when read."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deeprnn import files
from deeprnn.errors import UserError
from deeprnn.files import DiskFull
from deeprnn.runs import checkpoint
from deeprnn.runs.checkpoint import load_best, load_state, save_best, save_state


def state(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), float(number)), "tau": torch.tensor(number)}


def save(folder: Path, number: int) -> None:
    save_state(folder, state(number), {"number": number, "rate": 0.1 * number})


def read(folder: Path) -> int:
    found = load_state(folder)
    assert found is not None
    assert found.tensors["w"].tolist() == [float(found.meta["number"])] * 100
    return found.meta["number"]


def test_the_newest_is_read_and_the_one_before_is_kept(tmp_path):
    assert load_state(tmp_path) is None
    for number in range(3):
        save(tmp_path, number)
        assert read(tmp_path) == number
    assert json.loads((tmp_path / "previous.json").read_text())["meta"]["number"] == 1
    assert load_state(tmp_path).meta["rate"] == 0.2  # type: ignore[union-attr]


class Killed(BaseException):
    """As good as dead: nothing that the process meant to do happens any more."""


@contextmanager
def renames_by(replace: Callable[[Any, Any], None], folder: Path) -> Iterator[None]:
    """Rename by `replace` in this folder; what other threads of the process rename elsewhere is not disturbed."""
    real = os.replace

    def wherever(a, b, **options):
        (replace if Path(b).parent == folder else partial(real, **options))(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", wherever)
        yield


@contextmanager
def killed_after(renames: int, folder: Path) -> Iterator[None]:
    """Let so many renames happen in a folder and die at the next; a block that needs fewer survives."""
    real, count = os.replace, itertools.count()

    def replace(a, b):
        if next(count) >= renames:
            raise Killed
        real(a, b)

    with renames_by(replace, folder), suppress(Killed):
        yield


RENAMES = range(5)
"""a save has four; after all of them it has survived"""


@pytest.mark.parametrize("kills", [*itertools.product(RENAMES), *itertools.product(RENAMES, RENAMES)])
def test_kills_at_any_rename_of_a_save_and_of_the_next_leave_a_whole_checkpoint(tmp_path, kills):
    save(tmp_path, 0)
    save(tmp_path, 1)
    newest = 1
    for number, renames in enumerate(kills, 2):
        with killed_after(renames, tmp_path):
            save(tmp_path, number)
        assert read(tmp_path) in ((number,) if renames == 4 else (newest, number))
        newest = read(tmp_path)
    save(tmp_path, 9)
    assert read(tmp_path) == 9


def test_a_long_row_of_kills_never_loses_what_was_saved(tmp_path):
    chance = random.Random(1)
    save(tmp_path, 0)
    newest = 0
    for number in range(1, 150):
        with killed_after(chance.randrange(5), tmp_path):
            save(tmp_path, number)
        assert read(tmp_path) >= newest
        newest = read(tmp_path)
    assert newest > 20


@pytest.mark.parametrize("first", RENAMES)
def test_a_loss_of_power_may_undo_any_renames_that_were_not_forced_to_disk(tmp_path, first):
    """After a kill in one save: every state the disk may be in at any moment of the next save is loaded."""
    save(tmp_path, 0)
    save(tmp_path, 1)
    with killed_after(first, tmp_path):
        save(tmp_path, 2)
    newest = read(tmp_path)
    on_disk, pending, moments = {}, [], []

    def disk() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def replace(a, b):
        if not pending:
            on_disk.update(disk())
        pending.append((Path(a).name, Path(b).name))
        real(a, b)
        moments.append((dict(on_disk), list(pending)))

    def sync(folder):
        pending.clear()
        on_disk.clear()

    real = os.replace
    with renames_by(replace, tmp_path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "sync_folder", sync)
        save(tmp_path, 3)
    assert len(moments) >= 2
    for number, (files_then, renames) in enumerate(moments):
        for kept in itertools.product((True, False), repeat=len(renames)):
            names = dict(files_then)
            for (a, b), happened in zip(renames, kept, strict=True):
                if happened:
                    names[b] = names.pop(a)
            place = tmp_path / f"{number}-{''.join(str(int(k)) for k in kept)}"
            place.mkdir()
            for name, content in names.items():
                (place / name).write_bytes(content)
            assert read(place) >= newest


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "json", "meta"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_used(tmp_path, caplog, harm):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "last.safetensors"
    if harm == "truncate":
        os.truncate(path, 50)
    elif harm == "flip":
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.write_bytes(content)
    elif harm == "remove":
        path.unlink()
    elif harm == "json":
        (tmp_path / "last.json").write_text('{"format": 1, "sha')
    else:
        text = (tmp_path / "last.json").read_text()
        (tmp_path / "last.json").write_text(text.replace('"number": 2', '"number": 4'))
    with caplog.at_level(logging.WARNING, logger="deeprnn"):
        assert read(tmp_path) == 1
    assert "previous.json" in caplog.text


def test_two_damaged_checkpoints_are_an_error(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    for name in ("last", "previous"):
        os.truncate(tmp_path / f"{name}.safetensors", 9)
    with pytest.raises(UserError, match="no whole checkpoint"):
        load_state(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, code, after):
    save(tmp_path, 1)
    real, count, this_thread = os.fsync, itertools.count(), threading.get_ident()

    def fsync(handle):
        if threading.get_ident() == this_thread and next(count) >= after:
            raise OSError(code, os.strerror(code))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFull, match=r"no room to write .* intact"):
            save(tmp_path, 2)
    assert read(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.json", "last.safetensors"]


def test_a_real_file_size_limit(tmp_path):
    """The same by the system's own hand: ulimit -f."""
    save(tmp_path, 1)
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "import torch; from pathlib import Path; from deeprnn.files import DiskFull;"
        "from deeprnn.runs.checkpoint import save_state\n"
        "try: save_state(Path(sys.argv[1]), {'w': torch.zeros(5000)}, {})\n"
        "except DiskFull as e: print('full:', e); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert read(tmp_path) == 1


def test_the_best_parameters_are_checked(tmp_path):
    with pytest.raises(UserError, match="first epoch"):
        load_best(tmp_path)
    save_best(tmp_path, state(5), {"epoch": 5})
    assert load_best(tmp_path).meta == {"epoch": 5}
    os.truncate(tmp_path / "best.safetensors", 60)
    with pytest.raises(UserError, match="checksum"):
        load_best(tmp_path)


def forge(folder: Path, name: str, content: bytes) -> None:
    """Other bytes in the place of the tensors, with the checksum to match."""
    (folder / f"{name}.safetensors").write_bytes(content)
    sidecar = json.loads((folder / f"{name}.json").read_text())
    sidecar |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / f"{name}.json").write_text(json.dumps(sidecar))


@pytest.mark.parametrize(
    "header", [b"", b"[" * 100_000, b"[1]", b'{"a":{"dtype":"F8_E8M0","shape":[0],"data_offsets":[0,0]}}']
)
def test_forged_tensors_are_refused_in_words(tmp_path, header):
    save(tmp_path, 1)
    save_best(tmp_path, state(1), {"epoch": 1})
    for name, load in (("best", load_best), ("last", load_state)):
        forge(tmp_path, name, len(header).to_bytes(8, "little") + header)
        with pytest.raises(UserError, match=rf"{name}.safetensors holds no tensors"):
            load(tmp_path)


def test_a_death_between_the_two_files_of_the_best_leaves_it_readable(tmp_path):
    save_best(tmp_path, state(5), {"epoch": 5})
    real = os.replace

    def replace(a, b):
        if str(b).endswith(".safetensors"):
            raise KeyboardInterrupt
        real(a, b)

    with renames_by(replace, tmp_path), pytest.raises(KeyboardInterrupt):
        save_best(tmp_path, state(6), {"epoch": 6})
    assert load_best(tmp_path).tensors["tau"] == 5
    save_best(tmp_path, state(7), {"epoch": 7})
    assert load_best(tmp_path).tensors["tau"] == 7


@pytest.mark.parametrize("key", ["format", "sha256", "meta", "meta_sha256"])
def test_a_missing_key_of_the_best_is_damage_that_is_named(tmp_path, key):
    save_best(tmp_path, state(5), {"epoch": 5})
    content = json.loads((tmp_path / "best.json").read_text())
    del content[key]
    (tmp_path / "best.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"best.json is damaged: it has no '{key}'; .*resume"):
        load_best(tmp_path)


def test_the_best_is_read_while_it_is_replaced(tmp_path, monkeypatch):
    """The JSON of one and the tensors of the next: read again, not taken for damage."""
    save_best(tmp_path, state(5), {"epoch": 5})
    real, writers = checkpoint._read_sidecar, iter([6])

    def slow(path):
        found = real(path)
        for number in writers:
            save_best(tmp_path, state(number), {"epoch": number})
        return found

    monkeypatch.setattr(checkpoint, "_read_sidecar", slow)
    assert load_best(tmp_path).tensors["tau"] == 6


def test_leftovers_of_killed_processes_are_swept(tmp_path):
    save(tmp_path, 1)
    with killed_after(0, tmp_path):
        save(tmp_path, 2)
    assert len(list(tmp_path.glob(".*.tmp"))) == 2
    files.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.json", "last.safetensors"]


def test_reading_never_unpickles(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "last.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match="checksum"):
        load_state(tmp_path)
    assert not hasattr(checkpoint, "pickle")


@pytest.mark.parametrize("name", ["last.safetensors", "last.json"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "huge"])
def test_what_is_no_regular_file_of_its_size_is_damage_and_never_waited_for(tmp_path, caplog, name, what):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    assert read(tmp_path) == 1
    if what != "folder":
        save(tmp_path, 3)
        assert read(tmp_path) == 3
