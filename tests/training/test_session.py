"""A run's folder in a person's hands: moved, damaged, named strangely, resumed from elsewhere."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.files import DiskFull
from deeprnn.model.models import build
from deeprnn.model.specs import Dropout
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import load_run
from deeprnn.training import saving, threads
from deeprnn.training.dynamic import dynamic_evaluation
from deeprnn.training.evaluate import evaluate
from deeprnn.training.loading import rooted
from deeprnn.training.recipe import Recipe, override, to_toml
from deeprnn.training.session import recipe_of, run_recipe
from tests.runs.test_folder import StopAt, strip
from tests.torture.stories import outcome
from tests.training.toys import DEEP, music, recipe, resume, text

SMALL = ["--model.hidden", "8", "--stop.epochs", "1", "--threads", "1", "--device", "cpu"]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "book.txt"
    path.write_text("in the beginning was the word \n" * 200)
    return path


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
@pytest.mark.parametrize("name", ["best.safetensors", "best.json"])
def test_resuming_a_finished_run_writes_damaged_best_parameters_again(tmp_path, name, seeds, caplog):
    run_recipe(recipe(seeds=seeds), tmp_path / "r", data=music())
    home = load_run(tmp_path / "r").path
    before = checkpoint.load_best(home)
    (home / name).write_bytes(b"damaged")
    with pytest.raises(UserError, match="resume"):
        checkpoint.load_best(home)
    resume(tmp_path / "r", data=music())
    assert "written again" in caplog.text
    after = checkpoint.load_best(home)
    assert (after.meta, set(after.tensors)) == (before.meta, set(before.tensors))
    assert all(after.tensors[k].equal(before.tensors[k]) for k in before.tensors)


def test_a_resumed_run_mends_what_it_can_of_its_folder(tmp_path, caplog):
    run_recipe(recipe(), tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(recipe(), tmp_path / "r", data=music(), watch=lambda t, f: [StopAt(t.length + 3)])
    whole, run = load_run(tmp_path / "whole"), load_run(tmp_path / "r")
    for name in ("run.json", "grid.json", "metrics.jsonl"):
        (run.path / name).write_bytes((run.path / name).read_bytes()[:20])
    resume(run.path, data=music())
    assert "metrics.jsonl has lost lines" in caplog.text
    again = load_run(run.path)
    assert again.grid == whole.grid
    assert again.info["result"] == whole.info["result"]
    assert [row["epoch"] for row in again.metrics()] == [2, 3]


def change_state(folder: Path, change) -> None:
    """Save the newest state again with other tensors."""
    found = checkpoint.load_state(folder)
    assert found is not None
    change(found.tensors)
    checkpoint.save_state(folder, found.tensors, found.meta)


def test_a_state_saved_before_adams_count_was_kept_goes_on_to_the_same_result(tmp_path):
    adam = recipe(optimiser__name="adam", optimiser__rate=0.01)
    run_recipe(adam, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(adam, tmp_path / "r", data=music(), watch=lambda t, f: [StopAt(t.length + 3)])
    change_state(tmp_path / "r", lambda tensors: tensors.pop("optimiser.seen"))
    resume(tmp_path / "r", data=music())
    assert load_run(tmp_path / "r").info["result"] == load_run(tmp_path / "whole").info["result"]


def test_a_state_that_lacks_something_is_an_error_that_names_it(tmp_path):
    with pytest.raises(saving.Interrupted):
        run_recipe(recipe(), tmp_path / "r", data=music(), watch=lambda t, f: [StopAt(3)])
    change_state(tmp_path / "r", lambda tensors: tensors.pop("state.0"))
    with pytest.raises(UserError, match=r"last.json has no 'state.0': .* another version"):
        resume(tmp_path / "r", data=music())


def test_a_split_that_is_not_there_is_an_error_of_use():
    data = text()
    del data.splits["test"]
    model = build(recipe().model.spec(data.size, True, Dropout()), seed=0)
    for score in (
        lambda: evaluate(model, data, "test"),
        lambda: dynamic_evaluation(model, data, "test", rate=0.1),
    ):
        with pytest.raises(
            UserError, match=r"no split 'test', or too little in it to score: it has train, valid"
        ):
            score()


def other_text():
    data = text()
    data.splits["train"] = data.splits["train"][::-1].copy()
    return data


@pytest.mark.parametrize(("data", "other"), [(text(), other_text()), (music(), music(songs=7))])
def test_a_run_does_not_go_on_with_other_data(tmp_path, data, other):
    with pytest.raises(saving.Interrupted):
        run_recipe(recipe(), tmp_path / "r", data=data, watch=lambda t, f: [StopAt(3)])
    with pytest.raises(UserError, match="has changed since"):
        resume(tmp_path / "r", data=other)
    resume(tmp_path / "r", data=data)


def test_a_first_stage_goes_on_by_the_recipe_in_its_folder(tmp_path):
    first = tmp_path / "first.toml"
    first.write_text(to_toml(recipe(stop__epochs=4)))
    whole = recipe(**DEEP, pretrain__recipe=str(first))
    run_recipe(whole, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(whole, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt(3)])
    first.unlink()
    resume(tmp_path / "cut", data=music())
    for stage in ("pretrain", "."):
        a, b = load_run(tmp_path / "whole" / stage), load_run(tmp_path / "cut" / stage)
        assert strip(a.metrics()) == strip(b.metrics())


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_run_that_served_as_first_stage_may_go_away(tmp_path, seeds):
    run_recipe(recipe(), tmp_path / "first", data=music())
    second = recipe(model__output_hidden=[5], pretrain__run=str(tmp_path / "first"), seeds=seeds)
    run_recipe(second, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(second, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt(3)])
    (tmp_path / "first").rename(tmp_path / "moved")
    resume(tmp_path / "cut", data=music())
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_dynamic_evaluation_that_diverges_says_so():
    data = music()
    model = build(recipe().model.spec(data.size, False, Dropout()), seed=0)
    with pytest.raises(UserError, match=r"in chunk \d+ of .*--dynamic 2.5e\+38"):
        dynamic_evaluation(model, data, "test", rate=1e39, chunk=5, clip=0.0)


def test_paths_in_a_recipe_hold_from_every_folder(book, monkeypatch):
    Path("first.toml").write_text(to_toml(Recipe()))
    found = rooted(recipe(data__name="book.txt", pretrain__recipe="first.toml", pretrain__run="runs/a"))
    assert found.data.name == str(book)
    assert found.pretrain.recipe == str(book.parent / "first.toml")
    assert found.pretrain.run == str(book.parent / "runs" / "a")
    assert (
        rooted(recipe(data__name="jsb", pretrain__recipe="paper/jsb/rnn")).pretrain.recipe == "paper/jsb/rnn"
    )
    Path("my.toml").write_text(to_toml(recipe(data__name="book.txt", data__level="char")))
    assert main(["train", "my.toml", *SMALL, "--quiet"]) == 0
    (book.parent / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["evaluate", "../runs/book-rnn-1"]) == 0


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write in .*Not a directory"):
        run_recipe(recipe(), tmp_path / "file" / "r", data=music())

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskFull, match="free some space"):
        run_recipe(recipe(), tmp_path / "r", data=music())


@pytest.mark.parametrize(
    "wrong",
    [["--model.hidden", "0"], ["--device", "quantum"], ["--data.name", "nowhere"], ["--threads", "-1"]],
)
def test_an_error_before_the_first_update_leaves_no_folder(book, wrong, capsys):
    assert main(["train", "book.txt", "--model", "rnn", *SMALL, *wrong]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_names_of_every_kind_are_shown_as_they_are(book, capsys):
    name = "mein [Lauf] ü"
    assert main(["train", "book.txt", "--model", "rnn", *SMALL, "--name", name]) == 0
    shown = capsys.readouterr().out
    assert f"runs/{name}: RNN of" in shown
    assert f"deeprnn generate 'runs/{name}'" in shown
    assert main(["evaluate", f"runs/{name}"]) == 0
    assert f"runs/{name} on book" in capsys.readouterr().out
    run = json.loads((Path("runs") / name / "run.json").read_text())
    long = "a-name-that-needs-more-than-a-narrow-terminal-has"
    (Path("runs") / name / "run.json").write_text(json.dumps({**run, "name": f"{long} [1]"}))
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert f"{long} [1]" in listed
    assert "finished" in listed
    assert "bpc" in listed


# ---- going on for longer


LONGER = {
    "paper": {"schedule__patience": 1, "optimiser__rate": 3.0},
    "halving": {"schedule__name": "halving", "schedule__patience": 1, "schedule__factor": 1.05},
    "constant": {"schedule__name": "constant", "optimiser__name": "adam", "optimiser__rate": 0.01},
}


@pytest.mark.parametrize("schedule", LONGER)
def test_a_finished_run_that_goes_on_equals_the_longer_one_bit_for_bit(tmp_path, schedule):
    seeds = {"seeds": [1, 2], **LONGER[schedule]}
    run_recipe(recipe(stop__epochs=4, **seeds), tmp_path / "whole", data=music())
    run_recipe(recipe(stop__epochs=2, **seeds), tmp_path / "short", data=music())
    longer = override(recipe_of(tmp_path / "short"), {"stop.epochs": 4})
    with pytest.raises(saving.Interrupted):
        run_recipe(longer, tmp_path / "short", data=music(), watch=lambda t, f: [StopAt(2 * t.length + 3)])
    home = tmp_path / "short" / "seed-1"
    assert load_run(home).info["result"] is None
    assert load_run(home).recipe["stop"]["epochs"] == 4
    resume(tmp_path / "short", data=music())
    assert outcome(tmp_path / "short") == outcome(tmp_path / "whole")


def test_a_run_stopped_by_time_goes_on_with_more_of_it(book, capsys):
    words = ["train", "book.txt", "--level", "char", "--model", "rnn", "--model.hidden", "8", "--name", "r"]
    limits = ["--stop.minutes", "1e-9", "--stop.patience", "50"]
    assert main([*words, *limits, "--threads", "1", "--device", "cpu"]) == 0
    assert "minutes passed" in capsys.readouterr().out
    assert main(["resume", "runs/r", "--stop.minutes", "0", "--stop.epochs=3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)[0]
    assert (shown["status"], shown["epochs"]) == ("finished", 3)
    stop = load_run("runs/r").recipe["stop"]
    assert (stop["epochs"], stop["minutes"]) == (3, 0.0)
    capsys.readouterr()
    assert main(["resume", "runs/r", "--stop.epochs", "2"]) == 2
    said = capsys.readouterr().err
    assert "has trained 3 epochs" in said
    assert "--stop.epochs 6" in said
    assert load_run("runs/r").info["status"] == "finished"
    assert main(["resume", "runs/r", "--optimiser.rate", "1"]) == 2
    assert "--pretrain.run runs/r" in capsys.readouterr().err


def test_a_limit_edited_in_the_recipe_file_is_taken_as_given_to_resume(tmp_path):
    run_recipe(recipe(stop__epochs=1), tmp_path / "r", data=music())
    path = tmp_path / "r" / "recipe.toml"
    path.write_text(path.read_text().replace("epochs = 1", "epochs = 2"))
    resume(tmp_path / "r", data=music())
    assert [row["epoch"] for row in load_run(tmp_path / "r").metrics()] == [1, 2]


def test_a_member_lost_in_the_first_stage_does_not_end_the_others(tmp_path):
    stage = tmp_path / "stage.toml"
    stage.write_text(to_toml(recipe(stop__epochs=1, optimiser__nonfinite="skip")))
    settings = recipe(
        seeds=[1, 2], stop__epochs=1, pretrain__recipe=str(stage), optimiser__nonfinite="skip", **DEEP
    )

    class Poison(StopAt):
        def updated(self, trainer):
            if trainer.recipe.model.kind == "dts":
                trainer.updater.parameters[0].fill_(float("inf"))

    lost, kept = run_recipe(settings, tmp_path / "r", data=music(), watch=lambda t, f: [Poison(0)])
    assert lost is None
    assert kept is not None
    runs = [load_run(tmp_path / "r" / f"seed-{seed}") for seed in (1, 2)]
    assert [run.info["status"] for run in runs] == ["failed", "finished"]
    assert runs[0].info["reason"] == "its first stage diverged"
    assert resume(tmp_path / "r", data=music()) == [None, kept]
    assert load_run(tmp_path / "r").path == runs[1].path
    assert main(["runs", str(tmp_path / "r")]) == 0
    report = run_recipe(override(settings, {"seeds": [2]}), tmp_path / "alone", data=music())
    assert report == [kept]


# ---- threads


@pytest.mark.parametrize("set_aside", [True, False])
def test_a_run_keeps_the_threads_it_began_with(tmp_path, monkeypatch, set_aside):
    used = []
    monkeypatch.setattr(threads, "limit", used.append)
    monkeypatch.setattr(threads, "measure", lambda trainer, most: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1] if used else 8)
    with pytest.raises(saving.Interrupted):
        run_recipe(
            recipe(),
            tmp_path / "r",
            data=music(),
            watch=lambda t, f: [StopAt(3)],
            choose_threads=set_aside,
        )
    assert used == ([3] if set_aside else [])
    began = load_run(tmp_path / "r").info["environment"]["threads"]
    assert began == (3 if set_aside else 8)
    monkeypatch.setattr(threads, "measure", lambda trainer, most: pytest.fail("measured again"))
    used.append(1)
    resume(tmp_path / "r", data=music(), choose_threads=True)
    assert used[-1] == began
