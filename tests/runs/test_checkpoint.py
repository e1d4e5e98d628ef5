"""Checkpoints: whole at every moment, checked when read, one process a folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deeprnn.errors import UserError
from deeprnn.runs import checkpoint
from deeprnn.runs.checkpoint import DiskFull, load_best, load_state, lock, save_best, save_state


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


@pytest.mark.parametrize("calls", range(4))
def test_a_death_between_any_two_renames_leaves_a_whole_checkpoint(tmp_path, monkeypatch, calls):
    save(tmp_path, 0)
    save(tmp_path, 1)
    real, count = os.replace, iter(range(100))

    def replace(a, b):
        if next(count) >= calls:
            raise KeyboardInterrupt  # as good as dead
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert read(tmp_path) == 1
    save(tmp_path, 3)
    assert read(tmp_path) == 3


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
    real, count = os.write, iter(range(100))

    def write(handle, content):
        if next(count) >= after:
            real(handle, bytes(content)[:10])
            raise OSError(code, os.strerror(code))
        return real(handle, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(DiskFull, match=r"no room to write .* intact"):
            save(tmp_path, 2)
    assert read(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir() if "json" not in p.name) == (
        ["last.safetensors"] if after == 0 else [".last.safetensors.tmp", "last.safetensors"]
    )


def test_a_real_file_size_limit(tmp_path):
    """The same by the system's own hand: ulimit -f."""
    save(tmp_path, 1)
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "import torch; from pathlib import Path; from deeprnn.runs.checkpoint import save_state, DiskFull\n"
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


def test_a_death_between_the_two_files_of_the_best_leaves_it_readable(tmp_path, monkeypatch):
    save_best(tmp_path, state(5), {"epoch": 5})
    real = os.replace

    def replace(a, b):
        if str(b).endswith(".safetensors"):
            raise KeyboardInterrupt
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            save_best(tmp_path, state(6), {"epoch": 6})
    assert load_best(tmp_path).tensors["tau"] == 5
    save_best(tmp_path, state(7), {"epoch": 7})
    assert load_best(tmp_path).tensors["tau"] == 7


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path):
    script = (
        "import sys; from pathlib import Path; from deeprnn.runs.checkpoint import lock\n"
        "from deeprnn.errors import UserError\n"
        "try:\n  with lock(Path(sys.argv[1])): print('held')\n"
        "except UserError as e: print(e)"
    )

    def other() -> str:
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        return done.stdout

    with lock(tmp_path):
        assert f"in use by process {os.getpid()}" in other()
    assert other() == "held\n"


def test_a_full_disk_does_not_keep_a_folder_from_being_held(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with checkpoint.lock(tmp_path):
            assert checkpoint.held(tmp_path)
    assert not checkpoint.held(tmp_path)
    with checkpoint.lock(tmp_path):
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())


def test_reading_never_unpickles(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "last.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match="checksum"):
        load_state(tmp_path)
    assert not hasattr(checkpoint, "pickle")
