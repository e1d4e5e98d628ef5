"""What a type checker is told: keyword arguments that exist, words that are allowed, and what a call gives back."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import deeprnn
from deeprnn.generation import generate
from deeprnn.generation.options import GenerateOptions
from deeprnn.model import models, operator_specs, spec_fields, specs
from deeprnn.runs.folder import Run

BUILDERS = ("rnn", "dt_rnn", "dts_rnn", "do_rnn", "dot_rnn", "dots_rnn", "stacked_rnn", "stacked_dts_rnn")
SIZES = {"input_size", "hidden_sizes", "output_size", "intermediate", "output_hidden"}
CELLS = {"cell", "cell_options"}  # builders make the models of the paper


def test_the_builders_options_are_those_of_assemble_and_build():
    settings = {*inspect.signature(models.assemble).parameters} - SIZES - CELLS
    making = {*inspect.signature(models.build).parameters} - {"spec"}
    assert set(models.Options.__annotations__) == settings | making


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_names_its_sizes_and_types_its_options(name):
    parameters = inspect.signature(getattr(models, name)).parameters
    assert {"input_size", "hidden_size", "output_size", "options"} <= set(parameters)
    assert parameters["options"].annotation == "Unpack[Options]"
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters.values())


@pytest.mark.parametrize(
    ("settings", "spec", "sizes"),
    [
        (operator_specs.PlusSettings, operator_specs.PlusSpec, {"input_size", "hidden_size"}),
        (
            operator_specs.PredictSettings,
            operator_specs.PredictSpec,
            {"input_size", "output_size", "nade_size"},
        ),
    ],
)
def test_the_operators_settings_are_their_specs_fields(settings, spec, sizes):
    assert set(settings.__annotations__) | sizes == {field.name for field in dataclasses.fields(spec)}


@pytest.mark.parametrize(
    "literal",
    [operator_specs.Place, operator_specs.Shortcut, specs.Output, specs.OutputFrom, specs.LevelInput],
)
def test_a_word_is_allowed_where_its_literal_lists_it(literal):
    for word in get_args(literal):
        spec_fields.one_of("test", "word", word, literal)
    with pytest.raises(deeprnn.UserError, match="got 'nonsense'"):
        spec_fields.one_of("test", "word", "nonsense", literal)


def test_the_options_of_generate_are_those_it_knows():
    """`check_options` names what it knows when it refuses."""
    known = {"primer"}
    for kind in ("music", "char"):
        run = Run(Path("nowhere"))
        run.__dict__["info"] = {"data": {"kind": kind}}
        with pytest.raises(deeprnn.UserError) as refused:
            generate.check_options(run, {"nonsense": 1})
        known |= {word.strip() for word in str(refused.value).partition("options are ")[2].split(",")}
    assert set(GenerateOptions.__annotations__) == known


GOOD = """
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
import deeprnn
import deeprnn.runs.folder
from deeprnn.generation.outputs import Music, Text

def check(x: Tensor, packed: PackedSequence, layer: deeprnn.DeepRNN, run: deeprnn.runs.folder.Run) -> None:
    a: tuple[Tensor, Tensor] = layer(x)
    b: tuple[PackedSequence, Tensor] = layer(packed, x)
    c: tuple[Tensor, Tensor, list[list[Tensor]]] = layer(x, return_all_states=True)
    d: tuple[PackedSequence, Tensor, list[list[PackedSequence]]] = layer(packed, return_all_states=True)
    e: Music | Text = run.generate(seed=1, temperature=0.8)
    f: torch.nn.RNNBase = layer
    g: tuple[Tensor, Tensor] = deeprnn.GRU(3, 4)(x)
    h: tuple[PackedSequence, tuple[Tensor, Tensor]] = deeprnn.LSTM(3, 4)(packed)
    i: tuple[Tensor, tuple[Tensor, Tensor], list[list[Tensor]]] = deeprnn.LSTM(3, 4)(x, return_all_states=True)
    deeprnn.RHN(3, 4, 2, zoneout=0.1)
    deeprnn.dots_rnn(input_size=3, hidden_size=4, intermediate_size=(5, 6), output_hidden_size=7, output_size=3,
                     unit="tanh", output="categorical", seed=1)
    deeprnn.Plus(3, 4, intermediate_sizes=[5], units="tanh", shortcut="last")
"""
BAD = {
    "an option of no builder": 'deeprnn.rnn(input_size=3, hidden_size=4, output_size=3, nonsense=3)',
    "an option of a deeper builder": 'deeprnn.dt_rnn(input_size=3, hidden_size=4, output_size=3)',
    "an option of another type": 'deeprnn.rnn(input_size=3, hidden_size=4, output_size=3, seed="a")',
    "a word": 'deeprnn.DeepRNN(3, 4, intermediate_sizes=5, shortcut="lsat")',
    "another word": 'deeprnn.DeepRNN(3, 4, input_to="top")',
    "a setting of no operator": 'deeprnn.Plus(3, 4, nonsense=3)',
    "a setting of ⊕ for ▷": 'deeprnn.Predict(3, 4, input_to="all")',
    "a setting of no layer": 'deeprnn.RHN(3, 4, nonsense=3)',
    "a state of another layer": 'deeprnn.LSTM(3, 4)(torch.zeros(1, 1, 3), torch.zeros(1, 1, 4))',
    "an input": 'deeprnn.DeepRNN(3, 4)("x")',
    "an option of no run": 'deeprnn.load_run("x").generate(nonsense=3)',
}  # fmt: skip


@pytest.mark.slow
def test_pyright_takes_what_is_right_and_refuses_the_rest(tmp_path):
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    lines = [*GOOD.strip().splitlines(), *BAD.values()]
    (tmp_path / "snippet.py").write_text("\n".join(lines), encoding="utf-8")
    source = Path(deeprnn.__file__).parents[1]
    settings = {"include": ["snippet.py"], "extraPaths": [str(source)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [pyright, "--project", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = {entry["range"]["start"]["line"] for entry in found if entry["severity"] == "error"}
    first = len(lines) - len(BAD)
    expected = set(range(first, len(lines)))
    assert wrong == expected, [lines[n] for n in wrong ^ expected]
