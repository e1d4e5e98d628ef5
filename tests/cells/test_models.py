"""Cells as levels of models: recipes, training, checkpoints, populations, generation, description and export."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from deeprnn.cells import lookup
from deeprnn.cells.library import LIBRARY
from deeprnn.cli import main, take_imports
from deeprnn.errors import UserError
from deeprnn.generation.one_step import fastest_step
from deeprnn.model.export import export_program
from deeprnn.model.models import assemble, build
from deeprnn.model.notation import equations, label
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import dissect
from deeprnn.render.model_diagram import model_svg
from deeprnn.runs.folder import load_run, population
from deeprnn.training.recipe import Recipe, to_toml
from deeprnn.training.session import recipe_of, run_recipe
from tests.small_runs import music_folder
from tests.training import toys

PACED = '''
import torch
from torch import nn

import deeprnn


class Paced(deeprnn.Cell):
    """h' = h + σ(pace) ∘ (tanh(W h + U x) − h)."""

    def __init__(self, input_size, hidden_size, first=0.0):
        super().__init__()
        self.U = nn.Linear(input_size, hidden_size)
        self.W = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pace = nn.Parameter(torch.full((hidden_size,), first))

    def step(self, x, h):
        return torch.lerp(h, torch.tanh(self.U(x) + self.W(h)), self.pace.sigmoid())
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file with a user's cell; afterwards nobody knows its class."""
    path = tmp_path / "own_cells.py"
    path.write_text(PACED)
    monkeypatch.delenv(lookup.VARIABLE, raising=False)
    yield path
    forget("own_cells")


def forget(module: str) -> None:
    """As in a process that never imported it: classes are found by where their module's file is."""
    sys.modules.pop(module, None)


def spec_of(cell: str, text: bool = False, levels: int = 1, **settings) -> ModelSpec:
    return assemble(
        input_size=9, output_size=9, hidden_sizes=(6,) * levels, cell=cell,
        output="categorical" if text else "bernoulli", **settings,
    )  # fmt: skip


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("cell", LIBRARY)
def test_every_shipped_cell_makes_a_model(cell, text):
    spec = spec_of(cell, text, levels=2, output_from="all", output_hidden=5)
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    model = build(spec, seed=1)
    for a, b in zip(model.parameters(), build(spec, seed=1).parameters(), strict=True):
        assert torch.equal(a, b)
    model.eval()
    x = torch.randint(9, (7, 2)) if text else torch.rand(7, 2, 9).round()
    logits, last = model(x)
    assert logits.shape == (7, 2, 9)
    first, middle = model(x[:3])
    second, end = model(x[3:], middle)
    torch.testing.assert_close(torch.cat([first, second]), logits)
    for a, b in zip(end, last, strict=True):
        torch.testing.assert_close(a, b)
    step, state = fastest_step(model), model.initial_state(2)
    for t in range(7):
        y, state = step(x[t], state)
    torch.testing.assert_close(y, logits[-1])
    anatomy = dissect(spec)
    assert anatomy.parameters == sum(p.numel() for p in model.parameters())
    assert anatomy.weights == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert any("h = " in line for line in equations(spec))
    assert label(spec) in model_svg(spec)


@pytest.mark.parametrize("settings", [{"cell": "lstm"}, {"cell": "gru", "intermediate": (5,)}])
def test_depth_and_options_reach_the_cell(settings):
    model = build(spec_of(**settings, cell_options=("zoneout=0.25",)), seed=1)
    cell = model.levels[0].cell
    assert cell.zoneout == 0.25
    assert cell.intermediate_sizes == tuple(settings.get("intermediate", ()))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(UserError, match=r"no cell 'lstn' \(did you mean 'lstm'\?\)"):
        build(spec_of("lstn"))
    with pytest.raises(UserError, match=r"no argument 'zoneoot'; known are .*zoneout"):
        build(spec_of("gru", cell_options=("zoneoot=0.1",)))
    with pytest.raises(UserError, match="must be written name=value"):
        build(spec_of("gru", cell_options=("zoneout",)))
    with pytest.raises(UserError, match="no argument 'intermediate_sizes'"):
        build(spec_of("mgu", intermediate=(5,)))
    with pytest.raises(UserError, match=r"output of 3 units, but model\.hidden says 6"):
        build(spec_of("lstm", cell_options=("proj_size=3",)))
    with pytest.raises(UserError, match="input_to_levels='all' needs levels of the paper's"):
        spec_of("gru", levels=2, input_to_levels="all")


