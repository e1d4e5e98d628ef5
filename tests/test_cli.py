"""The command line: finding commands, teaching help, errors without tracebacks, doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from deeprnn import cli, console


def outcome(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = cli.main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv, capsys):
    status, out, _ = outcome(capsys, *argv)
    assert status == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert f"  {name}" in out
        assert line in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_class_that_runs_and_help_that_explains_it(name, capsys):
    module, _, cls = cli.COMMANDS[name][0].partition(":")
    command = getattr(import_module(f"deeprnn.commands.{module}"), cls)
    assert callable(command.run)
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    first = command.__doc__.strip().split("\n")[0].split()[:4]
    assert " ".join(first) in " ".join(out.replace("│", " ").split())


def test_version(capsys):
    status, out, _ = outcome(capsys, "--version")
    assert (status, out.split()[0]) == (0, "deeprnn")


def test_a_misspelt_command_is_an_error_with_the_nearest_name(capsys):
    status, out, err = outcome(capsys, "tran", "jsb")
    assert (status, out) == (2, "")
    assert "did you mean 'train'?" in err
    assert "Traceback" not in err


def test_a_family_lists_its_members(capsys):
    status, _, err = outcome(capsys, "data")
    assert status == 2
    assert "deeprnn data check" in err
    status, out, _ = outcome(capsys, "data", "--help")
    assert status == 0
    assert "deeprnn data check" in out
    status, _, err = outcome(capsys, "data", "chek")
    assert status == 2
    assert "data import" in err


def test_an_error_of_use_is_one_line_and_status_2(capsys, tmp_path):
    status, out, err = outcome(capsys, "evaluate", str(tmp_path / "nowhere"))
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert "Traceback" not in err


def test_an_interruption_is_status_130(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    status, _, err = outcome(capsys, "doctor")
    assert (status, err) == (130, "interrupted\n")


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from deeprnn.cli import main; sys.exit(main(['describe', '--table1', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        status = process.wait(60)
    assert b"Traceback" not in err
    assert status in (0, 120)  # 120: Python itself could not flush what was left


def test_help_does_not_wait_for_torch():
    code = "import sys; from deeprnn.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_doctor_says_what_is_here(capsys):
    status, out, _ = outcome(capsys, "doctor", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["packages"]["torch"]
    assert set(found["data"]["sets"]) >= {"jsb", "nottingham", "musedata", "ptb-char", "ptb-word"}
    cpu = [row for row in found["backends"] if row["device"] == "cpu"]
    assert {row["backend"] for row in cpu} == {"cpu"}
    status, out, _ = outcome(capsys, "doctor")
    assert status == 0
    assert "DT(S)-RNN 400,400" in out


def test_doctor_finds_data_where_it_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPRNN_DATA", str(tmp_path))
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path / "cache"))
    assert json.loads(outcome(capsys, "doctor", "--json")[1])["data"]["sets"]["jsb"] is None
    file = tmp_path / "music" / "JSB_Chorales.mat"
    file.parent.mkdir()
    file.write_bytes(b"not read here")
    assert json.loads(outcome(capsys, "doctor", "--json")[1])["data"]["sets"]["jsb"] == str(file)


def test_the_program_is_named_as_it_can_be_typed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "deeprnn"), "demo"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert console.program() == "bin/deeprnn"
    found = tmp_path / "bin" / "deeprnn"
    found.parent.mkdir()
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent))
    assert console.program() == "deeprnn"
