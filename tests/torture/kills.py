"""Kills: at random moments, and at every single write and every pair of writes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.torture import child, disk
from tests.torture.attack import Arena, attack
from tests.torture.stories import STORIES, Story, difference, still_clock

DEPTH = 2
"""kills in a row that are tried everywhere"""
LIFE = 60.0
"""seconds after which a life of a toy counts as hung"""


def undisturbed(story: Story, place: Path) -> Any:
    """What a story comes to when nobody interferes; it leaves an empty place behind."""
    place.mkdir(parents=True)
    story.prepare(place)
    ended = child.forked(lambda: story.live(place / "work"), what=story.name, seconds=LIFE)
    child.check_polite(ended, allowed=(0,))
    expected = story.outcome(place / "work")
    assert expected, f"{story.name} leaves nothing to compare"
    disk.remove(place / "work")
    return expected


def check_same(story: Story, expected: Any, work: Path) -> None:
    """The story has come to what it comes to undisturbed."""
    told = difference(expected, story.outcome(work))
    assert not told, f"{story.name} ended otherwise than undisturbed: {told}"


# ---- at random


@attack("kills at random", share=1.5)
def random_kills(arena: Arena) -> None:
    """SIGKILL at random moments, again and again until the work survives to its end."""
    for number, story in enumerate(arena.while_time(cycle(STORIES))):
        place = arena.folder / f"{number}"
        with arena.case(f"{story}, seed {arena.seed}"):
            _kill_often(arena, story, place)
        disk.remove(place)


def _kill_often(arena: Arena, story: Story, place: Path) -> None:
    began = time.monotonic()
    expected = undisturbed(story, place)
    whole = time.monotonic() - began
    work, kills = place / "work", arena.chance.randint(1, 12)
    for _ in range(kills):
        if struck(story, work, arena.chance.uniform(0, 0.7 * whole)):
            arena.add("kills")
    ended = child.forked(lambda: story.live(work), what=f"{story} after {kills} kills", seconds=LIFE)
    child.check_polite(ended, allowed=(0,))
    check_same(story, expected, work)


def struck(story: Story, work: Path, delay: float) -> bool:
    """Let a story live for so long and kill it; whether there was something left to kill."""
    out = child.Pipe()
    number = child.start(lambda: story.live(work), out.entrance, out.entrance)
    alive = not child.wait(number, delay, out)
    child.signal_group(number, signal.SIGKILL)
    os.waitpid(number, 0)
    out.text()
    return alive


# ---- everywhere


class State(NamedTuple):
    """A folder as kills left it."""

    folder: Path
    kills: tuple[str, ...]
    """before which steps they struck"""


def _register(story: Story) -> None:
    @attack(f"kills at every write of {story}", share=3)
    def kills_everywhere(arena: Arena) -> None:
        """A kill before every single change of the disk, in mid-write too, then a second before every later change."""
        expected = undisturbed(story, arena.folder / "place")
        Explorer(arena, story, arena.folder / "place", expected).explore()


for _story in STORIES:
    _register(_story)


class Explorer:
    """Goes through the folders that kills can leave, the nearer first.

    A process that is killed leaves its files as they are. So a life during which the folder is copied before
    every change shows at once what a kill at each moment leaves; every such copy is taken up by a new life,
    which has to come to the undisturbed end, and whose own copies are what two kills leave. Copies that are
    equal, file by file, are taken up once: with a clock that stands still, most of them are.
    """

    def __init__(self, arena: Arena, story: Story, place: Path, expected: Any) -> None:
        self.arena, self.story, self.place, self.expected = arena, story, place, expected
        self.seen: set[str] = set()
        self.waiting: list[State] = []
        self.copies = place / "copies"
        self.copies.mkdir()

    def explore(self) -> None:
        """From the empty folder on, until nothing new is left or the time is over."""
        begin = self.place / "begin"
        begin.mkdir()
        self._live(State(begin, ()))
        for name in ("kill points", "pairs of kill points"):
            states, self.waiting = self.waiting, []
            for state in self.arena.each(states):
                self.arena.add(name)
                with self.arena.case(f"killed at {', then at '.join(state.kills)}"):
                    self._live(state)
                disk.remove(state.folder)

    def _live(self, state: State) -> None:
        """One life from a state to its end, which has to be the expected one; its own states wait their turn."""
        work, log = self.place / "work", self.place / "log"
        disk.copy(state.folder, work)
        disk.remove(log)
        log.mkdir()
        further = len(state.kills) < DEPTH
        copying = Copying(work, log, self.seen, first=not state.kills) if further else None
        ended = child.forked(lambda: self._work(work, copying), what=f"{self.story}, taken up", seconds=LIFE)
        child.check_polite(ended, allowed=(0,))
        check_same(self.story, self.expected, work)
        for copy in sorted(log.iterdir()) if further else ():
            mark, _, step = (copy / "step").read_text().partition(" ")
            self.seen |= {mark, disk.digest(copy / "files", temporaries=False)}
            kept = self.copies / f"{len(self.seen)}"
            (copy / "files").rename(kept)
            self.waiting.append(State(kept, (*state.kills, step)))

    def _work(self, work: Path, copying: Copying | None) -> int:
        with still_clock(), mock.patch("os.fsync"), copying.watched() if copying else nullcontext():
            return self.story.live(work)


class Copying:
    """Copies a folder before every change that this process makes to it, where it looks as it never did before."""

    def __init__(self, work: Path, log: Path, seen: set[str], first: bool) -> None:
        self.work, self.log, self.seen, self.first = work, log, seen, first
        self.number = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the work goes on."""
        with disk.watched(self.work, self.look):
            yield

    def look(self, step: disk.Step) -> None:
        """Keep the folder as it stands."""
        self.number += 1
        # How far a temporary file was written is looked at for the first kill only: there are enough second ones.
        mark = disk.digest(self.work, temporaries=self.first)
        if mark in self.seen:
            return
        # This process's copy of the set: it is a fork.
        self.seen |= {mark, disk.digest(self.work, temporaries=False)}
        copy = self.log / f"{self.number:06}"
        disk.copy(self.work, copy / "files")
        (copy / "step").write_text(f"{mark} {self.number} ({step.kind} {step.path})")