def test_a_mistake_in_a_step_leaves_no_run_behind(own, tmp_path):
    own.write_text(PACED.replace("torch.lerp(h, ", "torch.lerp(h[:, 1:], "))
    cell = lookup.load(str(own))
    with pytest.raises(RuntimeError, match="size"):
        trained(tmp_path / "run", model__cell=cell)
    assert not (tmp_path / "run").exists()


def trained(folder: Path, **changes) -> list[dict]:
    data = toys.text() if changes.pop("text", False) else toys.music()
    return run_recipe(toys.recipe(**changes), folder, data=data)


def test_a_cell_with_noise_is_drawn_from_the_seed_alone(tmp_path):
    """Two runs of one recipe are equal, and a member of a population equals the model alone."""
    settings = {
        "model__cell": "lstm",
        "stop__epochs": 2,
        "model__cell_options": ["zoneout=0.3", "recurrent_dropout=0.2"],
    }
    alone = trained(tmp_path / "a", **settings, seeds=[2])
    again = trained(tmp_path / "b", **settings, seeds=[2])
    member = trained(tmp_path / "c", **settings, seeds=[1, 2])[1]
    assert alone[0] == again[0] == member
    assert trained(tmp_path / "d", **{**settings, "model__cell_options": []}, seeds=[2])[0] != alone[0]


@pytest.mark.parametrize("text", [False, True])
def test_a_run_learns_is_resumed_and_generates(tmp_path, text):
    result = trained(tmp_path / "run", model__cell="gru", text=text, stop__epochs=4, optimiser__rate=0.5)
    run = load_run(tmp_path / "run")
    rows = run.metrics()
    assert rows[-1]["train"] < rows[0]["train"]
    assert run.info["label"] == "GRU"
    assert run.info["parameters"] == sum(p.numel() for p in run.model().parameters())
    assert (
        run_recipe(recipe_of(tmp_path / "run"), tmp_path / "run", data=toys.text() if text else toys.music())
        == result
    )
    assert run.generate(length=5) is not None


def test_a_users_cell_from_a_file(own, tmp_path, monkeypatch, capsys):
    """By the command line alone; afterwards nothing imports it because the run names it."""
    midi = music_folder()
    monkeypatch.chdir(tmp_path)
    small = ["--model.hidden", "5", "--stop.epochs", "1", "--quiet"]
    given = [
        "train",
        str(midi),
        "--model.cell",
        "own_cells.py:Paced",
        "--model.cell-options",
        "first=-1.0",
        *small,
    ]
    assert main([*given, "--name", "x", "--seeds", "1,2"]) == 0
    folder = tmp_path / "runs" / "x"
    assert load_run(folder).info["label"] == "Paced"
    assert load_run(folder).recipe["model"]["cell"] == f"{own}:Paced"
    assert len(population(folder)) == 2
    assert torch.isfinite(load_run(folder).model()(torch.zeros(3, 1, 88))[0]).all()
    forget("own_cells")
    capsys.readouterr()
    assert main(["evaluate", str(folder / "seed-1")]) == 2
    message = capsys.readouterr().err
    assert "the cell Paced of own_cells.py is not loaded here" in message
    assert f"--import {own}" in message
    assert main(["describe", str(folder / "seed-1"), "--import", str(own)]) == 0
    assert "W.weight" in capsys.readouterr().out
    assert main(["train", str(midi), "--model", "own_cells.py", "--name", "y", *small]) == 0  # its only cell


