"""The guide's sweep from start to figure, at a small size."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from deeprnn.cli import main
from tests.small_runs import text_file

GUIDE = Path(__file__).parents[1] / "docs/guide/sweeps.md"
SMALL = {"data.name": "", "data.level": "char", "data.chunk": 40, "data.lanes": 8, "model.intermediate": [5],
         "stop.epochs": 2}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_guides_commands_run_from_start_to_figure(tmp_path, monkeypatch, capsys):
    text = GUIDE.read_text("utf-8")
    tables = tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    assert {"recipe", "trials", "sampler", "space", "override"} == set(tables)
    monkeypatch.chdir(tmp_path)
    overrides = {**SMALL, "data.name": str(text_file())}
    lines = ['recipe = "quick/jsb-dts"', "trials = 4", f'sampler = "{tables["sampler"]}"', "[space]"]
    lines += [f'"{name}" = {value!r}' for name, value in tables["space"].items() if isinstance(value, str)]
    lines += ['"model.hidden" = [[4], [6]]', "[override]"]
    lines += [f'"{name}" = {value!r}' for name, value in overrides.items()]
    Path("rates.toml").write_text("\n".join(lines))
    commands = re.findall(r"^\$ deeprnn (.*)$", text, re.MULTILINE)
    for command in commands[:3]:
        more = ["--jobs", "1"] if command.startswith("sweep rates") else []
        assert main([*shlex.split(command), *more]) == 0, command
    shown = capsys.readouterr().out
    assert "4 trials: 4 complete" in shown
    assert "scored once" in shown
    assert 'data-part="parallel"' in Path("sweeps/rates/report.html").read_text("utf-8")
    assert next(Path("runs").glob("*/best.safetensors")).is_file()


def test_a_sweep_from_the_command_line_of_train(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("deeprnn.training.threads.cores", lambda: 1)  # no processes: quicker
    monkeypatch.chdir(tmp_path)
    argv = [
        "train",
        str(text_file()),
        "--level",
        "char",
        "--hidden",
        "5",
        "--epochs",
        "1",
        "--sampler",
        "grid",
    ]
    argv += ["--sweep", "optimiser.rate=0.01,0.02", "--sweep=optimiser.clip=0.5,1.0", "--name", "both"]
    assert main(argv) == 0
    assert "4 trials: 4 complete" in capsys.readouterr().out
    assert main(["train", str(text_file()), "--sweep", "optimiser.rate"]) == 2
    assert "field=values" in capsys.readouterr().err
    outside = ["train", str(text_file()), "--sweep", "optimiser.rate=0.01,0.02"]
    for name in ("../outside", str(tmp_path / "outside")):
        assert main([*outside, "--name", name]) == 2
        assert "is no name below sweeps" in capsys.readouterr().err
    assert main([*outside, "--track", "tensorboard", "--json"]) == 2
    assert "--json and --track cannot go with --sweep" in capsys.readouterr().err
    argv[argv.index("both")] = "elsewhere"
    assert main([*argv, "--out", "kept", "--trials", "1"]) == 0
    assert (tmp_path / "kept" / "elsewhere" / "winner.toml").is_file()
