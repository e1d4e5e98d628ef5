"""Pretraining: what is transferred, at which rate it learns, and both stages by one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deeprnn.errors import UserError
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import Run
from deeprnn.training.loop import Trainer
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import PretrainPart, load_recipe
from deeprnn.training.session import run_recipe
from deeprnn.training.transfer import Source
from tests.training.toys import DEEP, music, recipe

STACK = {"model__kind": "srnn", "model__hidden": [8, 8]}


def toml(tmp_path, **changes) -> str:
    from deeprnn.training.recipe import to_toml

    path = tmp_path / "stage.toml"
    path.write_text(to_toml(recipe(stop__epochs=1, **changes)))
    return str(path)


@pytest.mark.parametrize(("changes", "kind"), [(DEEP, "dts"), (STACK, "rnn")])
def test_both_stages_in_one_call(tmp_path, changes, kind):
    settings = replace(recipe(**changes), pretrain=PretrainPart(recipe=toml(tmp_path)))
    run_recipe(settings, tmp_path / "run", data=music())
    stage = Run(tmp_path / "run" / "pretrain")
    assert stage.recipe["model"]["kind"] == kind
    assert stage.info["status"] == "finished"
    assert Run(tmp_path / "run").info["result"]["test"]
    names = [n for n, _ in Run(tmp_path / "run").model().named_parameters()]
    assert set(checkpoint.load_best(stage.path).tensors) < {*names, "predict.V1", "predict.b1"}


@pytest.mark.parametrize(
    ("words", "first", "second"),
    [
        (["--epochs", "1"], (1, 0), (1, 0)),
        (["--stop.epochs", "3", "--pretrain.epochs", "2"], (2, 0), (3, 0)),
        (["--minutes", "4"], (0, 2), (0, 2)),
        (["--epochs", "1", "--minutes", "4", "--pretrain.minutes", "1"], (1, 1), (1, 4)),
        ([], (0, 0), (0, 0)),
    ],
)
def test_limits_on_the_command_line_hold_for_both_stages(words, first, second, monkeypatch):
    from deeprnn.commands import train, training

    seen = []
    monkeypatch.setattr("deeprnn.training.loading.load_data", lambda part: music())
    monkeypatch.setattr(training, "train_recipe", lambda recipe, *args, **more: seen.append(recipe) or 0)
    assert train.Train.from_argv(["paper/jsb/dots", "--device", "cpu", "--quiet", *words]).run() == 0
    stage = first_stage(seen[0])
    assert stage is not None
    limits = [(r.stop.epochs, r.stop.minutes) for r in (stage, seen[0])]
    assert limits == [first, second]
    assert stage.stop.patience == load_recipe("paper/jsb/dts").stop.patience


@pytest.mark.parametrize("changes", [DEEP, STACK])
def test_transferred_parameters_start_as_trained_and_learn_ten_times_slower(changes):
    data = music()
    settings = recipe(regulariser__weight_noise=0.0, optimiser__clip=0.0, optimiser__rate=0.01, **changes)
    plain = (
        {"model__kind": "rnn", "model__hidden": [8]}
        if changes is STACK
        else {**DEEP, "model__output_hidden": []}
    )
    source = Trainer(recipe(seeds=[9], **plain), data).parameters(0)
    slow = Trainer(settings, data, pretrained=[Source(source)])
    start = {k: v.clone() for k, v in slow.layout.views(slow.updater.parameters[0]).items()}
    transferred = [name for name in start if name.startswith("levels.0.")]
    assert transferred
    assert all(torch.equal(start[name], source[name]) for name in transferred)
    assert not any(
        torch.equal(start[n], source[n]) for n in ("predict.V1",) if start[n].shape == source[n].shape
    )
    fast = Trainer(settings, data)
    fast.updater.parameters.copy_(slow.updater.parameters)
    batch = slow.plans(1)[0][0]
    for trainer in (slow, fast):
        trainer.updater.update([batch])
    for name in start:
        a = slow.layout.views(slow.updater.parameters[0])[name] - start[name]
        b = fast.layout.views(fast.updater.parameters[0])[name] - start[name]
        share = 0.1 if name in transferred else 1.0
        torch.testing.assert_close(a, share * b, rtol=5e-2, atol=2e-7)


def test_every_member_of_a_population_has_its_own_first_stage(tmp_path):
    settings = replace(recipe(seeds=[1, 2], **DEEP), pretrain=PretrainPart(recipe=toml(tmp_path)))
    together = run_recipe(settings, tmp_path / "both", data=music())
    assert (tmp_path / "both" / "pretrain" / "seed-2" / "best.safetensors").exists()
    alone = run_recipe(replace(settings, seeds=(2,)), tmp_path / "alone", data=music())
    assert together[1] == alone[0]


def test_an_srnn_is_pretrained_at_its_own_level_size():
    stage = first_stage(load_recipe("paper/nottingham/srnn"))
    assert stage is not None
    assert stage.model.hidden == (400,)  # Table 1's own RNN for this set has 600
    assert stage.model.kind == "rnn"
    deep = first_stage(load_recipe("paper/nottingham/dots"))
    assert deep is not None
    assert deep.model == load_recipe("paper/nottingham/dts").model


def test_a_finished_run_can_be_the_first_stage(tmp_path):
    plain = recipe(stop__epochs=1, **{**DEEP, "model__output_hidden": [], "model__kind": "dts"})
    run_recipe(plain, tmp_path / "dts", data=music())
    settings = recipe(stop__epochs=1, pretrain__run=str(tmp_path / "dts"), **DEEP)
    run_recipe(settings, tmp_path / "dots", data=music())
    assert not (tmp_path / "dots" / "pretrain").exists()


def test_nothing_to_transfer_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nothing to pretrain"):
        first_stage(recipe(pretrain__recipe=toml(tmp_path)))
    run_recipe(recipe(stop__epochs=1, model__hidden=[5]), tmp_path / "five", data=music())
    with pytest.raises(UserError, match="no level of the same sizes"):
        run_recipe(recipe(pretrain__run=str(tmp_path / "five"), **DEEP), tmp_path / "dots", data=music())
