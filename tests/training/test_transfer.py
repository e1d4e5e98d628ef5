"""Starting from another run: by symbol, not by position; what was taken is said, and nonsense refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from deeprnn.data.music import Grid, MusicData, Songs
from deeprnn.data.text import TextData, text_data
from deeprnn.errors import UserError
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import load_run
from deeprnn.training.loop import Trainer
from deeprnn.training.session import run_recipe
from deeprnn.training.transfer import Source, symbols_of
from tests.training.toys import DEEP, music, recipe, text


def other_text(kind: str = "char") -> TextData:
    """Fewer letters than `toys.text`, one of its own, in another order."""
    lines = "a zoo sat on the mat \nthe zoo sat \n" * 6
    return text_data("other", kind, {"train": lines, "valid": lines[:120], "test": lines[:90]})


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.layout.views(trainer.updater.parameters[0])


def source_of(trainer: Trainer) -> Source:
    return Source(
        trainer.parameters(0), trainer.spec, trainer.data.kind, symbols_of(trainer.data), "runs/first"
    )


@pytest.mark.parametrize("kind", ["char", "word"])
def test_what_was_learnt_of_a_symbol_goes_with_it(kind):
    first, data = Trainer(recipe(seeds=[7]), text(kind)), other_text(kind)
    fresh, started = Trainer(recipe(), data), Trainer(recipe(), data, pretrained=[source_of(first)])
    a, b, c = parameters(first), parameters(fresh), parameters(started)
    vocabulary = list(text(kind).vocabulary)
    shared = new = 0
    for i, symbol in enumerate(data.vocabulary):
        there = symbol in vocabulary
        shared, new = shared + there, new + (not there)
        for name in ("levels.0.U1", "predict.V1", "predict.b1"):
            expected = a[name][vocabulary.index(symbol)] if there else b[name][i]
            assert torch.equal(c[name][i], expected), (symbol, name)
    assert shared
    assert new
    assert torch.equal(c["levels.0.W1"], a["levels.0.W1"])
    said = " / ".join(started.remarks)
    assert "from runs/first: levels.0 (U1, W1, b1), predict (V1, b1)" in said
    assert f"{shared} of {len(data.vocabulary)} symbols are known there; new here: " in said
    assert "left behind: " in said


def test_symbols_that_are_new_learn_at_the_full_rate():
    first, data = Trainer(recipe(seeds=[7]), text()), other_text()
    started = Trainer(recipe(pretrain__rate=0.25), data, pretrained=[source_of(first)])
    rates = started.layout.views(started.updater.optimiser.multipliers)  # type: ignore[arg-type]
    known = [0.25 if symbol in text().vocabulary else 1.0 for symbol in data.vocabulary]
    assert rates["levels.0.U1"].amax(1).tolist() == rates["levels.0.U1"].amin(1).tolist() == known
    assert rates["predict.b1"].tolist() == known
    assert (rates["levels.0.W1"] == 0.25).all()


def test_pitches_are_known_by_their_midi_numbers():
    wide = music()  # 60 to 71
    rolls = [song[:, 2:7] for song in wide.splits["train"]]
    songs = Songs.pack([np.ascontiguousarray(roll) for roll in rolls], 5)
    narrow = MusicData(
        "narrow", {"train": songs, "valid": songs[:1], "test": songs[:1]}, Grid(low=62, high=66)
    )
    first = Trainer(recipe(seeds=[7]), wide)
    started = Trainer(recipe(), narrow, pretrained=[source_of(first)])
    a, c = parameters(first), parameters(started)
    assert torch.equal(c["levels.0.U1"], a["levels.0.U1"][:, 2:7])
    assert torch.equal(c["predict.V1"], a["predict.V1"][2:7])
    assert started.remarks[-1].startswith("5 of 5 pitches are known there; left behind: 60 61 67")


def test_the_output_function_is_taken_from_the_same_model_only():
    first = Trainer(recipe(seeds=[7]), music())
    deeper = Trainer(recipe(model__output_hidden=[5]), music(), pretrained=[source_of(first)])
    assert torch.equal(parameters(deeper)["levels.0.W1"], parameters(first)["levels.0.W1"])
    assert deeper.remarks[:2] == [
        "from runs/first: levels.0 (U1, W1, b1)",
        "not from there, but new: predict (V1, V2, b1, b2)",
    ]


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ({}, text("word"), "a model of characters, which a model of words cannot start from"),
        ({}, music(), "a model of characters, which a model of music cannot start from"),
        ({"model__unit": "tanh"}, text(), "was trained with sigmoid units, this model has tanh"),
        ({"model__hidden": [5]}, text(), "no level of the same sizes"),
        (
            {},
            TextData("x", "char", text().splits, [chr(0x410 + i) for i in range(text().size)]),
            "no symbol in common",
        ),
    ],
)
def test_nonsense_is_refused(changes, data, said):
    first = Trainer(recipe(), text())
    with pytest.raises(UserError, match=said):
        Trainer(recipe(**changes), data, pretrained=[source_of(first)])


def test_a_run_starts_from_another_and_keeps_what_it_started_from(tmp_path):
    run_recipe(recipe(stop__epochs=1), tmp_path / "first", data=text())
    seen = []

    def watch(trainer, folder):
        seen.append((parameters(trainer)["levels.0.W1"].clone(), trainer.remarks))
        return []

    settings = recipe(stop__epochs=1, pretrain__run=str(tmp_path / "first"))
    run_recipe(settings, tmp_path / "second", data=other_text(), watch=watch)
    best = checkpoint.load_best(tmp_path / "first").tensors
    assert torch.equal(seen[0][0], best["levels.0.W1"])
    assert str(tmp_path / "first") in seen[0][1][0]
    kept = checkpoint.load_best(tmp_path / "second" / "start")
    assert kept.meta["symbols"] == load_run(tmp_path / "first").vocabulary


@pytest.mark.parametrize(
    ("name", "said"), [("letters", "cannot start from"), ("nowhere", "there is no run"), ("pair", "members")]
)
def test_a_start_that_is_refused_leaves_no_folder(tmp_path, name, said):
    run_recipe(recipe(stop__epochs=1), tmp_path / "letters", data=text())
    run_recipe(recipe(stop__epochs=1, seeds=[1, 2]), tmp_path / "pair", data=music())
    with pytest.raises(UserError, match=said):
        run_recipe(recipe(pretrain__run=str(tmp_path / name)), tmp_path / "new", data=music())
    assert not (tmp_path / "new").exists()


def test_a_start_kept_by_an_earlier_version_goes_by_name_and_size():
    first = Trainer(recipe(**{**DEEP, "model__output_hidden": [], "model__kind": "dts"}), music())
    old = Source.from_meta(first.parameters(0), {"epoch": 1, "run": "runs/old"})
    started = Trainer(recipe(**DEEP), music(), pretrained=[old])
    for name in ("W1", "U1", "b1", "W2", "U2", "S2", "b2"):
        assert torch.equal(parameters(started)[f"levels.0.{name}"], parameters(first)[f"levels.0.{name}"])


def test_that_a_run_has_not_finished_is_said_once(tmp_path, caplog):
    run_recipe(recipe(), tmp_path / "first", data=text())
    path = tmp_path / "first" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "result": None, "status": "interrupted"}))
    run_recipe(recipe(pretrain__run=str(tmp_path / "first")), tmp_path / "second", data=text())
    assert caplog.text.count("has not finished: starting from its best parameters so far") == 1
