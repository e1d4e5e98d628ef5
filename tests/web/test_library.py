"""Finding runs, and reading no file twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deeprnn.runs.summary import thin
from deeprnn.web.library import Library
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal
from deeprnn.web.summary import parse_row
from tests.web.runs import curve, write_run


def many(root: Path, count: int) -> None:
    """Cheap runs: enough for the list."""
    for i in range(count):
        run = root / f"group-{i % 7}" / f"run-{i:03d}"
        run.mkdir(parents=True)
        info = {
            "name": run.name,
            "status": "finished",
            "data": {"name": "jsb", "kind": "music"},
            "label": "RNN",
            "updated": f"2026-01-01T00:{i // 60:02d}:{i % 60:02d}",
            "result": {"test": {"nats_per_frame": 8.3}},
        }
        (run / "run.json").write_text(json.dumps(info))
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve(20)))


def test_two_hundred_runs_are_read_once(tmp_path: Path) -> None:
    many(tmp_path, 200)
    library = Library([tmp_path], Limits(), pause=0.0)
    first = library.entries()
    assert len(first) == 200
    assert library.reads == 400  # run.json and metrics.jsonl of each
    assert [e.summary for e in library.entries()] == [e.summary for e in first]
    assert library.reads == 400
    assert first[0].summary["name"].endswith("run-199")  # newest first

    changed = first[3].path / "metrics.jsonl"
    changed.write_text(changed.read_text() + json.dumps({"epoch": 21, "valid": 8.0}) + "\n")
    assert library.entries()[3].summary["epochs"] == 21
    assert library.reads == 401


def test_folders_are_walked_at_most_once_a_pause(tmp_path: Path) -> None:
    now = [0.0]
    library = Library([tmp_path], Limits(), pause=1.0, clock=lambda: now[0])
    assert library.entries() == []
    many(tmp_path, 1)
    now[0] = 0.9
    assert library.entries() == []
    now[0] = 1.1
    assert len(library.entries()) == 1


def test_ids_tell_nothing_and_find_only_runs(tmp_path: Path) -> None:
    many(tmp_path, 3)
    library = Library([tmp_path], Limits())
    entry = library.entries()[0]
    assert entry.id.isalnum()
    assert library.get(entry.id) is entry
    for wrong in ("", "..", "../etc", str(entry.path), entry.summary["name"], entry.id[:-1]):
        with pytest.raises(Refusal) as caught:
            library.get(wrong)
        assert caught.value.status == 404


def test_a_run_that_is_deleted_is_gone(tmp_path: Path) -> None:
    many(tmp_path, 1)
    library = Library([tmp_path], Limits())
    entry = library.entries()[0]
    for file in entry.path.iterdir():
        file.unlink()
    entry.path.rmdir()
    with pytest.raises(Refusal, match="no such run"):
        library.get(entry.id)


def test_links_and_hidden_folders_are_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    many(outside, 2)
    many(inside / ".hidden", 1)
    os.symlink(outside, inside / "link")
    assert Library([inside], Limits()).entries() == []


def test_broken_files_are_listed_not_raised(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text('{"data": 3, "result": [], "model": "x", "parameters": "many"}')
    (tmp_path / "b" / "metrics.jsonl").write_text(
        '{"epoch": 1, "valid": NaN}\nnot json\n[1]\n{"epoch": 2, "val'
    )
    library = Library([tmp_path], Limits())
    found = {e.summary["name"]: e for e in library.entries()}
    assert found["a"].summary["status"] == "unreadable"
    assert found["b"].summary["status"] == "unknown"
    assert found["b"].summary["parameters"] is None
    assert library.metrics(found["b"]) == [{"epoch": 1, "valid": None}]


def test_a_killed_run_is_not_shown_as_running(tmp_path: Path) -> None:
    from deeprnn.runs.locking import lock

    run = write_run(tmp_path / "young", status="running", epochs=2)
    library = Library([tmp_path], Limits(), pause=0)
    status = lambda: library.entries()[0].summary["status"]  # noqa: E731
    assert status() == "running"  # without a lock it is believed
    with lock(run):
        assert status() == "running"
    assert status() == "interrupted"


def test_a_run_within_a_run_is_found(tmp_path: Path) -> None:
    many(tmp_path, 1)
    run = next(tmp_path.glob("*/*"))
    (run / "first-stage").mkdir()
    (run / "first-stage" / "run.json").write_text("{}")
    names = {e.summary["name"] for e in Library([tmp_path], Limits()).entries()}
    assert names == {"group-0/run-000", "group-0/run-000/first-stage"}


def test_the_folder_may_be_a_run_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "only")
    entry = Library([run], Limits()).entries()[0]
    assert entry.summary["name"] == "only"
    assert entry.summary["test"] == 8.31
    assert entry.summary["playable"]


def test_rows_that_are_torn_or_strange() -> None:
    assert parse_row(b'{"epoch": 1, "train": Infinity}') == {"epoch": 1, "train": None}
    assert parse_row(b'{"epoch": 1') is None
    assert parse_row(b"[" * 100_000) is None


def test_thinning_keeps_the_ends() -> None:
    values = [float(v) for v in range(1000)]
    assert len(thin(values, 48)) == 48
    assert thin(values, 48)[0] == 0
    assert thin(values, 48)[-1] == 999
    assert thin([1.0], 48) == [1.0]
