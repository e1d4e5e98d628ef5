"""What is killed: work that goes on where it stood, and ends the same whatever befell it.

A story lives in a folder. `live` does the work, or what is left of it, in this process; a person would type the
same command, or `deeprnn resume`. `outcome` is everything that must not depend on what happened on the way.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from deeprnn.cli import main
from deeprnn.training.recipe import to_toml
from tests.reproduction.toys import TINY, made_up_songs, write_study
from tests.training.toys import recipe

BOOK = "in the beginning was the word \nand the word was short \n" * 12
ASIDE = (
    *("seconds", "frames_per_second", "created", "updated", "finished", "environment"),
    *("commit", "dirty", "command", "name", "scored", "began"),
)
"""what a clock, a machine, a checkout or a folder's name decides"""
SMALL = ("--level", "char", "--model.hidden", "6", "--data.lanes", "4", "--data.chunk", "30")
ENDING = (
    *("--stop.epochs", "2", "--save.updates", "4", "--schedule.patience", "1"),
    *("--regulariser.weight_noise", "0.05"),
)
QUIETLY = ("--threads", "1", "--device", "cpu", "--quiet")


@dataclass(frozen=True)
class Story:
    """A piece of work that survives being killed."""

    name: str
    prepare: Callable[[Path], Any]
    """put what the work needs beside its folder"""
    live: Callable[[Path], int]
    """work until the end; the exit status"""
    outcome: Callable[[Path], Any]

    def __str__(self) -> str:
        return self.name


# ---- training, as the command line does it


def _write_book(folder: Path) -> None:
    (folder / "book.txt").write_text(BOOK)
    (folder / "first.toml").write_text(
        to_toml(recipe(stop__epochs=2, data__name="book.txt", save__updates=5))
    )


def training(name: str, *options: str) -> Story:
    """`deeprnn train`, and `deeprnn resume` where that has begun."""

    def live(folder: Path) -> int:
        run, ledger = folder / "runs" / "toy", ("--ledger", str(folder / "ledger"))
        if (run / "recipe.toml").exists():
            return main(["resume", str(run), *ledger, *QUIETLY])
        book = str(folder.parent / "book.txt")
        place = ("--out", str(folder / "runs"), "--name", "toy")
        return main(["train", book, *SMALL, *ENDING, *options, *place, *ledger, *QUIETLY])

    return Story(name, _write_book, live, _trained)


def _trained(folder: Path) -> Any:
    return {"run": outcome(folder / "runs" / "toy"), "ledger": _entries(folder / "ledger")}


def _entries(ledger: Path) -> dict[str, Any]:
    paths = [path for path in ledger.rglob("[!.]*.json") if path.is_file()]
    return {str(path.relative_to(ledger)): timeless(json.loads(path.read_bytes())) for path in paths}


def pretraining(folder: Path) -> int:
    """Two stages; the first one's recipe lies beside the story's folder."""
    return training("", *DEEP, "--pretrain.recipe", str(folder.parent / "first.toml")).live(folder)


DEEP = (
    "--model.kind=dots",
    "--model.intermediate=5",
    "--model.output_hidden=4",
    "--model.shortcut=last",
    "--model.input_to=all",
)


# ---- the paper's experiments, on made-up songs


def _reproduce(folder: Path) -> int:
    from deeprnn.reproduction.run import reproduce
    from deeprnn.reproduction.runner import Settings

    settings = Settings(
        only=("jsb/dts", "jsb/dots"),
        seeds=1,
        overrides=(*TINY, "stop.epochs=2", "save.seconds=0"),
        root=folder / "runs",
        ledger=folder / "ledger",
    )
    with made_up_songs():
        return reproduce(settings).status


def _reproduced(folder: Path) -> Any:
    runs = {path.name: outcome(path) for path in sorted((folder / "runs").iterdir())}
    return {"runs": runs, "ledger": _entries(folder / "ledger")}


