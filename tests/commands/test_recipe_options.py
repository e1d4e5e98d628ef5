"""Recipe fields on the command line: short names, stacks, and names that stay inside the runs' folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn import cli
from deeprnn.commands.recipe_options import MOST_USED, SHORT, apply, split_overrides
from deeprnn.errors import UserError
from deeprnn.training.defaults import model_of
from deeprnn.training.recipe import Recipe, field_names, load_recipe, override, packaged
from deeprnn.training.run_folders import label
from tests.small_runs import text_file


def test_every_short_name_sets_a_field_that_exists():
    assert {*SHORT.values(), *MOST_USED} <= {*field_names()}
    assert {*SHORT.values()} <= {*MOST_USED}  # what is typed most is listed in the help


def test_short_dotted_and_other_options_are_told_apart():
    words = [
        "bach",
        "--epochs",
        "5",
        "--model",
        "rnn",
        "--batch_size=4",
        "--optimiser.rate",
        "0.1",
        "--quiet",
    ]
    rest, overrides = split_overrides(words)
    assert rest == ["bach", "--model", "rnn", "--quiet"]
    assert overrides == [("stop.epochs", "5"), ("data.lanes", "4"), ("optimiser.rate", "0.1")]
    with pytest.raises(UserError, match="--lr needs a value"):
        split_overrides(["bach", "--lr"])


def test_short_names_train(tmp_path: Path, capsys):
    words = "--epochs 1 --hidden 6 --lr 0.01 --batch-size 3 --dropout 0.25 --minutes 2 --json --model rnn"
    assert cli.main(["train", str(text_file()), *words.split(), "--out", str(tmp_path)]) == 0
    recipe = load_recipe(Path(json.loads(capsys.readouterr().out)[0]["path"]) / "recipe.toml")
    assert (recipe.stop.epochs, recipe.stop.minutes, recipe.model.hidden) == (1, 2.0, (6,))
    assert (recipe.optimiser.rate, recipe.data.lanes, recipe.regulariser.dropout_output) == (0.01, 3, 0.25)


def of_kind(kind: str) -> Recipe:
    return Recipe(model=model_of(kind, 8))


@pytest.mark.parametrize(
    ("kind", "hidden", "sizes", "new_kind", "name"),
    [
        ("rnn", "5,5", (5, 5), "srnn", "sRNN"),
        ("rnn", "5", (5,), "rnn", "RNN"),
        ("srnn", "5", (5, 5), "srnn", "sRNN"),
        ("srnn", "[5]", (5,), "rnn", "RNN"),
        ("dts", "5,5", (5, 5), "sdts", "sDT(S)-RNN"),
        ("dots-star", "5", (5,), "dots-star", "DOT(S)-RNN*"),
    ],
)
def test_a_model_is_named_by_its_shape(kind, hidden, sizes, new_kind, name):
    recipe = apply(of_kind(kind), [("model.hidden", hidden)])
    assert (recipe.model.hidden, recipe.model.kind, label(recipe)) == (sizes, new_kind, name)


def test_every_kind_has_the_papers_way_of_writing_it_and_an_own_name_stays():
    names = {"dt": "DT-RNN", "do": "DO-RNN", "dot": "DOT-RNN", "dots": "DOT(S)-RNN", "sdts": "sDT(S)-RNN"}
    assert {kind: label(of_kind(kind)) for kind in names} == names
    mine = apply(override(of_kind("rnn"), {"model.kind": "mine"}), [("model.hidden", "5,5")])
    assert label(mine) == mine.model.kind == "mine"


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_recipe_can_be_trained_by_the_command_line(name):
    recipe = load_recipe(name)
    assert apply(recipe, []) == recipe
    assert apply(recipe, [("stop.epochs", "1")]) == override(recipe, {"stop.epochs": 1})


@pytest.mark.parametrize("model", ["rnn", "lstm"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_text_is_trained_with_an_embedding(model, tied, tmp_path: Path, capsys):
    words = (
        f"--epochs 1 --hidden 6 --model {model} --model.embedding 6 --model.tied {str(tied).lower()} --json"
    )
    assert cli.main(["train", str(text_file()), *words.split(), "--out", str(tmp_path)]) == 0, (
        capsys.readouterr().err
    )
    recipe = load_recipe(Path(json.loads(capsys.readouterr().out)[0]["path"]) / "recipe.toml")
    assert (recipe.model.embedding, recipe.model.tied) == (6, tied)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "."])
def test_a_run_stays_inside_its_folder(name, tmp_path: Path, capsys):
    words = ["train", str(text_file()), "--epochs", "1", "--out", str(tmp_path / "runs"), "--name", name]
    assert cli.main(words) == 2
    assert "choose the folder with --out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
