"""Hostile run folders under `deeprnn serve`: each is at most one bad row, and the page stays what it is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.torture import specimens
from tests.torture.attack import Arena, attack
from tests.torture.page import Page, served
from tests.torture.requests import MEGABYTES, MUSIC, SLOWEST, TEXT

SECRET = "what lies outside of the runs and is nobody's business"
Maker = Callable[[Path, Path], None]
"""makes a whole run (a copy of a trained one) hostile; the second folder lies outside of what is served"""


def _changed(file: str, **changes: Any) -> Maker:
    def make(run: Path, outside: Path) -> None:
        content = json.loads((run / file).read_bytes())
        (run / file).write_text(json.dumps({**content, **changes}))

    return make


def _replaced(file: str, content: bytes) -> Maker:
    def make(run: Path, outside: Path) -> None:
        (run / file).write_bytes(content)

    return make


def _linked(file: str, target: str) -> Maker:
    """A link in the place of a file: OUTSIDE is a folder that is not served."""

    def make(run: Path, outside: Path) -> None:
        (run / file).unlink()
        (run / file).symlink_to(target.replace("OUTSIDE", str(outside)))

    return make


def _pipe(file: str) -> Maker:
    def make(run: Path, outside: Path) -> None:
        (run / file).unlink()
        os.mkfifo(run / file)

    return make


def _named(name: bytes) -> Maker:
    def make(run: Path, outside: Path) -> None:
        os.rename(os.fsencode(run), os.path.join(os.fsencode(run.parent), name))

    return make


def _with_run_json(name: str) -> Maker:
    def make(run: Path, outside: Path) -> None:
        info = json.loads((run / "run.json").read_bytes())
        (run / "run.json").write_bytes(specimens.run_json(info)[name]())

    return make


def _many_files(run: Path, outside: Path) -> None:
    for number in range(3000):
        (run / f"{number}").mkdir()


def _deep(run: Path, outside: Path) -> None:
    place = run
    for _ in range(60):
        place = place / "deeper"
    place.mkdir(parents=True)
    shutil.copy(run / "run.json", place / "run.json")


def _whole_folder_is_a_link(run: Path, outside: Path) -> None:
    run.rename(outside / "a-run-elsewhere")
    run.symlink_to(outside / "a-run-elsewhere")


FILES = ("run.json", "metrics.jsonl", "best.json", "best.safetensors", "grid.json")
HOSTILE: dict[str, Maker] = {
    **{f"{file} is a pipe": _pipe(file) for file in FILES},
    **{f"{file} is endless": _linked(file, "/dev/zero") for file in FILES},
    **{f"{file} is a link to itself": _linked(file, file) for file in FILES},
    **{f"{file} is a link outside": _linked(file, "OUTSIDE/secret.json") for file in FILES},
    **{f"{file} is noise": _replaced(file, b"\x00\xff\xfe{[" * 200) for file in FILES},
    **{f"{file} is not UTF-8": _replaced(file, b'{"name": "\xff\xfe"}') for file in FILES},
    "run.json is nested": _with_run_json("nested seven hundred times"),
    "run.json has twenty thousand levels": _with_run_json("twenty thousand levels"),
    "run.json has ten million units": _with_run_json("ten million units"),
    "data is a number": _changed("run.json", data=7),
    "data is a list": _changed("run.json", data=[[]]),
    "the kind is a list": _changed("run.json", data={"kind": ["music"], "name": {}}),
    "the label is a script": _changed(
        "run.json", label="<script>alert(1)</script>", name="<img onerror=alert(1)>"
    ),
    "times are numbers": _changed("run.json", created=1e308, updated=[1], status={"a": 1}),
    "numbers are texts": _changed(
        "run.json", parameters="many", paper="none", seed=[], result={"test": "low"}
    ),
    "the result is endless": _changed("run.json", result={"test": {"nats_per_frame": float("inf")}}),
    "the status is running": _changed("run.json", status="running", result=None),
    "the vocabulary is empty": _replaced("vocabulary.json", b"[]"),
    "the vocabulary is a number": _replaced("vocabulary.json", b"7"),
    "the grid is absurd": _replaced("grid.json", b'{"steps_per_beat": 1000000000, "low": -5, "high": 900}'),
    "weights claim gigabytes": _replaced(
        "best.safetensors", specimens.SAFETENSORS["a tensor of gigabytes"]()
    ),
    "a curve of a million lines": _replaced("metrics.jsonl", b'{"epoch":1,"valid":1}\n' * 1_000_000),
    "a curve of one long line": _replaced("metrics.jsonl", b'{"epoch":' + b"9" * 5_000_000 + b"}\n"),
    "a curve of trees": _replaced("metrics.jsonl", b'{"epoch":[[]],"valid":{"a":[1]}}\n' * 50),
    "a name that is no UTF-8": _named(b"bad-\xff\xfe"),
    "a name with a new line": _named(b"two\nlines"),
    "a name with markup": _named(b"<b>[red]bold"),
    "many folders": _many_files,
    "deep folders": _deep,
    "the folder is a link": _whole_folder_is_a_link,
}


@attack("hostile run folders", share=2)
def hostile_folders(arena: Arena) -> None:
    """One hostile run beside a good one, then all of them together: the good one is served as ever."""
    outside = arena.folder / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text(
        json.dumps({"name": SECRET, "label": SECRET, "epoch": 1, "valid": SECRET})
    )
    for name in arena.each(HOSTILE):
        kind = "text" if "vocabulary" in name else "music"
        with arena.case(name):
            folder = _laid(arena, arena.folder / "runs", [name], kind)
            with served(folder) as page:
                _look_everywhere(page)
        shutil.rmtree(arena.folder / "runs", ignore_errors=True)
        shutil.rmtree(outside / "a-run-elsewhere", ignore_errors=True)
    with arena.case("all of them"):
        folder = _laid(arena, arena.folder / "runs", list(HOSTILE), "music")
        with served(folder) as page:
            _look_everywhere(page)


def _laid(arena: Arena, folder: Path, names: list[str], kind: str) -> Path:
    """A folder with a good run and hostile ones."""
    arena.scene.copy("text", folder / "good")
    for number, name in enumerate(names):
        run = arena.scene.copy(kind, folder / f"hostile-{number}")
        if "vocabulary" in name and kind == "music":
            continue
        HOSTILE[name](run, arena.folder / "outside")
    return folder


def _look_everywhere(page: Page) -> None:
    """Every address of every run, and the good one as if nothing were beside it."""
    listed = _asked(page, "/api/runs", None)
    runs = json.loads(listed)["runs"]
    good = [run for run in runs if run["name"] == "good"]
    assert len(good) == 1, f"the good run is not listed; listed are {[run['name'] for run in runs][:5]}"
    for run in runs:
        address = f"/api/runs/{run['id']}"
        for path in ("", "/metrics", "/drawing.svg"):
            _asked(page, address + path, None)
        for path, body in (("predict", MUSIC), ("score", TEXT), ("continue", MUSIC), ("continue", TEXT)):
            _asked(page, f"{address}/{path}", json.dumps(body).encode())
    answer = page.post(f"/api/runs/{good[0]['id']}/score", json.dumps(TEXT).encode())
    assert answer.status == 200, f"the good run answers {answer.status}: {answer.body[:200]!r}"


def _asked(page: Page, path: str, body: bytes | None) -> bytes:
    answer = page.get(path) if body is None else page.post(path, body)
    page.check_well(answer)
    assert answer.status, f"{path}: no answer"
    assert answer.worked < SLOWEST, f"{path} took {answer.worked:.0f} s of the processor"
    assert page.grown() < MEGABYTES, f"the server has grown by {page.grown():,.0f} MB at {path}"
    assert SECRET.encode() not in answer.body, f"{path} shows a file from outside of the runs"
    return answer.body
