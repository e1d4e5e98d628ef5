"""Renaming, tagging and deleting runs, and everything that keeps them from harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deeprnn.runs.folder import load_run
from deeprnn.runs.locking import lock
from tests.web.conftest import client_of, ids
from tests.web.runs import write_run

FROM_PAGE = {"x-deeprnn": "page"}


def edit(client: TestClient, run: str, what: str, headers: dict[str, str] = FROM_PAGE, **body: Any) -> Any:
    return client.post(f"/api/runs/{ids(client)[run]}/{what}", json=body, headers=headers)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name in ("a", "b"):
        write_run(root / name)
    return root


def listing(root: Path) -> set[str]:
    """Every file below a folder."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_run_is_renamed_with_its_folder(runs: Path) -> None:
    with client_of(runs) as client:
        answer = edit(client, "a", "rename", name="My best, 2nd try (C)")
        assert answer.status_code == 200, answer.text
        assert ids(client) == {"b": ids(client)["b"], "My best, 2nd try (C)": answer.json()["id"]}
        assert client.post(f"/api/runs/{answer.json()['id']}/predict", json={}).status_code == 200
    assert load_run(runs / "My best, 2nd try (C)").name == "My best, 2nd try (C)"
    assert not (runs / "a").exists()


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        ".",
        "..",
        "../x",
        "x/y",
        "/etc",
        "a\\b",
        ".hidden",
        "-rf",
        "x\n",
        "x\0",
        "x" * 81,
        "x ",
        "b",
        3,
        None,
    ],
)
def test_other_names_are_refused(runs: Path, name: Any) -> None:
    before = listing(runs.parent)
    with client_of(runs) as client:
        answer = edit(client, "a", "rename", name=name)
    assert answer.status_code in (409, 422)
    assert listing(runs.parent) - {"runs/a/.lock"} == before


def test_tags_are_kept_shown_and_replaced(runs: Path) -> None:
    with client_of(runs) as client:
        assert edit(client, "a", "tags", tags=["good", "für später"]).json() == {
            "tags": ["good", "für später"]
        }
        shown = {run["name"]: run["tags"] for run in client.get("/api/runs").json()["runs"]}
        assert shown == {"a": ["good", "für später"], "b": []}
        assert edit(client, "a", "tags", tags=[]).json() == {"tags": []}
        for bad in (["x" * 31], ["a,b"], ["\n"], [""], [1], "x", ["a"] * 60, [f"t{i}" for i in range(13)]):
            assert edit(client, "a", "tags", tags=bad).status_code == 422, bad
    assert json.loads((runs / "a" / "tags.json").read_text()) == []


def test_a_run_in_training_may_be_tagged(runs: Path) -> None:
    with client_of(runs) as client, lock(runs / "a"):
        assert edit(client, "a", "tags", tags=["watch"]).status_code == 200


def test_a_run_is_deleted_when_its_name_is_repeated(runs: Path) -> None:
    with client_of(runs) as client:
        assert edit(client, "a", "delete", name="b").status_code == 409
        assert edit(client, "a", "delete").status_code == 409
        assert (runs / "a").is_dir()
        assert edit(client, "a", "delete", name="a").status_code == 200
        assert set(ids(client)) == {"b"}
    assert {path.name for path in runs.iterdir()} == {"b"}


@pytest.mark.parametrize("what", ["delete", "rename"])
def test_a_run_in_use_is_left_alone(runs: Path, what: str) -> None:
    write_run(runs / "told", status="running")
    (runs / "b" / "pretrain").mkdir()
    before = listing(runs)
    with client_of(runs) as client:
        names = {"delete": {}, "rename": {"name": "other"}}[what]
        with lock(runs / "a"), lock(runs / "b" / "pretrain"):
            for run in ("a", "b", "told"):
                answer = edit(client, run, what, **{"name": run, **names})
                assert answer.status_code == 409, answer.text
                assert any(word in answer.json()["error"] for word in ("in use", "is training"))
    assert listing(runs) - {"a/.lock", "b/pretrain/.lock"} == before


@pytest.mark.parametrize("what", ["delete", "rename"])
def test_parts_of_a_run_and_the_served_folder_are_left_alone(tmp_path: Path, what: str) -> None:
    root = tmp_path / "runs"
    write_run(root / "many" / "seed-1")
    (root / "many" / "population.json").write_text('{"members": ["seed-1"]}')
    write_run(write_run(root / "two-stages") / "pretrain")
    with client_of(root) as client:
        for run in ("many/seed-1", "two-stages/pretrain"):
            answer = edit(client, run, what, name=run if what == "delete" else "other")
            assert answer.status_code == 409
            assert "part of" in answer.json()["error"]
    with client_of(root / "two-stages") as client:
        answer = edit(client, "two-stages", what, name="two-stages" if what == "delete" else "other")
        assert answer.status_code == 409
        assert "served folder" in answer.json()["error"]
    assert (root / "two-stages" / "pretrain" / "run.json").exists()


def test_a_run_goes_with_its_first_stage(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(write_run(root / "two-stages") / "pretrain")
    (root / "two-stages" / "tensorboard").mkdir()
    with client_of(root) as client:
        assert edit(client, "two-stages", "delete", name="two-stages").status_code == 200
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("path", ["thesis.tex", "data/song.mid", "pretrain/notes.txt", "seed-1/photo.jpg"])
def test_a_folder_with_other_files_is_not_deleted(runs: Path, path: str) -> None:
    place = runs / "a" / path
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine")
    with client_of(runs) as client:
        answer = edit(client, "a", "delete", name="a")
    assert answer.status_code == 409
    assert path.split("/")[-1].split(".")[0] in answer.json()["error"] or "data/" in answer.json()["error"]
    assert place.read_text() == "mine"
    assert (runs / "a" / "best.safetensors").exists()


@pytest.mark.parametrize("name", [".lock", "tags.json", ".tags.json.tmp", ".run.json.tmp", "best.json"])
def test_links_lead_nowhere(runs: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (runs / "a" / name).unlink(missing_ok=True)
    os.symlink(precious, runs / "a" / name)
    with client_of(runs) as client:
        edit(client, "a", "tags", tags=["x"])
        edit(client, "a", "rename", name="c")
        for run in ids(client):
            edit(client, run, "delete", name=run)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("what", ["rename", "tags", "delete"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {**FROM_PAGE, "origin": "http://evil.example"},
        {**FROM_PAGE, "sec-fetch-site": "cross-site"},
        {**FROM_PAGE, "host": "evil.example"},
    ],
)
def test_only_the_page_may_ask(runs: Path, what: str, headers: dict[str, str]) -> None:
    before = listing(runs)
    with client_of(runs) as client:
        assert edit(client, "a", what, headers, name="a", tags=["x"]).status_code in (403, 421)
        assert client.get(f"/api/runs/{ids(client)['a']}/{what}").status_code == 405
    assert listing(runs) == before


def test_a_server_that_others_reach_changes_nothing(runs: Path) -> None:
    before = listing(runs)
    with client_of(runs, editable=False) as client:
        assert client.get("/api/runs").json()["editable"] is False
        for what in ("rename", "tags", "delete"):
            answer = edit(client, "a", what, name="a", tags=["x"])
            assert answer.status_code == 403
            assert "--edit always" in answer.json()["error"]
    assert listing(runs) == before
