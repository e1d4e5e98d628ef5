"""`deeprnn serve` as a command."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from deeprnn.cli import main
from deeprnn.commands.serve import Serve
from deeprnn.errors import UserError


def test_it_binds_to_this_machine_alone_by_default() -> None:
    assert Serve().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "edit", "may"),
    [("127.0.0.1", "local", True), ("::1", "local", True), ("localhost", "local", True), ("0.0.0.0", "local", False),
     ("music.lan", "local", False), ("0.0.0.0", "always", True), ("127.0.0.1", "never", False)],
)  # fmt: skip
def test_runs_are_changed_from_this_machine_alone_by_default(host: str, edit: Any, may: bool) -> None:
    assert Serve(host=host, edit=edit).editable is may


def test_a_missing_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_taken_port_is_a_plain_message(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "try --port 0" in capsys.readouterr().err
    assert main(["serve", str(folder), "--port", "99999"]) == 2
    assert main(["serve", str(folder), "--workers", "0"]) == 2


def test_it_serves_and_stops(folder: Path) -> None:
    command = [sys.executable, "-m", "deeprnn.cli", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", told)
        assert url, told
        assert len(httpx.get(f"{url[0]}api/runs", timeout=30).json()["runs"]) == 6
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode in (0, 130, -signal.SIGINT)


@pytest.mark.parametrize("host", ["\udcff", "a" * 300, "no such host", "é\0"])
def test_a_host_that_is_none_is_one_sentence(host: str):
    with pytest.raises(UserError, match="cannot listen on"):
        Serve(host=host, port=0).run()


@pytest.mark.parametrize("option", ["workers", "threads"])
def test_absurdly_many_threads_are_refused(option):
    with pytest.raises(UserError, match="--workers and --threads must be at most 1,024"):
        Serve(port=0, **{option: 100_000}).run()