def test_a_run_folder_never_brings_code(own, tmp_path):
    """A file inside the run folder is not looked at, whatever the run names."""
    lookup.load(f"{own}:Paced")
    trained(tmp_path / "run", model__cell=f"{own}:Paced", stop__epochs=1)
    forget("own_cells")
    (tmp_path / "run" / "own_cells.py").write_text("raise SystemExit('imported')")
    own.write_text("raise SystemExit('imported')")
    with pytest.raises(lookup.MissingCell, match="never imported because a run or a model names it"):
        load_run(tmp_path / "run").model()


def test_files_and_modules_of_cells(own, tmp_path, monkeypatch):
    name = f"{own}:Paced"
    with pytest.raises(lookup.MissingCell):
        lookup.find(name)
    assert lookup.load(str(own)) == lookup.load(name) == name
    moved = lookup.find("/somewhere/else/own_cells.py:Paced")  # another machine keeps it in another place
    assert moved is lookup.find(name)
    with pytest.raises(UserError, match="has no cell 'Pacedd': it has Paced"):
        lookup.load(f"{own}:Pacedd")
    with pytest.raises(UserError, match="there is no file"):
        lookup.load("missing_cells.py:Paced")
    with pytest.raises(UserError, match="no module 'missing_cells'"):
        lookup.load("missing_cells:Paced")
    (tmp_path / "module_cells.py").write_text(PACED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert lookup.load("module_cells:Paced") == "module_cells:Paced"
    assert lookup.find("module_cells:Paced").__module__ == "module_cells"
    forget("module_cells")


def test_which_words_can_name_a_cell():
    own = ["a.py", "x/a b.py:Paced", "/abs/a.py:Paced", "a.b:Paced"]
    assert all(lookup.is_own(name) for name in own)
    others = ["lstm", "runs/x", "runs/a:b c", "some:folder/x", "a[/red] b :dog: ", ":Paced", "C:\\runs"]
    assert not any(lookup.is_own(name) for name in others)


def test_imports_of_the_command_line(monkeypatch):
    monkeypatch.delenv(lookup.VARIABLE, raising=False)
    assert take_imports(["runs", "--import", "a.py", "--all", "--import=b"]) == ["runs", "--all"]
    assert os.environ[lookup.VARIABLE] == f"a.py{os.pathsep}b"
    with pytest.raises(UserError, match="--import needs a Python file"):
        take_imports(["runs", "--import"])
    monkeypatch.delenv(lookup.VARIABLE, raising=False)


def test_a_recipe_keeps_its_cell():
    recipe = toys.recipe(model__cell="rhn", model__cell_options=["depth=3", "zoneout=0.1"])
    assert Recipe.from_dict(tomllib.loads(to_toml(recipe))) == recipe
    changed = toys.recipe(model__cell="rhn", regulariser__dropout_intermediate=0.1)
    with pytest.raises(UserError, match=r"dropout\.intermediate acts inside the paper's"):
        changed.model.spec(9, False, changed.regulariser.dropout)


@pytest.mark.parametrize("step", [False, True])
def test_a_model_of_cells_is_exported(step):
    model = build(spec_of("lstm"), seed=1).eval()
    program = export_program(model, step)
    x = torch.rand(*(() if step else (4,)), 2, 9)
    state = model.initial_state(2)
    want = model.step(x, state) if step else model(x, state)
    found = program.module()(x, *state)
    for a, b in zip(found, (want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_onnx_computes_the_same(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs deeprnn[export]")
    pytest.importorskip("onnxscript", reason="needs deeprnn[export]")
    from deeprnn.model.export import export_onnx

    model = build(spec_of("gru"), seed=1).eval()
    path = export_onnx(model, tmp_path / "gru.onnx")
    x, state = torch.rand(6, 2, 9), model.initial_state(2)
    session = runtime.InferenceSession(str(path))
    names = [i.name for i in session.get_inputs()]
    y = session.run(None, dict(zip(names, [x.numpy(), *(h.numpy() for h in state)], strict=True)))[0]
    np.testing.assert_allclose(y, model(x, state)[0].detach().numpy(), rtol=1e-4, atol=1e-5)
