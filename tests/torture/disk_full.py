"""A full disk, and one that fails: at every write of every command that writes."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture import child, disk
from tests.torture.attack import Arena, attack
from tests.torture.kills import check_same, undisturbed
from tests.torture.scene import Scene
from tests.torture.stories import STORIES

ERRORS = {"disk full": errno.ENOSPC, "quota used up": errno.EDQUOT, "broken disk": errno.EIO}
LIMITS = (0, 1, 100, 1000, 4096, 20_000)
"""bytes that a file may have, by the system's own hand"""


@dataclass(frozen=True)
class Writer:
    """A command that leaves files, in a folder of its own."""

    name: str
    words: tuple[str, ...]
    """SCENE stands for the scene's folder"""

    def command(self, made: Scene) -> tuple[str, ...]:
        """Its words for a scene."""
        return tuple(word.replace("SCENE", str(made.root)) for word in self.words)


WRITERS = (
    Writer(
        "generate music", ("generate", "SCENE/runs/music", "--seed", "1", "--length", "8", "--out", "made")
    ),
    Writer("generate text", ("generate", "SCENE/runs/text", "--seed", "1", "--length", "8", "--out", "made")),
    Writer("report", ("report", "SCENE/runs/text", "--html", "made/report.html")),
    Writer("export", ("export", "SCENE/runs/text", "--out", "made/model.onnx")),
    Writer("describe", ("describe", "dots", "--hidden", "9", "--png", "made/a.png", "--svg", "made/a.svg")),
    Writer("data import", ("data", "import", "SCENE/songs", "--out", "made/songs.npz")),
    Writer("data show", ("data", "show", "SCENE/songs", "--png", "made/roll.png")),
)
PRINTERS = (
    ("--help",),
    ("runs", "SCENE/runs"),
    ("runs", "SCENE/runs", "--json"),
    ("evaluate", "SCENE/runs/text", "--device", "cpu", "--threads", "1"),
    ("generate", "SCENE/runs/text", "--seed", "1", "--length", "8"),
    ("describe", "dots"),
    ("describe", "--table1", "--json"),
    ("data", "show", "SCENE/songs"),
    ("report", "--json", "--ledger", "SCENE"),
)


@attack("disk full", share=2)
def disk_full(arena: Arena) -> None:
    """Every write of every command fails: one sentence, nothing half written under a file's name."""
    made = arena.scene
    whole = {writer: _undisturbed(writer, made, arena.folder / "whole") for writer in WRITERS}
    at_each_step = [
        (writer, step, name) for writer in WRITERS for step in range(whole[writer].steps) for name in ERRORS
    ]
    limited = [(writer, size, "limit") for writer in WRITERS for size in LIMITS]
    for writer, number, how in arena.each([*at_each_step, *limited]):
        if writer.name == "export" and arena.chance.random() > 0.1:  # it takes seconds
            continue
        with arena.case(f"{writer.name}, {how} at {number}"):
            place = arena.folder / "place"
            _lay(place)
            harm = _limit(number) if how == "limit" else _failing(place, number, ERRORS[how])
            ended = _run(writer, made, place, harm)
            child.check_polite(ended)
            _check_whole(place, whole[writer].files, ended)


@attack("disk full while training", share=2)
def disk_full_training(arena: Arena) -> None:
    """The disk fills up at every write of a training run; with room again, it ends as if nothing had been."""
    expected, cases = {}, []
    for story in STORIES:
        place = arena.folder / story.name.replace(" ", "-")
        expected[story] = undisturbed(story, place)
        steps = _count(lambda: story.live(place / "work"), place / "work")  # noqa: B023
        cases += [(story, place / "work", number) for number in range(steps)]
    for story, work, number in arena.each(cases):
        name = arena.chance.choice(list(ERRORS))
        with arena.case(f"{story}, {name} at step {number}"):
            disk.remove(work)
            harm = _failing(work, number, ERRORS[name])
            child.check_polite(child.forked(lambda: _with(harm, lambda: story.live(work)), what=f"{story}"))  # noqa: B023
            again = child.forked(lambda: story.live(work), what=f"{story}, with room again")  # noqa: B023
            child.check_polite(again, allowed=(0,))
            check_same(story, expected[story], work)


