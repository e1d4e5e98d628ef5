"""A run folder that was cut, edited or damaged: noticed, named, and mended from what is left."""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from deeprnn.cli import main
from deeprnn.errors import UserError
from deeprnn.runs import checkpoint
from deeprnn.runs.folder import Run, load_run, population
from deeprnn.runs.locking import held, lock
from deeprnn.runs.run_files import KEYS
from deeprnn.training import run_folders, saving
from deeprnn.training.recipe import to_toml
from deeprnn.training.session import recipe_of, run_recipe
from tests.runs.test_folder import StopAt
from tests.torture.stories import outcome
from tests.training.toys import DEEP, music, recipe, resume


@cache
def made(kind: str) -> Path:
    """A folder of a whole run and of one that was stopped in its second epoch, trained once for all tests."""
    folder = Path(mkdtemp(prefix="deeprnn-mending-"))
    settings = recipe(model__hidden=[9], seeds=[1, 2] if kind == "population" else [1])
    run_recipe(settings, folder / "whole", data=music())
    with pytest.raises(saving.Interrupted):
        run_recipe(settings, folder / "cut", data=music(), watch=lambda t, f: [StopAt(t.length + 3)])
    return folder


@pytest.fixture(params=["run", "population"])
def stopped(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A stopped run or population of its own."""
    shutil.copytree(made(request.param) / "cut", tmp_path / "r")
    return tmp_path / "r"


def expected(folder: Path) -> dict:
    return outcome(made("population" if (folder / "population.json").exists() else "run") / "whole")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_a_recipe_cut_at_a_line_is_taken_from_the_checkpoint(stopped, share, caplog):
    path = stopped / "recipe.toml"
    whole = lines(path)
    path.write_text("".join(whole[: int(share * len(whole))]))
    resume(stopped, data=music())
    assert "recipe.toml has lost" in caplog.text
    assert lines(path) == whole
    assert outcome(stopped) == expected(stopped)


def test_a_recipe_cut_within_a_line_is_taken_from_the_checkpoint(stopped, caplog):
    path = stopped / "recipe.toml"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"hidden") + 3])
    resume(stopped, data=music())
    assert "not valid TOML" in caplog.text
    assert path.read_bytes() == content
    assert outcome(stopped) == expected(stopped)


def test_a_lost_recipe_is_taken_from_the_checkpoint(stopped):
    (stopped / "recipe.toml").unlink()
    resume(stopped, data=music())
    assert outcome(stopped) == expected(stopped)


def test_a_changed_recipe_is_refused_by_the_field(stopped):
    path = stopped / "recipe.toml"
    path.write_text(path.read_text().replace("hidden = [9]", "hidden = [8]"))
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"model.hidden is \[8\], but the run was trained with \[9\]"):
        resume(stopped, data=music())
    assert before == {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}


def test_a_cut_recipe_before_the_first_checkpoint_is_refused(stopped):
    path = stopped / "recipe.toml"
    for name in ("last", "previous"):
        for kind in ("json", "safetensors"):
            (stopped / f"{name}.{kind}").unlink(missing_ok=True)
    path.write_text("".join(lines(path)[:-5]))
    with pytest.raises(UserError, match="not what the run began with"):
        resume(stopped, data=music())


def test_who_reads_a_changed_recipe_of_a_finished_run_is_told(tmp_path):
    shutil.copytree(made("run") / "whole", tmp_path / "r")
    run = Run(tmp_path / "r")
    assert run.recipe["model"]["hidden"] == [9]
    path = run.path / "recipe.toml"
    whole = lines(path)
    path.write_text("# a comment changes nothing\n" + path.read_text())
    assert run.recipe["model"]["hidden"] == [9]
    path.write_text("".join(whole[:10]))
    with pytest.raises(UserError, match=r"not what the run was trained by .*resume"):
        _ = run.recipe
    resume(run.path, data=music())
    assert lines(path) == whole


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("how", ["gone", "wrong"])
def test_a_key_missing_from_run_json_is_named(tmp_path, key, how):
    info = json.loads((made("run") / "whole" / "run.json").read_text())
    table = info["data"] if "." in key else info
    name = key.rpartition(".")[2]
    if how == "gone":
        del table[name]
    else:
        table[name] = [[]]
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=rf"run.json is damaged: .*'{key}'.* resume .* writes it again"):
        _ = Run(tmp_path).info


def test_a_damaged_run_json_is_mended(stopped, caplog):
    (load_run(stopped).path / "run.json").write_text('{"name": "r", "status": "stopped"}')
    resume(stopped, data=music())
    assert "is written anew" in caplog.text
    assert outcome(stopped) == expected(stopped)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"members": []}', '{"members": ["../x"]}', None])
def test_a_damaged_population_file_is_named_and_mended(tmp_path, content):
    shutil.copytree(made("population") / "cut", tmp_path / "r")
    path = tmp_path / "r" / "population.json"
    whole = path.read_bytes()
    if content is None:
        path.unlink()
        with pytest.raises(UserError, match="trains as one"):
            recipe_of(tmp_path / "r" / "seed-1")
    else:
        path.write_text(content)
        with pytest.raises(UserError, match=r"population.json"):
            population(tmp_path / "r")
    resume(tmp_path / "r", data=music())
    assert path.read_bytes() == whole
    assert outcome(tmp_path / "r") == expected(tmp_path / "r")


def test_other_data_is_refused_though_run_json_is_lost(stopped):
    (load_run(stopped).path / "run.json").unlink()
    with pytest.raises(UserError, match="has changed since"):
        resume(stopped, data=music(songs=7))


def test_a_kill_at_the_very_end_leaves_no_finished_run_without_its_ledger_entry(tmp_path, monkeypatch):
    """Killed at any single write of the conclusion, the run ends with both files."""
    for writes in range(3):
        folder, count = tmp_path / str(writes), iter(range(100))

        def killed(path, data, writes=writes, count=count, real=run_folders.write_json):
            if next(count) >= writes:
                raise KeyboardInterrupt
            real(path, data)

        with monkeypatch.context() as patch:
            real = run_folders.finish

            def conclude(*args, patch=patch, killed=killed, real=real):
                patch.setattr(run_folders, "write_json", killed)
                patch.setattr("deeprnn.runs.run_files.write_json", killed)
                return real(*args)

            patch.setattr(run_folders, "finish", conclude)
            if writes < 2:
                with pytest.raises(KeyboardInterrupt):
                    run_recipe(recipe(stop__epochs=1), folder, data=music())
            else:
                run_recipe(recipe(stop__epochs=1), folder, data=music())
        if Run(folder).info["result"] is not None:
            assert (folder / "ledger.json").exists()
        resume(folder, data=music())
        assert json.loads((folder / "ledger.json").read_text())["result"] == Run(folder).info["result"]


def test_a_lost_ledger_entry_is_written_again(tmp_path):
    run_recipe(recipe(stop__epochs=1), tmp_path / "r", data=music())
    path = tmp_path / "r" / "ledger.json"
    whole = path.read_bytes()
    for damage in (b"", b"{", None):
        path.unlink() if damage is None else path.write_bytes(damage)
        resume(tmp_path / "r", data=music())
        assert path.read_bytes() == whole


def test_leftovers_of_killed_processes_go_when_the_run_goes_on(stopped):
    left = [stopped / ".last.json.0123abcd.tmp", load_run(stopped).path / ".best.json.0123abcd.tmp"]
    for path in left:
        path.write_text("half")
    resume(stopped, data=music())
    assert not any(path.exists() for path in left)


# ---- one process at a time


def test_a_refused_training_leaves_the_lock_of_the_running_one(tmp_path, capsys):
    """Also where the running one has written nothing yet."""
    folder, book = tmp_path / "r", tmp_path / "book.txt"
    book.write_text("in the beginning was the word \n" * 200)
    words = ["train", str(book), "--model", "rnn", "--threads", "1", "--out", str(tmp_path), "--name", "r"]
    with lock(folder):
        inode = os.stat(folder / ".lock").st_ino
        for _ in range(2):
            assert main(words) == 2
            assert f"{folder} is in use by process {os.getpid()}" in capsys.readouterr().err
        assert os.stat(folder / ".lock").st_ino == inode
        assert held(folder)


def test_a_new_run_is_refused_where_one_stands(stopped):
    with pytest.raises(UserError, match="go on with `deeprnn resume"):
        run_recipe(recipe(), stopped, data=music(), new=True)


def test_a_first_stage_is_not_resumed_beside_its_run(tmp_path, monkeypatch):
    stage = tmp_path / "stage.toml"
    stage.write_text(to_toml(recipe(stop__epochs=1)))
    folder = tmp_path / "r"
    with pytest.raises(saving.Interrupted):
        run_recipe(
            recipe(pretrain__recipe=str(stage), **DEEP), folder, data=music(), watch=lambda t, f: [StopAt(3)]
        )
    with lock(folder):
        for place in (folder / "pretrain", Path("pretrain")):
            monkeypatch.chdir(folder)
            with pytest.raises(UserError, match=rf"{folder} is in use"):
                resume(place, data=music())
    resume(folder / "pretrain", data=music())
    assert Run(folder / "pretrain").info["status"] == "finished"
    resume(folder, data=music())
    assert Run(folder).info["status"] == "finished"
    assert checkpoint.load_best(folder).tensors
