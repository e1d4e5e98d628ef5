"""Damage: every file of every kind of run, harmed in seven ways, and every command tried on it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

from tests.torture import child, disk
from tests.torture.attack import Arena, attack
from tests.torture.scene import RUNS, Scene

SECONDS = 20.0


def truncate(path: Path, chance: random.Random) -> None:
    """Its first part alone, cut anywhere."""
    os.truncate(path, chance.randrange(max(1, path.stat().st_size)))


def empty(path: Path, chance: random.Random) -> None:
    """No byte left."""
    os.truncate(path, 0)


def flip(path: Path, chance: random.Random) -> None:
    """A few bits turned over."""
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def garble(path: Path, chance: random.Random) -> None:
    """As many bytes of noise."""
    path.write_bytes(chance.randbytes(max(20, path.stat().st_size)))


def delete(path: Path, chance: random.Random) -> None:
    """Gone."""
    path.unlink()


def make_folder(path: Path, chance: random.Random) -> None:
    """A folder of the same name."""
    path.unlink()
    path.mkdir()


def make_special(path: Path, chance: random.Random) -> None:
    """A pipe that nobody writes to, or a link to a file without an end, to itself, or to another file."""
    other = path.with_name(f"{path.name}.elsewhere")
    path.rename(other)
    kind = chance.choice(["pipe", "/dev/zero", path.name, other.name])
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(kind)


HARMS: tuple[Callable[[Path, random.Random], None], ...] = (
    truncate, empty, flip, garble, delete, make_folder, make_special,
)  # fmt: skip

COMMANDS: dict[str, tuple[str, ...]] = {
    "runs": ("runs", "."),
    "describe": ("describe", "RUN"),
    "evaluate": ("evaluate", "RUN", "--device", "cpu", "--threads", "1"),
    "generate": ("generate", "RUN", "--seed", "1", "--length", "6", "--out", "made"),
    "report": ("report", "RUN", "--html", "made/report.html"),
    "resume": ("resume", "RUN", "--device", "cpu", "--threads", "1", "--quiet"),
    "train from it": (
        "train",
        "BOOK",
        "--pretrain.run",
        "RUN",
        "--stop.epochs",
        "1",
        "--quiet",
        "--out",
        "made",
    ),
    "export": ("export", "RUN", "--out", "made/model.onnx"),
    "serve": (),
}


@attack("damaged run folders", share=3)
def damage(arena: Arena) -> None:
    """Every file of a run folder harmed in seven ways, every command on it: one sentence, never other weights."""
    made = arena.scene
    files = [(name, f) for name in RUNS for f in _files(made.runs / name)]
    expected = {name: _ended(made, name, arena.folder / "whole") for name in RUNS}
    for (name, file), harm, command in arena.each(product(files, HARMS, COMMANDS)):
        if (
            command == "export" and arena.chance.random() > 0.1
        ):  # seconds each, and it reads what evaluate reads
            continue
        label = f"{harm.__name__} {name}/{file}, then {command}"
        with arena.case(label):
            run = made.copy(name, arena.folder / "run")
            harm(run / file, random.Random(f"{arena.seed} {label}"))
            ended = try_on(made, run, command, arena.folder)
            child.check_polite(ended)
            assert ended.megabytes < 600, f"{command} took {ended.megabytes:.0f} MB"
            if command == "resume" and ended.status == 0:
                _check_same_weights(run, expected[name])


def try_on(made: Scene, run: Path, command: str, place: Path) -> child.Ended:
    """One command on a run that may be anything."""
    if command == "serve":
        return child.forked(lambda: _browse(run), what="the page", seconds=SECONDS)
    words = [{"RUN": str(run), "BOOK": str(made.book)}.get(word, word) for word in COMMANDS[command]]
    return child.deeprnn(*words, cwd=place, seconds=SECONDS)


def _browse(run: Path) -> None:
    """Every address of the page about a run, without a socket."""
    import warnings

    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

    from deeprnn.web.app import create_app

    app = create_app([run.parent])
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=True)
    listed = client.get("/api/runs")
    assert listed.status_code == 200, f"the list of runs answers {listed.status_code}"
    for entry in listed.json()["runs"]:
        address = f"/api/runs/{entry['id']}"
        for path in ("", "/metrics", "/drawing.svg"):
            answer = client.get(address + path)
            assert answer.status_code < 500, f"{path} answers {answer.status_code}"
        for path, body in (
            ("/predict", {"frames": [[3]]}),
            ("/score", {"text": "the"}),
            ("/continue", {"length": 3}),
        ):
            answer = client.post(address + path, json=body)
            assert answer.status_code < 500, f"{path} answers {answer.status_code}"


def _files(run: Path) -> list[str]:
    return sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())


def _ended(made: Scene, name: str, place: Path) -> dict[str, bytes]:
    """The weights that a run has when it is resumed undamaged."""
    run = made.copy(name, place / name)
    child.check_polite(try_on(made, run, "resume", place), allowed=(0,))
    weights = _weights(run)
    disk.remove(place)
    return weights


def _weights(run: Path) -> dict[str, bytes]:
    """What a run has learnt; not what it once began from."""
    paths = [path for path in run.rglob("best.safetensors") if path.parent.name not in ("start", "pretrain")]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in paths}


def _check_same_weights(run: Path, expected: dict[str, bytes]) -> None:
    """A run that went on after damage has the weights it would have had, in every folder that belongs to it."""
    found = _weights(run)
    for name, content in expected.items():
        assert found.get(name) == content, f"resumed without a word to other weights in {name}"
