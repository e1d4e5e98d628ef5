"""Recipes beyond the paper: twins of the same number of parameters, and every seed in several keys."""

from __future__ import annotations

import json

import pytest
import torch

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.reproduction.entries import identity
from deeprnn.training.dynamic import dynamic_evaluation, tuned
from deeprnn.training.loop import Trainer
from deeprnn.training.members import members_of
from deeprnn.training.recipe import Recipe, load_recipe, override, packaged
from deeprnn.training.run_folders import member_recipe
from deeprnn.training.session import run_recipe
from tests.small_runs import small_run
from tests.training.toys import music, recipe, text

BEYOND = [name for name in packaged() if name.startswith("beyond/")]
SIZES = {"ptb-char": (50, 14_000_000), "ptb-word": (10_000, 24_000_000)}


@pytest.fixture(autouse=True)
def one_thread():
    """Models of a few units: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(name: str) -> int:
    made = load_recipe(name)
    size = SIZES.get(made.data.name, (88, 0))[0]
    spec = made.model.spec(size, made.data.name.startswith("ptb"), made.regulariser.dropout)
    return sum(p.numel() for p in SequenceModel(spec, "meta", initialise=False).parameters())


@pytest.mark.parametrize("data", ["ptb-char", "ptb-word", "jsb", "nottingham", "musedata"])
def test_twins_have_the_same_number_of_parameters_within_one_in_a_hundred(data):
    counts = {name: count(name) for name in BEYOND if name.startswith(f"beyond/{data}/")}
    assert len(counts) == (4 if data in SIZES else 2)
    shallow = counts[f"beyond/{data}/lstm"]
    assert all(abs(n - shallow) <= 0.01 * shallow for n in counts.values()), counts
    if data in SIZES:
        assert max(counts.values()) <= SIZES[data][1]


def test_describe_takes_a_recipe(capsys):
    assert main(["describe", "beyond/ptb-char/lstm", "--json"]) == 0
    assert "13787650" in capsys.readouterr().out.replace(",", "")


# ---- transposition, for validation to decide


def test_every_seed_with_each_transposition_equals_the_model_alone():
    grid = recipe(seeds=[1, 2], transpositions=[0, 3], stop__epochs=2)
    members = members_of(grid)
    assert [m.name for m in members] == [
        "seed-1-transpose-0", "seed-1-transpose-3", "seed-2-transpose-0", "seed-2-transpose-3",
    ]  # fmt: skip
    together = Trainer(grid, music())
    together.train()
    for place in (2, 3):
        own = member_recipe(grid, members[place])
        assert own.data.random_transpose == members[place].transposed
        alone = Trainer(own, music())
        alone.train()
        assert torch.equal(together.best[place], alone.best[0])
    assert not torch.equal(together.best[2], together.best[3])


def test_a_grid_of_transpositions_is_a_population_and_validation_chooses(tmp_path):
    from deeprnn.runs.folder import load_run

    made = recipe(transpositions=[0, 3], stop__epochs=1)
    results = run_recipe(made, tmp_path / "run", data=music())
    costs = [result["valid"]["nats_per_frame"] for result in results if result is not None]
    names = [m.name for m in members_of(made)]
    assert load_run(tmp_path / "run").path.name == names[costs.index(min(costs))]


def test_nonsense_is_refused(tmp_path):
    for wrong in ([0, 0], [-1], [128]):
        with pytest.raises(UserError, match="transpositions must be distinct and from 0 to 127"):
            recipe(transpositions=wrong)
    with pytest.raises(UserError, match="are for music: toy-text is text"):
        run_recipe(recipe(transpositions=[0, 6]), tmp_path / "run", data=text())
    assert not (tmp_path / "run" / "recipe.toml").exists()
    with pytest.raises(UserError, match=r"weight_decay=0.1 is for adamw, and optimiser.name is 'sgd'"):
        recipe(optimiser__weight_decay=0.1)
    assert identity(override(Recipe(), {"transpositions": [0, 6]})) != identity(Recipe())


# ---- dynamic evaluation


def test_the_rate_is_chosen_on_the_validation_part_alone():
    data = music()
    trainer = Trainer(recipe(stop__epochs=1), data)
    trainer.train()
    model = trainer.model
    del data.splits["test"]  # nothing of it can be looked at
    best, trials = tuned(model, data, [1e-4, 0.3], [0.0, 0.01], chunk=5)
    assert [(t.rate, t.decay) for t in trials] == [(1e-4, 0.0), (1e-4, 0.01), (0.3, 0.0), (0.3, 0.01)]
    assert best == min(trials, key=lambda t: t.valid)
    again = dynamic_evaluation(model, data, "valid", rate=best.rate, decay=best.decay, chunk=5)
    assert again["nats_per_frame"] == best.valid


def test_with_a_decay_near_one_it_is_the_static_model_again():
    from deeprnn.training.evaluate import evaluate

    data = music()
    model = Trainer(recipe(), data).model
    plain = evaluate(model, data, "test")["nats_per_frame"]
    held = dynamic_evaluation(model, data, "test", rate=0.5, decay=1 - 1e-7, chunk=5)["nats_per_frame"]
    free = dynamic_evaluation(model, data, "test", rate=0.5, chunk=5)["nats_per_frame"]
    assert held == pytest.approx(plain, rel=1e-4)
    assert abs(free - plain) > 0.01
    for wrong in ({"rate": 0.0}, {"rate": float("nan")}, {"rate": 0.1, "decay": 1.0}):
        with pytest.raises(UserError, match="of dynamic evaluation must be"):
            dynamic_evaluation(model, data, "test", **wrong)


def test_it_learns_without_dropout():
    data = music()
    dropped = {"regulariser__dropout_output": 0.5, "model__cell": "lstm", "regulariser__dropout_state": 0.5}
    with_it, without = Trainer(recipe(**dropped), data).model, Trainer(recipe(model__cell="lstm"), data).model
    without.load_state_dict(with_it.state_dict())
    scores = [dynamic_evaluation(m, data, "test", rate=0.3, chunk=5) for m in (with_it, without)]
    assert scores[0] == scores[1]
    assert with_it.training


def test_the_command_tunes_on_validation_and_says_what_it_tried(capsys):
    run = small_run("char").path
    assert main(["evaluate", str(run), "--dynamic", "0.001,0.1", "--decay", "0,0.01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tried_on_valid"]) == 4
    best = min(told["tried_on_valid"], key=lambda t: t["valid"])
    assert (told["dynamic"], told["decay"]) == (best["rate"], best["decay"])
    assert main(["evaluate", str(run), "--dynamic", "0.1", "--json"]) == 0
    assert "tried_on_valid" not in json.loads(capsys.readouterr().out)
    for wrong in (["--dynamic", "fast"], ["--decay", "0.1"], ["--dynamic", "0"], ["--dynamic", "nan"]):
        assert main(["evaluate", str(run), *wrong]) == 2
