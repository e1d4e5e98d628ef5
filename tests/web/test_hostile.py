"""Run folders that someone made to do harm: each is one bad row, and everything else goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from starlette.testclient import TestClient

from deeprnn.runs.checkpoint import save_best
from deeprnn.web.library import Library
from deeprnn.web.limits import Limits
from deeprnn.web.live import Tail
from tests.web.conftest import client_of, ids
from tests.web.runs import write_run

READ = ("", "/metrics", "/drawing.svg")
ASKED = {"predict": {"frames": [[39]]}, "score": {"text": "the"}, "continue": {"length": 2}, "wav": {"frames": [[39]]},
         "midi": {"frames": [[39]]}}  # fmt: skip


def change(run: Path, **fields: Any) -> None:
    path = run / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def replace(run: Path, name: str, make: Callable[[Path], Any]) -> None:
    (run / name).unlink(missing_ok=True)
    make(run / name)


def link(target: Path | str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def many_layers(run: Path) -> None:
    model = json.loads((run / "run.json").read_text())["model"]
    model["levels"][0] |= {"intermediate_sizes": [1] * 20_000, "units": ["tanh"]}
    change(run, model=model)


def wide(run: Path) -> None:
    model = json.loads((run / "run.json").read_text())["model"]
    model["levels"][0] |= {"hidden_size": 10**6}
    model["predict"] |= {"input_size": 10**6}
    change(run, model=model)


def forge(run: Path) -> None:
    """Parameters that agree with their checksum, but are no numbers."""
    tensors = safetensors.torch.load_file(run / "best.safetensors")
    save_best(run, {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}, {"epoch": 1})


def forge_header(run: Path) -> None:
    """A table of contents that is no JSON, signed."""
    import hashlib

    content = (200_000).to_bytes(8, "little") + b"\xff" * 300_000
    (run / "best.safetensors").write_bytes(content)
    sidecar = json.loads((run / "best.json").read_text())
    (run / "best.json").write_text(json.dumps({**sidecar, "sha256": hashlib.sha256(content).hexdigest()}))


def long_header(run: Path) -> None:
    (run / "best.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{" * 300_000)


HARM: dict[str, Callable[[Path], Any]] = {
    "metrics are a pipe": lambda run: replace(run, "metrics.jsonl", os.mkfifo),
    "metrics never end": lambda run: replace(run, "metrics.jsonl", link("/dev/zero")),
    "metrics are huge": lambda run: replace(run, "metrics.jsonl", sparse),
    "metrics are a folder": lambda run: replace(run, "metrics.jsonl", Path.mkdir),
    "metrics have many lines": lambda run: (run / "metrics.jsonl").write_bytes(b"{}\n" * 200_000),
    "rows hold anything": lambda run: (run / "metrics.jsonl").write_text(
        json.dumps({"epoch": [1], "valid": {"a": 1}, "x" * 5000: "y" * 5000}) + "\n"
    ),
    "the description is a pipe": lambda run: replace(run, "vocabulary.json", os.mkfifo),
    "the grid is a pipe": lambda run: replace(run, "grid.json", os.mkfifo),
    "the grid is none": lambda run: (run / "grid.json").write_text('{"steps_per_beat": "4", "low": [], "x": 1}'),
    "the grid is narrow": lambda run: (run / "grid.json").write_text('{"low": 60, "high": 61}'),
    "the parameters are a pipe": lambda run: replace(run, "best.safetensors", os.mkfifo),
    "the parameters are linked": lambda run: replace(run, "best.safetensors", link("/dev/zero")),
    "the parameters are huge": lambda run: replace(run, "best.safetensors", sparse),
    "the checksums are a pipe": lambda run: replace(run, "best.json", os.mkfifo),
    "the lock is a pipe": lambda run: [replace(run, ".lock", os.mkfifo), change(run, status="running")],
    "nested deep": lambda run: change(run, environment=nested(700), seed=nested(700), paper=nested(50)),
    "nested deeper": lambda run: (run / "run.json").write_text("[" * 500_000),
    "twenty thousand layers": many_layers,
    "wider than memory": wide,
    "data is a list": lambda run: change(run, data=["music"]),
    "kind is a list": lambda run: change(run, data={"name": "jsb", "kind": ["music"]}),
    "kind is another": lambda run: change(run, data={"name": "jsb", "kind": "char"}),
    "long names": lambda run: change(run, label="x" * 100_000, status="y" * 100_000, commit="z" * 100_000),
    "results are anything": lambda run: change(run, result={"test": [1], "valid": "x", "best_epoch": {}}),
    "not finite": forge,
    "forged": forge_header,
    "a long table of contents": long_header,
}  # fmt: skip


def everything(client: TestClient, id: str) -> list[int]:
    """The status of every address of a run."""
    answers = [client.get(f"/api/runs/{id}{path}") for path in READ]
    answers += [client.post(f"/api/runs/{id}/{path}", json=body) for path, body in ASKED.items()]
    for answer in answers:
        assert "root:" not in answer.text
        assert len(answer.content) < 4_000_000
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("harm", HARM)
def test_a_hostile_run_is_one_bad_row(tmp_path: Path, harm: str) -> None:
    write_run(tmp_path / "good")
    HARM[harm](write_run(tmp_path / "bad"))
    with client_of(tmp_path) as client:
        found = client.get("/api/runs")
        assert len(found.content) < 20_000
        run = ids(client)
        assert set(run) == {"good", "bad"}
        assert set(everything(client, run["bad"])) <= {200, 404, 409, 422}
        assert everything(client, run["good"]) == [200, 200, 200, 200, 409, 200, 200, 200]


@pytest.mark.parametrize(
    "vocabulary", [[], ["a"], [1, 2], {"a": 1}, "abc", None, [["a"]] * 28], ids=lambda v: str(v)[:12]
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, vocabulary: Any) -> None:
    run = write_run(tmp_path / "letters", "char")
    (run / "vocabulary.json").write_text(json.dumps(vocabulary))
    with client_of(tmp_path) as client:
        for path in ("score", "continue"):
            answer = client.post(
                f"/api/runs/{ids(client)['letters']}/{path}", json={"text": "a", "length": 2}
            )
            assert answer.status_code == 422
            assert "vocabulary" in answer.json()["error"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    run = write_run(tmp_path / "runs" / "a")
    for name in ("metrics.jsonl", "grid.json", "best.safetensors"):
        replace(run, name, link(outside / name))
    with client_of(tmp_path / "runs") as client:
        id = ids(client)["a"]
        row = client.get("/api/runs").json()["runs"][0]
        assert "is a link, which is not followed" in row["error"]
        assert not row["playable"]
        assert client.get(f"/api/runs/{id}/metrics").json() == {"rows": []}
        assert client.get(f"/api/runs/{id}").json()["grid"] is None
        assert client.post(f"/api/runs/{id}/predict", json={}).status_code == 409


@pytest.mark.parametrize("make", [os.mkfifo, link("/dev/zero"), Path.mkdir])
def test_a_live_curve_waits_for_nothing(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    run = write_run(tmp_path / "a", status="running")
    replace(run, "metrics.jsonl", make)
    assert Tail(run / "metrics.jsonl").look() == (False, [])


def test_a_name_that_is_no_utf8_is_shown_as_far_as_it_can_be(tmp_path: Path) -> None:
    source = write_run(tmp_path / "good")
    os.rename(source, os.fsencode(tmp_path) + b"/caf\xe9")
    with client_of(tmp_path) as client:
        run = ids(client)["caf?"]
        assert everything(client, run) == [200, 200, 200, 200, 409, 200, 200, 200]


def test_a_walk_that_takes_long_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a")
    library = Library([tmp_path], Limits(), pause=0)
    assert len(library.entries()) == 1
    inner: list[int] = []
    scan = library._scan

    def slow() -> Any:
        inner.append(len(library.entries()))  # as another thread would ask meanwhile
        return scan()

    monkeypatch.setattr(library, "_scan", slow)
    assert len(library.entries()) == 1
    assert inner == [1]


def test_asking_for_unknown_runs_does_not_walk_the_folders_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a")
    with client_of(tmp_path) as client:
        library = client.app.state.page.library  # type: ignore[attr-defined]
        library._clock = lambda: 1.0  # time stands still
        assert client.get("/api/runs").status_code == 200
        scan, walks = library._scan, []
        monkeypatch.setattr(library, "_scan", lambda: walks.append(1) or scan())
        for i in range(20):
            assert client.get(f"/api/runs/{i:016x}").status_code == 404
        assert len(walks) <= 1
