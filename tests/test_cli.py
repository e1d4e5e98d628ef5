"""The command line: finding commands, teaching help, errors without tracebacks, doctor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from deeprnn import cli, console
from tests.small_runs import small_run


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


@pytest.mark.parametrize("argv", [["train", "--help"], ["help", "train"], ["help", "data", "get"]])
def test_help_comes_before_or_after_a_command_in_words_that_mean_something(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert not {"STR", "INT", "FLOAT", "{None}"} & set(out.replace("|", " ").split())
    assert "default: ''" not in out
    assert "default: None" not in out
    assert ("--lr" in out) == ("train" in argv)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_fits_sixty_columns(name, capsys, monkeypatch, request):
    monkeypatch.setenv("COLUMNS", "60")
    console.console.cache_clear()  # its width is that of the terminal in which it was first used
    request.addfinalizer(console.console.cache_clear)
    with pytest.raises(SystemExit):
        cli.main([*name.split(), "--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("usage: ")]
    assert max(map(len, lines)) <= 60


def test_the_help_of_train_shows_the_values_of_the_recipe_that_is_named(capsys):
    for words in (["paper/ptb-word/rnn"], ["ptb-word", "--model", "rnn"]):
        with pytest.raises(SystemExit):
            cli.main(["train", *words, "--help", "--epochs", "77"])
        rows = {
            line.split()[1]: line.split()[2]
            for line in capsys.readouterr().out.splitlines()
            if "│ --" in line
        }
        assert (rows["--epochs"], rows["--batch-size"], rows["--optimiser.name"]) == ("77", "16", "adamw")


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("train jsb", "--hiden", "--hidden"),
        ("train jsb", "--epoch", "--epochs"),
        ("train jsb", "--learning-rate", "--lr"),
        ("train jsb", "--batch", "--batch-size"),
        ("train jsb", "--patience", "--stop.patience"),
        ("train jsb", "--stop.epoch", "'stop.epochs'"),
        ("train jsb", "--treads", "--threads"),
        ("train jsb", "--frates", "--rates"),
        ("generate runs/x", "--lenght", "--length"),
        ("data show jsb", "--indx=3", "--index"),
    ],
)
def test_an_unknown_option_is_told_the_nearest_and_not_all(command, option, meant, capsys):
    value = [] if "=" in option else ["3"]
    status, _, err = outcome(capsys, *command.split(), option, *value)
    assert status == 2
    assert f"did you mean {meant}" in err or f"or {meant}?" in err
    near = err.partition("did you mean ")[2].partition("?")[0].split(" or ")
    assert len(near) == len(set(near)), "a name that is an option and a field stands there once"
    assert len(err) < 200


def test_an_unknown_option_like_nothing_is_told_where_all_are(capsys):
    status, _, err = outcome(capsys, "train", "jsb", "--zzzz")
    assert (status, err) == (2, "error: unknown option --zzzz: `deeprnn train --help` lists them all\n")


def test_options_are_parsed_as_their_types_say():
    from deeprnn.commands.arguments import parse
    from deeprnn.commands.generate import Generate

    words = ["runs/x", "--length=5", "--top_k", "3", "--no-keep-primer", "--json", "--formats", "mid", "png"]
    command = parse(Generate, words)
    assert type(command) is Generate
    assert command == Generate(
        Path("runs/x"), length=5, top_k=3, keep_primer=False, json=True, formats=("mid", "png")
    )


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("generate", "RUN is missing: `deeprnn generate --help` says what it is"),
        ("generate runs/x runs/y", "'runs/y' is one word too many for `deeprnn generate`"),
        ("generate runs/x --length abc", "--length takes a whole number, got 'abc'"),
        ("generate runs/x --length=²", "--length takes a whole number, got '²'"),
        (f"generate runs/x --seed {'9' * 5000}", "--seed takes a whole number, got '9999999999999999999999"),
        ("generate runs/x --temperature --json", "--temperature needs a value: NUMBER"),
        (
            "generate runs/x --formats mid waw",
            "--formats takes mid or wav or png, got 'waw' (did you mean wav?)",
        ),
        ("describe dots --hidden 4 x", "--hidden takes a whole number, got 'x'"),
        ("train jsb --level chr", "--level takes auto or char or word, got 'chr' (did you mean char?)"),
    ],
)
def test_a_word_that_does_not_fit_is_told_in_one_sentence(command, complaint, capsys):
    status, out, err = outcome(capsys, *command.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {complaint}")
    assert len(err) < 150


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("bench --batch 1000000000000", "would take at least"),
        ("bench --hidden 99999999999999999999", "--hidden must be at least 1, got 99999999999999999999"),
        ("bench --steps 1000000000000", "would take at least"),
        ("bench --depth 1000000000000", "--depth must be at least 1 and at most 64"),
        ("bench --repeats 99999999999999999999", "--repeats must be at least 1 and at most 10,000"),
        ("bench --steps 0", "--steps must be at least 1, got 0"),
        ("reproduce --plan --only jsb --seeds 99999999999999999999", "--seeds must be from 1 to 1,000"),
    ],
)
def test_sizes_that_nothing_can_hold_are_refused(command, complaint, capsys):
    status, _, err = outcome(capsys, *command.split())
    assert status == 2
    assert complaint in err


@pytest.mark.parametrize("threads", ["100000", "-1"])
@pytest.mark.parametrize("command", ["train bach", "evaluate runs/x", "resume runs/x"])
def test_threads_beyond_all_machines_are_refused(command, threads, capsys):
    status, _, err = outcome(capsys, *command.split(), "--threads", threads)
    assert status == 2
    assert "--threads must be from 0 to 1,024" in err


HOSTILE = "a[/red] [bold]b :dog: \udcff"
"""a folder's name that rich would read as markup and emoji, and that is no UTF-8"""


