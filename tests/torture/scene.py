"""Small data and trained runs that attacks take copies of."""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.small_runs import tune
from tests.torture import child, disk
from tests.torture.stories import BOOK, DEEP, ENDING, QUIETLY, SMALL


@dataclass(frozen=True)
class Scene:
    """A folder with everything; its runs know their data by `songs` and `book`, which stay where they are."""

    root: Path

    @property
    def songs(self) -> Path:
        """A folder of MIDI files."""
        return self.root / "songs"

    @property
    def book(self) -> Path:
        """A text."""
        return self.root / "book.txt"

    @property
    def runs(self) -> Path:
        """The runs, by the names in `RUNS`."""
        return self.root / "runs"

    def copy(self, name: str, target: Path) -> Path:
        """A run of one's own, to be broken."""
        disk.copy(self.runs / name, target)
        return target


RUNS = ("music", "text", "population", "stages", "interrupted", "chords", "cells")


@cache
def scene(root: Path) -> Scene:
    """The scene in a folder; the first of several attacks that want it makes it, and the others wait."""
    root.mkdir(exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Scene(root)
        if not (root / "made").exists():
            _write_songs(made.songs)
            made.book.write_text(BOOK)
            for name in RUNS:
                _train(made, name)
            (root / "made").touch()
    return made


def _write_songs(folder: Path) -> None:
    from deeprnn.render import midi_bytes

    folder.mkdir(parents=True)
    for number in range(9):
        part = ("train", "train", "train", "valid", "test")[number % 5]
        (folder / part).mkdir(exist_ok=True)
        roll = tune(number, frames=16)
        (folder / part / f"tune-{number}.mid").write_bytes(midi_bytes(roll, steps_per_beat=4))


def _train(made: Scene, name: str) -> None:
    options = {
        "music": (str(made.songs), "--model", "dots", *DEEP),
        "text": (str(made.book), "--model", "rnn", "--level", "char"),
        "population": (str(made.book), "--model", "rnn", "--seeds", "1,2"),
        "stages": (
            str(made.book),
            "--model",
            "rnn",
            "--model.output_hidden",
            "5",
            "--pretrain.run",
            str(made.runs / "text"),
        ),
        "interrupted": (str(made.book), "--model", "rnn", "--stop.epochs", "9"),
        "chords": (
            str(made.songs),
            "--model",
            "dots",
            *DEEP,
            "--output.kind",
            "nade",
            "--model.nade_size",
            "5",
        ),
        "cells": (str(made.book), "--model", "lstm", "--model.embedding", "4", "--track", "tensorboard"),
    }[name]
    small = SMALL if str(made.book) in options else SMALL[2:]
    call = ["train", *small, *ENDING, *options, "--out", str(made.runs), "--name", name, *QUIETLY]

    def work() -> int:
        from deeprnn.cli import main

        steps = iter(range(10_000))

        def die(step: disk.Step) -> None:
            if name == "interrupted" and next(steps) == 150:
                os.kill(os.getpid(), signal.SIGKILL)

        with disk.watched(made.runs, die):
            return main(call)

    ended = child.forked(work, what=child.shown(tuple(call)))
    assert ended.status == (-signal.SIGKILL if name == "interrupted" else 0), f"{ended.what}: {ended.err}"
