"""What a person sees: everything fits a narrow terminal, and advice can be followed."""

from __future__ import annotations

import logging
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deeprnn import cli, console
from deeprnn.commands import run_view
from deeprnn.commands.demo import Demo
from deeprnn.reproduction import tables
from tests.small_runs import small_run, text_file
from tests.sweeps.toys import spec, sweep

Look = Callable[..., list[str]]


@pytest.fixture
def look(monkeypatch, capsys) -> Iterator[Look]:
    """Runs a command as on a terminal of so many columns and gives the lines it shows, without their colours."""

    def run(columns: int, *argv: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        console.console.cache_clear()
        capsys.readouterr()
        assert cli.main(argv) == 0
        plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        return re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", plain)  # also where the cursor moves

    yield run
    console.console.cache_clear()


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    "command",
    [
        "",
        "data --help",
        "describe --table1",
        "describe sdots",
        "data check jsb bach",
        "report --ledger nowhere",
        "report --cells --ledger nowhere",
        "reproduce --plan --only jsb",
        "doctor",
    ],
)
def test_every_view_fits_the_terminal(command: str, columns: int, look: Look, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if "check" in command:
        from deeprnn.data import checking

        entry = {"name": "nottingham", "found": True, "verified": True, "pitches": 88,
                 "sequences": dict.fromkeys(("train", "valid", "test"), 1694),
                 "frames": dict.fromkeys(("train", "valid", "test"), 1_761_561),
                 "notes_per_frame": dict.fromkeys(("train", "valid", "test"), 3.9)}  # fmt: skip
        monkeypatch.setattr(checking, "check", lambda name: {**entry, "name": name})
    lines = look(columns, *command.split())
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("columns", [60, 80])
def test_training_and_its_results_fit_the_terminal(columns: int, look: Look, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = look(columns, "train", str(text_file()), "--epochs", "2", "--hidden", "4", "--model", "rnn")
    assert max(len(line.rstrip()) for line in lines) <= columns
    assert any(line.split()[:1] == ["2"] for line in lines)
    assert any(line.split()[:2] == ["book-rnn-1", "RNN"] for line in lines)
    listed = look(columns, "runs")
    assert max(map(len, listed)) <= columns
    assert not any("…" in line for line in listed)


def test_a_wide_table_leaves_out_what_can_be_spared(monkeypatch):
    rows = [["a" * 20, "b" * 20, "c" * 20]]
    for columns, kept in ((62, ["x", "y", "z"]), (61, ["x", "z"]), (40, ["x"]), (10, ["x"])):
        monkeypatch.setattr(console, "width", lambda columns=columns: columns)
        assert console.fitting(["x", "y", "z"], rows, spare=("y", "z"), gap=1) == kept


def test_the_score_of_a_model_that_diverged_takes_no_more_room_than_others():
    assert [run_view.score(x) for x in (1.23456, 123.4, 999_999.0, 6.886615e30)] == [
        *("1.235", "123.400", "999999.000", "6.89e+30")
    ]
    rows = [{"valid": 10.317}, {"valid": 6.886615e30}]
    assert run_view._join(rows, "valid") == "10.317 6.89e+30"


def test_tables_of_results_say_the_same_on_a_narrow_terminal():
    def numbers(text: str) -> set[str]:
        return set(re.findall(r"\d+\.\d+", text))

    wide, narrow = tables.text_tables([]), tables.text_tables([], 60)
    assert numbers(wide) == numbers(narrow)
    cells = tables.rows([])
    assert numbers(tables.cells_text(cells)) >= numbers(tables.cells_text(cells, 60)) > set()


def test_the_demos_advice_names_the_folders_that_were_chosen(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["deeprnn"])
    runs, out = Path("my runs"), Path("else where")
    commands = [command for command, _ in Demo(out=out, runs=runs).advice(runs / "demo-dots-1")]
    words = [shlex.split(command)[1:] for command in commands]
    assert words[0] == ["generate", "my runs/demo-dots-1", "--primer", "test:3"]
    assert words[1] == ["serve", "my runs"]
    assert words[2] == ["describe", "dots", "--png", "else where/dots.png"]
    assert shlex.split(Demo().advice(Path("runs/demo-dots-1"))[1][0])[1:] == ["serve"]


def test_export_keeps_foreign_warnings_back_and_says_where_the_model_is(tmp_path, monkeypatch, capfd):
    from deeprnn.model import export

    def noisy(model, path, step=False):
        warnings.warn("isinstance(treespec, LeafSpec) is deprecated", FutureWarning, stacklevel=1)
        logging.getLogger("torch.onnx").warning("torchvision is not installed")
        path.write_bytes(b"model")
        return path

    monkeypatch.setattr(export, "export_onnx", noisy)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert cli.main(["export", str(small_run("music").path), "--out", str(tmp_path / "m.onnx")]) == 0
    shown = capfd.readouterr()
    assert "m.onnx" in shown.out
    assert (shown.err, told) == ("", [])
    assert logging.root.manager.disable == 0


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_sweeps_table_has_a_line_a_trial_and_a_curve_where_there_is_room(
    columns, look, tmp_path, monkeypatch
):
    """Names and curves are cut before columns are left out, and no cell goes over two lines."""
    monkeypatch.chdir(tmp_path)
    space = {
        "optimiser.rate": "log:0.1..4",
        "regulariser.weight_noise": "uniform:0..0.1",
        "optimiser.clip": [0.5, 1.0],
    }
    sweep(spec(space, {"stop.epochs": 30}, trials=2), Path("s"))
    lines = look(columns, "sweep", "s", "--jobs", "1")
    assert not [line for line in lines if len(line) > columns]
    trials = [line.split() for line in lines if re.match(r"\s+[01] ", line)]
    assert len(trials) == 2
    curves = {len(words[3]) for words in trials}
    assert curves == {60: {16}, 80: {24}, 120: {24}}.get(columns, curves)
    assert all(set(words[3]) <= set("▁▂▃▄▅▆▇█") for words in trials if columns >= 60)
    assert ("optimiser.rate" in " ".join(lines[2:])) == (columns == 120)


def test_no_name_of_a_strangers_reaches_the_terminal_as_a_command(capfd, tmp_path):
    hostile = "a\x1b]0;title\x07\x1b[2J\x9bm\r"
    console.console.cache_clear()
    screen = console.console()
    screen.print(f"run {hostile}")
    screen.print(console.styled("by ", (hostile, "bold"), hostile))
    console.show_rows(("run", hostile), [("x", hostile)])
    logging.getLogger("elsewhere").warning("%s has no name", hostile)
    assert cli.main(["evaluate", str(tmp_path / hostile)]) == 2
    warning = logging.makeLogRecord({"msg": "%s has no name", "args": (hostile,)})
    shown = "".join(capfd.readouterr()) + console.PrintableFormatter().format(warning)
    assert shown.count("a␛]0;title␇␛[2J") == 7
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[0-9;]*m", "", shown))
    console.console.cache_clear()
