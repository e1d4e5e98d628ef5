"""Live curves: the file followed, the events sent, the seat given back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deeprnn.runs.run_files import change_run
from deeprnn.web.limits import Limits
from deeprnn.web.live import Tail
from tests.web.conftest import Server, serve
from tests.web.runs import curve, write_run


def append(run: Path, epoch: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": epoch, "train": 9.0, "valid": 9.1}) + "\n")


def tail_of(run: Path) -> Tail:
    return Tail(run / "metrics.jsonl")


def test_the_tail_gives_whole_new_lines(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", epochs=2)
    tail = tail_of(run)
    began, rows = tail.look()
    assert began
    assert [row["epoch"] for row in rows] == [1, 2]
    assert tail.look() == (False, [])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "valid"')
        file.flush()
        assert tail.look() == (False, [])  # half a line waits
        file.write(": 8.0}\n")
    assert tail.look() == (False, [{"epoch": 3, "valid": 8.0}])


def test_the_tail_begins_anew_when_the_file_was_cut_or_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", epochs=5)
    tail, file = tail_of(run), run / "metrics.jsonl"
    assert len(tail.look()[1]) == 5
    file.write_text("".join(json.dumps(row) + "\n" for row in curve(3)))
    began, rows = tail.look()
    assert began
    assert len(rows) == 3
    other = run / "new"
    other.write_text("".join(json.dumps(row) + "\n" for row in curve(8)))
    other.replace(file)
    began, rows = tail.look()
    assert began
    assert len(rows) == 8


def test_a_missing_file_is_no_news(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    tail = tail_of(run)
    (run / "metrics.jsonl").unlink()
    assert tail.look() == (False, [])


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    run = write_run(tmp_path / "runs" / "growing", status="running", epochs=3)
    running = serve(tmp_path / "runs", Limits(watchers=2))
    yield run, next(running)
    next(running, None)


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def address(server: Server) -> str:
    return f"{server.url}/api/runs/{server.page.library.entries()[0].id}/events"


def test_a_run_is_watched_to_its_end(growing: tuple[Path, Server]) -> None:
    run, server = growing
    seen: list[int] = []
    statuses = []
    with httpx.stream("GET", address(server), timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for name, value in events(answer.iter_lines()):
            if name == "rows":
                seen += [row["epoch"] for row in value["rows"]]
                if seen[-1] < 6:
                    append(run, seen[-1] + 1)
                else:
                    change_run(run, status="finished")
            elif name == "status":
                statuses.append(value["status"])
            elif name == "end":
                assert value == {"status": "finished"}
                break
    assert seen == [1, 2, 3, 4, 5, 6]
    assert statuses[-1] == "finished"
    assert eventually(lambda: server.page.watchers.in_use == 0)


def test_the_running_epoch_is_watched_too(growing: tuple[Path, Server]) -> None:
    run, server = growing
    place = run / "progress.jsonl"
    place.write_text('{"epoch": 3.2, "train": 8.9}\n')
    seen: list[tuple[bool, list[float]]] = []
    with httpx.stream("GET", address(server), timeout=20) as answer:
        for name, value in events(answer.iter_lines()):
            if name != "progress":
                continue
            seen.append((value["reset"], [row["epoch"] for row in value["rows"]]))
            if len(seen) == 1:
                with place.open("a") as file:
                    file.write('{"epoch": 3.4, "train": 8.8}\n')
            elif len(seen) == 2:
                place.unlink()  # as at an epoch's end
            else:
                break
    assert seen == [(True, [3.2]), (False, [3.4]), (True, [])]


def test_watchers_are_counted_and_leave(growing: tuple[Path, Server]) -> None:
    _, server = growing
    url = address(server)
    with httpx.Client(timeout=20) as client:
        with client.stream("GET", url) as first, client.stream("GET", url) as second:
            held = [events(stream.iter_lines()) for stream in (first, second)]  # a dropped iterator hangs up
            assert [next(stream)[0] for stream in held] == ["rows", "rows"]
            third = client.get(url)
            assert third.status_code == 503
            assert third.headers["retry-after"]
        assert eventually(lambda: server.page.watchers.in_use == 0)
        with client.stream("GET", url) as again:
            assert again.status_code == 200


def eventually(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether something comes about; waits no longer than it takes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        threading.Event().wait(0.05)
    return False
