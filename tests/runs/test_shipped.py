"""The run that comes with the package: it plays at once, is small, and stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deeprnn import UserError, cli, load_run
from deeprnn.runs import shipped
from deeprnn.training.recipe import Recipe, load_recipe

QUICK = ("--formats", "mid", "--no-copy-check", "--out", "song")


def test_it_plays_without_training(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "bach", "--seed", "1", "--length", "32", *QUICK]) == 0
    printed = capsys.readouterr()
    assert Path(printed.out.strip()).read_bytes()[:4] == b"MThd"
    assert "comes with deeprnn" in printed.err
    assert load_run("bach").generate(seed=1, length=8)[0].any()


def test_a_folder_of_the_users_goes_before(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bach").mkdir()
    with pytest.raises(UserError, match=r"holds no run\.json"):
        load_run("bach")


def test_where_there_is_no_run_it_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="bach comes with deeprnn"):
        load_run("nothing")


def test_names_are_no_paths():
    for name in ("../shipped/bach", "bach/", "bach/..", "", ".", "/bach"):
        assert shipped.find(name) is None


@pytest.mark.parametrize("name", shipped.names())
def test_it_is_small_finished_and_made_by_a_recipe_of_ours(name: str):
    folder = shipped.FOLDER / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3_000_000
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "finished"
    assert Recipe.from_dict(load_run(name).recipe) == load_recipe(f"shipped/{name}")
    card = (folder / "README.md").read_text()
    for split in ("valid", "test"):
        assert f"{info['result'][split]['nats_per_frame']:.3f}" in card


def test_the_page_shows_it_and_does_not_change_it(tmp_path: Path):
    pytest.importorskip("starlette", reason="the page needs deeprnn[web]")
    from deeprnn.web.app import create_app
    from tests.web.conftest import TestClient
    from tests.web.test_editing import edit

    app = create_app([tmp_path / "runs", shipped.FOLDER])
    with TestClient(app, base_url="http://localhost") as client:
        answer = edit(client, "bach", "delete", name="bach")
        assert answer.status_code == 409
        assert "comes with deeprnn" in answer.text
    assert shipped.names() == ["bach"]


def test_it_is_described_by_its_name(capsys):
    assert cli.main(["describe", "bach"]) == 0
    assert "DOT(S)-RNN-NADE" in capsys.readouterr().out