@attack("nowhere to print", share=0.3, most=60)
def full_stdout(arena: Arena) -> None:
    """Standard output is a full disk: one sentence."""
    made = arena.scene
    for words in arena.each(PRINTERS):
        with arena.case(" ".join(words)):
            command = [word.replace("SCENE", str(made.root)) for word in words]
            ended = child.deeprnn(*command, cwd=arena.folder, stdout="/dev/full")
            child.check_polite(ended)
            assert ended.status, "exit status 0, though nothing could be printed"


# ---- the harm


Patch = Callable[[], Any]
"""makes a context in which writing fails"""


def _failing(root: Path, number: int, code: int) -> Patch:
    """From one step on, everything that needs room fails."""
    steps = iter(range(1_000_000))

    def fail(step: disk.Step) -> None:
        if next(steps) >= number and step.kind in (*disk.GROWS, "sync"):
            raise OSError(code, os.strerror(code), step.path)

    return lambda: disk.watched(root, fail)


def _limit(size: int) -> Patch:
    """No file may grow beyond so many bytes: real writes fail, those from C as well."""

    def patch() -> Any:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return nullcontext()

    return patch


def _with(patch: Patch, work: Callable[[], int]) -> int:
    with patch():
        return work()


def _count(work: Callable[[], int], root: Path, cwd: Path | None = None) -> int:
    """How many steps some work takes; told by a file, since it is done in a fork."""
    told = root.with_name(f"{root.name}.steps")
    told.write_text("")

    def listen(step: disk.Step) -> None:
        with open(told, "ab", buffering=0) as file:
            file.write(b".")

    counted = child.forked(lambda: _with(lambda: disk.watched(root, listen), work), cwd=cwd)
    child.check_polite(counted, allowed=(0,))
    return told.stat().st_size


# ---- what is left


@dataclass(frozen=True)
class Whole:
    """What a command leaves when nothing fails."""

    steps: int
    files: dict[str, int]


CACHE = ".cache/deeprnn/"
"""no output: what finds no room there is made again, but nothing in it may be cut off or left behind"""
OLD = b"what stood here before\n"


def _lay(place: Path) -> None:
    """An empty folder, but for the outputs of an earlier call."""
    disk.remove(place)
    (place / "made").mkdir(parents=True)
    for name in ("report.html", "model.onnx", "a.png", "songs.npz"):
        (place / "made" / name).write_bytes(OLD)


def _run(writer: Writer, made: Scene, place: Path, harm: Patch) -> child.Ended:
    from deeprnn.cli import main

    command = writer.command(made)
    return child.forked(lambda: _with(harm, lambda: main(command)), what=child.shown(command), cwd=place)


def _undisturbed(writer: Writer, made: Scene, place: Path) -> Whole:
    from deeprnn.cli import main

    _lay(place)
    command = writer.command(made)
    steps = _count(lambda: main(command), place, cwd=place)
    return Whole(steps, _sizes(place))


def _sizes(place: Path) -> dict[str, int]:
    files = [p for p in place.rglob("*") if p.is_file() and p.read_bytes() != OLD]
    return {p.relative_to(place).as_posix(): p.stat().st_size for p in files}


def _check_whole(place: Path, whole: dict[str, int], ended: child.Ended) -> None:
    """Every file is as it was before or as it would have become; nothing else lies about."""
    found = _sizes(place)
    for name, size in found.items():
        # Times and paths inside a file may differ by a few bytes from one call to the next.
        least = 0.95 * whole.get(name, 0)
        assert name in whole, f"{name} is left behind"
        assert size >= least, f"{name} is cut off: {size} of {whole[name]} bytes"
    if ended.status == 0:
        missing = [name for name in whole.keys() - found.keys() if not name.startswith(CACHE)]
        assert not missing, f"exit status 0, but {sorted(missing)} are missing"