# ---- a search, and a study


def _write_search(folder: Path) -> None:
    _write_book(folder)
    (folder / "search.toml").write_text(
        f"""
recipe = "first.toml"
trials = 4
sampler = "random"
[space]
"optimiser.rate" = "log:0.1..2"
[override]
"data.name" = "{folder / "book.txt"}"
"stop.epochs" = 2
"save.seconds" = 0
"""
    )


def _search(folder: Path) -> int:
    file, place = str(folder.parent / "search.toml"), ("--out", str(folder / "search"), "--device", "cpu")
    return main(["sweep", file, *place, "--jobs", "1", "--pack", "2", "--quiet"]) or main(
        ["sweep", file, *place, "--score-test"]
    )


def _searched(folder: Path) -> Any:
    from deeprnn.sweeps.spec import load_spec
    from deeprnn.sweeps.study import Study

    place = folder / "search"
    trials = Study(load_spec(place / "sweep.toml"), place).trials()
    return {
        "trials": [[t.number, t.state, t.value, t.curve] for t in trials],
        "kept": outcome(place / "trials"),
        "winner": (place / "winner.toml").read_bytes(),
        "scored": timeless(json.loads((place / "winner.json").read_bytes())),
    }


def _study(folder: Path) -> int:
    place = ("--runs", str(folder / "runs"), "--ledger", str(folder / "ledger"), "--device", "cpu")
    return main(["reproduce", "--study", str(folder.parent / "toy.toml"), *place])


STORIES = (
    training("a run", "--model", "rnn"),
    training("a population", "--model", "rnn", "--seeds", "1,2"),
    Story("a pretraining run", _write_book, pretraining, _trained),
    Story("reproduce", lambda folder: None, _reproduce, _reproduced),
    training("a grid of rates", "--model", "rnn", "--rates", "0.5,0.1"),
    training("a tracked run", "--model", "rnn", "--track", "tensorboard"),
    Story("a search", _write_search, _search, _searched),
    Story("a study", write_study, _study, lambda folder: _entries(folder / "ledger")),
)


# ---- what is left


def outcome(folder: Path) -> dict[str, Any]:
    """Everything of a finished run, a population or two stages that must not depend on what befell it."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name in ("last.safetensors", "best.safetensors"):
            found[name] = path.read_bytes()
        elif path.name in ("run.json", "ledger.json"):
            found[name] = timeless(json.loads(path.read_bytes()))
        elif path.name == "metrics.jsonl":
            found[name] = [timeless(json.loads(line)) for line in path.read_bytes().splitlines()]
        elif path.name in ("recipe.toml", "grid.json", "vocabulary.json", "population.json"):
            found[name] = path.read_bytes()
    return found


def timeless(value: Any) -> Any:
    """JSON without what depends on when, where and under which name it was written."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in ASIDE}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def difference(expected: Any, found: Any, place: str = "") -> str:
    """The first place where two outcomes differ, in words; empty where they do not."""
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            more, less = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
            return f"{place} has {more}, lacks {less}".strip()
        pairs = [(key, expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(number, *both) for number, both in enumerate(zip(expected, found, strict=True))]
    elif expected != found:
        return f"{place} is {str(found)[:60]}, not {str(expected)[:60]}".strip()
    told = (difference(a, b, f"{place}/{key}".lstrip("/")) for key, a, b in pairs)
    return next((text for text in told if text), "")


@contextmanager
def still_clock() -> Iterator[None]:
    """A clock that stands still, one process number and no commit: equal states are then equal files."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(2026, 1, 1, tzinfo=tz)

    with (
        mock.patch.object(time, "perf_counter", _always(1000.0)),
        mock.patch("deeprnn.runs.run_files.datetime", Clock),
        mock.patch("subprocess.run", side_effect=OSError("no git here")),
        mock.patch("os.getpid", _always(12345)),
    ):
        yield


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_: value
