"""Run folders: written by training, read without data or GPU, stopped and taken up again."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deeprnn.cli import main
from deeprnn.data.music import Grid
from deeprnn.errors import UserError
from deeprnn.files import DiskFull, write_atomically
from deeprnn.runs import checkpoint, ledger, provenance
from deeprnn.runs.folder import Run, best_member, list_runs, load_run, new_folder
from deeprnn.runs.locking import lock
from deeprnn.runs.provenance import commit
from deeprnn.runs.run_files import change_run
from deeprnn.runs.summary import summary
from deeprnn.training import saving
from deeprnn.training.evaluate import evaluate
from deeprnn.training.loop import NonFinite
from deeprnn.training.session import recipe_of, run_recipe
from tests.torture.stories import outcome
from tests.training.toys import DEEP, music, recipe, resume, text


def strip(rows):
    return [{k: v for k, v in row.items() if k not in ("seconds", "frames_per_second")} for row in rows]


class StopAt:
    """Sends this process a signal after so many updates."""

    def __init__(self, update: int, number: int = signal.SIGTERM) -> None:
        self.update, self.number = update, number

    def updated(self, trainer):
        if int(trainer.updater.tau) == self.update:
            os.kill(os.getpid(), self.number)

    def epoch_ended(self, trainer, rows):
        pass


def test_a_run_folder_holds_what_the_contract_says(tmp_path):
    data = music()
    result = run_recipe(recipe(**DEEP), tmp_path / "r", data=data)[0]
    run = load_run(tmp_path / "r")
    assert {p.name for p in run.path.iterdir()} >= {
        "recipe.toml", "run.json", "grid.json", "metrics.jsonl", "best.safetensors", "best.json",
        "last.safetensors", "last.json", "ledger.json",
    }  # fmt: skip
    info = run.info
    assert info["status"] == "finished"
    assert info["result"] == result
    assert (info["label"], info["metric"], info["paper"], run.kind) == (
        "DOT(S)-RNN",
        "nats/frame",
        None,
        "music",
    )
    assert info["parameters"] == sum(p.numel() for p in run.model().parameters())
    assert {"version", "commit", "environment", "created", "updated", "seed", "name"} <= set(info)
    assert run.grid == Grid(low=60, high=71)
    assert run.vocabulary is None
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3]
    assert evaluate(run.model(), data, "test") == pytest.approx(result["test"])


def test_a_text_run_keeps_its_vocabulary(tmp_path):
    data = text()
    run_recipe(recipe(stop__epochs=1), tmp_path / "r", data=data)
    assert load_run(tmp_path / "r").vocabulary == data.vocabulary


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [1, 7, 18, 19])
def test_a_signal_saves_and_resuming_is_bit_equal(tmp_path, at, number):
    settings = recipe(optimiser__name="momentum", optimiser__rate=0.1, **DEEP)
    run_recipe(settings, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted) as stopped:
        run_recipe(settings, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt(at, number)])
    assert stopped.value.status == 128 + number
    assert Run(tmp_path / "cut").info["status"] == "stopped"
    resume(tmp_path / "cut", data=music())
    whole, cut = load_run(tmp_path / "whole"), load_run(tmp_path / "cut")
    assert strip(cut.metrics()) == strip(whole.metrics())
    assert cut.info["result"] == whole.info["result"]
    assert (cut.path / "best.safetensors").read_bytes() == (whole.path / "best.safetensors").read_bytes()
    a, b = (checkpoint.load_state(run.path) for run in (whole, cut))
    assert a is not None
    assert b is not None
    assert all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)


def test_a_stop_in_the_first_stage_is_taken_up_there(tmp_path):
    stage = tmp_path / "stage.toml"
    from deeprnn.training.recipe import to_toml

    stage.write_text(to_toml(recipe(stop__epochs=2)))
    settings = recipe(pretrain__recipe=str(stage), **DEEP)
    run_recipe(settings, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(settings, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt(9)])
    assert (tmp_path / "cut" / "pretrain" / "last.json").exists()
    resume(tmp_path / "cut", data=music())
    for name in (".", "pretrain"):
        a, b = Run(tmp_path / "whole" / name), Run(tmp_path / "cut" / name)
        assert strip(a.metrics()) == strip(b.metrics())
        assert a.info["result"] == b.info["result"]


def test_a_damaged_checkpoint_only_costs_time(tmp_path, caplog):
    settings = recipe(seeds=[1, 2], save__updates=4)
    run_recipe(settings, tmp_path / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(settings, tmp_path / "cut", data=music(), watch=lambda t, f: [StopAt(11)])
    os.truncate(tmp_path / "cut" / "last.safetensors", 100)
    resume(tmp_path / "cut", data=music())
    assert "previous.json" in caplog.text
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_full_disk_stops_the_run_and_resuming_goes_on(tmp_path, monkeypatch):
    settings = recipe(stop__epochs=4)
    run_recipe(settings, tmp_path / "whole", data=music())
    real, count = checkpoint.save_state, iter(range(100))

    def full(*args):
        if next(count) == 2:
            raise DiskFull("no room to write last.safetensors")
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_state", full)
        with pytest.raises(DiskFull):
            run_recipe(settings, tmp_path / "cut", data=music())
    assert Run(tmp_path / "cut").info["status"] == "failed"
    resume(tmp_path / "cut", data=music())
    assert strip(load_run(tmp_path / "cut").metrics()) == strip(load_run(tmp_path / "whole").metrics())


def test_what_is_not_a_number_leaves_the_last_checkpoint(tmp_path):
    class Poison(StopAt):
        def updated(self, trainer):
            if int(trainer.updater.tau) == self.update:
                trainer.updater.parameters[0, 0] = float("inf")

    with pytest.raises(NonFinite):
        run_recipe(recipe(), tmp_path / "r", data=music(), watch=lambda t, f: [Poison(20)])
    assert Run(tmp_path / "r").info["status"] == "failed"
    found = checkpoint.load_state(tmp_path / "r")
    assert found is not None
    assert torch.isfinite(found.tensors["parameters"]).all()


def test_a_population_has_a_folder_for_each_member(tmp_path):
    run_recipe(recipe(seeds=[1, 2]), tmp_path / "p", data=music())
    assert json.loads((tmp_path / "p" / "population.json").read_text())["members"] == ["seed-1", "seed-2"]
    members = list_runs(tmp_path)
    assert [m.path.name for m in members] == ["seed-1", "seed-2"]
    alone = run_recipe(recipe(seeds=[2]), tmp_path / "alone", data=music())[0]
    assert members[1].info["result"] == alone
    assert members[1].recipe["seeds"] == [2]
    best = load_run(tmp_path / "p")
    assert best.path == best_member(tmp_path / "p").path
    with pytest.raises(UserError, match="trains as one"):
        recipe_of(tmp_path / "p" / "seed-1")


def test_a_killed_run_is_seen_as_interrupted(tmp_path):
    run_recipe(recipe(stop__epochs=1), tmp_path / "r", data=music())
    change_run(tmp_path / "r", status="running")
    assert Run(tmp_path / "r").status == "interrupted"
    with lock(tmp_path / "r"):
        assert Run(tmp_path / "r").status == "running"


def test_training_in_a_thread_listens_to_no_signals(tmp_path):
    done = []
    thread = threading.Thread(
        target=lambda: done.append(run_recipe(recipe(stop__epochs=1), tmp_path / "r", data=music()))
    )
    thread.start()
    thread.join()
    assert done


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_an_epoch_a_line(tmp_path, monkeypatch, terminal):
    from rich.console import Console

    from deeprnn.commands import run_results, run_view

    written = io.StringIO()
    screen = Console(file=written, force_terminal=terminal, width=200, highlight=False)
    monkeypatch.setattr(run_view, "console", lambda: screen)
    monkeypatch.setattr(run_results, "console", lambda: screen)
    monkeypatch.setattr(run_view, "REFRESH", 0.0)

    class Closing(run_view.RunView):
        def epoch_ended(self, trainer, rows):
            super().epoch_ended(trainer, rows)
            if trainer.schedule.done:
                self.__exit__()

    def watch(trainer, folder):
        return [Closing(trainer, folder, 8.338).__enter__()]

    run_recipe(recipe(stop__epochs=2, seeds=[1, 2]), tmp_path / "r", data=music(), watch=watch)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    assert "2 models in lockstep" in shown
    assert "the paper's 8.338" in shown
    assert "epoch     train     valid" in shown
    assert re.search(r"[\r\n]\s*2  +\d", shown)
    assert ("left" in shown) == terminal
    run_results.conclusion(tmp_path / "r")
    assert "test over 2 members: mean" in written.getvalue()


def test_a_second_training_process_is_refused(tmp_path):
    with lock(tmp_path), pytest.raises(UserError, match="in use by process"):
        run_recipe(recipe(), tmp_path, data=music())


def test_one_broken_folder_does_not_hide_the_others(tmp_path, capsys):
    pytest.importorskip("tyro")
    from deeprnn.commands.runs import Runs

    run_recipe(recipe(), tmp_path / "whole", data=music())
    for name, content in (("torn", '{"name": '), ("strange", '{"data": 3}'), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    assert Runs(tmp_path, json=True).run() == 0
    printed = capsys.readouterr()
    assert [run["path"] for run in json.loads(printed.out)] == [str(tmp_path / "whole")]
    said = printed.err.replace("\n", "")
    assert all(str(tmp_path / name) in said for name in ("torn", "strange", "list"))


def changed(table: Any, path: str, value: Any) -> Any:
    """The same table with another value at a dotted path."""
    first, _, rest = path.partition(".")
    key = int(first) if isinstance(table, list) else first
    copy = table.copy()
    copy[key] = changed(table[key], rest, value) if rest else value
    return copy


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, to be copied."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    run_recipe(recipe(stop__epochs=1), folder, data=music())
    return folder


def ask_everything(folder: Path) -> None:
    run = load_run(folder)
    summary(run)
    run.generate(length=2, seed=1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.kind", "jazz"),
        ("data.most_notes", "two"),
        ("name", ["a"]),
        ("paper", {}),
        ("environment.threads", "1; rm"),
        ("result.test", "low"),
        ("result.valid", {}),
        ("result.best_epoch", []),
        ("model.levels.0.intermediate_sizes", [3] * 20_000),
        ("model.predict.output_size", 89),
    ],
)
def test_a_value_of_another_kind_in_run_json_is_told_in_words(finished, tmp_path, path, value):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    info = changed(json.loads((folder / "run.json").read_text()), path, value)
    if path.endswith("intermediate_sizes"):
        info = changed(info, "model.levels.0.units", ["tanh"])
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError):
        ask_everything(folder)


def test_a_description_that_is_consistent_but_not_the_model_s_builds_nothing(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    info = json.loads((folder / "run.json").read_text())
    info = changed(info, "model.levels.0.hidden_size", 10**7)
    info = changed(info, "model.predict.input_size", 10**7)
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="another model than"):
        load_run(folder).model()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("grid.json", {"steps_per_beat": [1, 2], "high": 108}),
        ("grid.json", {"nonsense": 1}),
        ("grid.json", [4, 21, 108]),
        ("metrics.jsonl", {"epoch": 1, "valid": "low"}),
        ("metrics.jsonl", {"epoch": 1, "valid": 1.0, "rate": {}}),
    ],
)
def test_a_value_of_another_kind_in_other_files_is_told_in_words(finished, tmp_path, name, content):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError, match=re.escape(name)):
        ask_everything(folder)


@pytest.mark.parametrize("content", [{"a": 1}, [], ["a"], [1] * 14, None])
def test_a_vocabulary_that_is_not_the_model_s_is_told_in_words(tmp_path, content):
    run_recipe(recipe(stop__epochs=1), tmp_path / "run", data=text())
    path = tmp_path / "run" / "vocabulary.json"
    path.unlink() if content is None else path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"vocabulary.json .*deeprnn resume"):
        load_run(tmp_path / "run").generate(length=2, seed=1)


def test_a_curve_without_an_end_is_not_read(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("deeprnn.runs.run_files.MOST_METRICS", 1000)
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "valid": 1.0}\n' * 100)
    with pytest.raises(UserError, match="larger than 1,000 bytes"):
        load_run(folder).metrics()


def test_a_curve_of_brackets_within_brackets_is_one_sentence(finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        load_run(folder).metrics()


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(UserError, match="no run at"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a run folder"):
        load_run(tmp_path)
    assert new_folder(tmp_path, "a").name == "a-1"
    assert new_folder(tmp_path, "a").name == "a-2"


def test_the_ledger_entry_says_how_and_what(tmp_path):
    run_recipe(recipe(stop__epochs=2), tmp_path / "r", data=music())
    entry = ledger.entry(load_run(tmp_path / "r"))
    assert entry["result"]["test"]["nats_per_frame"] > 0
    assert (entry["seed"], entry["epochs"], entry["stopped"]) == (1, 2, "all 2 epochs done")
    assert [row["epoch"] for row in entry["curve"]] == [1, 2]
    assert entry["recipe"]["schedule"]["beta"] == 20.0
    rows = [{"epoch": e, "valid": abs(e - 777.0)} for e in range(1, 1001)]
    thin = [row["epoch"] for row in ledger.thin(rows)]
    assert len(thin) < 210
    assert {1, 777, 1000} <= set(thin)


@pytest.mark.parametrize(("every", "states"), [(True, 3), (False, 1)])
def test_the_state_is_saved_every_epoch_or_when_it_is_time(tmp_path, monkeypatch, every, states):
    saved, real = [], checkpoint.save_state
    monkeypatch.setattr(checkpoint, "save_state", lambda *args: saved.append(args) or real(*args))
    settings = recipe(stop__epochs=3, save__seconds=3600.0)
    run_recipe(settings, tmp_path / "r", data=music(), save_every_epoch=every)
    assert len(saved) == states
    assert len(load_run(tmp_path / "r").metrics()) == 3


def test_the_command_line_trains_evaluates_and_lists(tmp_path, capsys):
    words = Path(tmp_path / "book.txt")
    words.write_text("in the beginning was the word \n" * 200)
    out = ["--out", str(tmp_path / "runs"), "--threads", "1", "--device", "cpu"]
    small = ["--model.hidden", "8", "--stop.epochs", "2", "--stop.patience", "0"]
    assert main(["train", str(words), "--level", "char", "--model", "rnn", *small, *out]) == 0
    shown = capsys.readouterr().out
    assert "chosen for" in shown
    assert "deeprnn generate" in shown
    folder = tmp_path / "runs" / "book-rnn-1"
    assert (folder / "curves.png").exists()
    assert main(["evaluate", str(folder), "--json", "--split", "valid"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["bpc"] == pytest.approx(Run(folder).info["result"]["valid"]["bpc"])
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["label"] == "RNN"
    assert main(["resume", str(folder), "--json"]) == 0  # finished: says so, trains nothing
    assert main(["train", str(words), "--optimizer.rate", "1"]) == 2
    assert "did you mean 'optimiser.rate'" in capsys.readouterr().err


def test_a_copied_code_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("DEEPRNN_COMMIT", "0123456789ab+")
    assert commit() == "0123456789ab+"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository in which the package's code lies."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    for name in ("runs/provenance.py", "training/loop.py"):
        write_atomically(tmp_path / "src" / "deeprnn" / name, "a = 1\n")
    write_atomically(tmp_path / "README.md", "a\n")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    monkeypatch.delenv("DEEPRNN_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src" / "deeprnn" / "runs" / "provenance.py"))
    return tmp_path


def test_a_commit_is_marked_where_any_code_of_the_package_has_changed(checkout: Path):
    clean = commit()
    assert clean is not None
    assert not clean.endswith("+")
    (checkout / "README.md").write_text("b\n")
    assert commit() == clean, "no code"
    code = checkout / "src" / "deeprnn"
    for name in ("training/loop.py", "training/new.py", "runs/provenance.py"):
        before = (code / name).read_text() if (code / name).exists() else None
        (code / name).write_text("a = 2\n")
        assert commit() == f"{clean}+", name
        (code / name).unlink() if before is None else (code / name).write_text(before)
    assert commit() == clean


def test_asking_for_the_commit_takes_no_lock_in_the_users_checkout(checkout: Path):
    """`git status` refreshes the index under a lock, which a kill at that moment would leave behind."""
    os.utime(
        checkout / "src" / "deeprnn" / "training" / "loop.py", (1, 1)
    )  # so that there is something to refresh
    index = checkout / ".git" / "index"
    before = index.read_bytes()
    assert commit() is not None
    assert index.read_bytes() == before