def test_what_is_printed_is_taken_as_it_stands(capsys):
    console.console().print(HOSTILE[:-2], console.styled((HOSTILE[:-2], "red")))
    assert capsys.readouterr().out.split("a[")[1:] == [f"{HOSTILE[2:-2]} ", f"{HOSTILE[2:-2]}\n"]


@pytest.mark.parametrize(
    "command",
    [
        "train {} --data.chunk 3",
        "train bach --data.name {}",
        "train bach --name {} --data.chunk 0",
        "evaluate {}",
        "generate {}",
        "export {}",
        "report {}",
        "runs {}",
        "serve {}",
        "describe {}",
        "data show {}",
        "data import {}",
        "describe rnn --svg {}.svg",
    ],
)
def test_a_path_of_any_name_is_told_as_it_is(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, out, err = outcome(capsys, *(word.format(HOSTILE) for word in command.split()))
    assert status in (0, 2)
    assert "a[/red] [bold]b :dog: " in out + err or "data.chunk must be at least 1" in err


def test_a_run_of_any_name_is_shown(capsys, tmp_path):
    run = tmp_path / HOSTILE[:-2]
    shutil.copytree(small_run("music").path, run)
    for command in (
        ["runs", str(tmp_path)],
        ["evaluate", str(run)],
        ["generate", str(run), "--length", "4", "--formats", "mid", "--out", str(run / "out")],
        ["describe", str(run), "--svg", str(run / "model.svg")],
    ):
        status, out, err = outcome(capsys, *command)
        assert (status, "Traceback" in err) == (0, False)
        assert command[0] == "runs" or str(run) in out + err


def test_memory_that_is_not_there_is_an_error_of_use(capsys, monkeypatch):
    def hungry(argv):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(cli, "run", hungry)
    status, _, err = outcome(capsys, "doctor")
    assert status == 2
    assert "out of memory (Unable to allocate 9 TiB)" in err


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
