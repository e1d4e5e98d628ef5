"""Inputs by the thousand: made and read in a worker process, each within bounds, with canaries for executed code.

An input follows from the seed, the kind and its number alone, so that a worker that hangs or dies is replaced by
one that goes on with the next number, and the harmful input can be made again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture import child, disk
from tests.torture.attack import Arena

CPU_SECONDS = 5.0
"""of one input"""
HANGS, LOOK = 60.0, 1.0
"""seconds without a word after which a worker is given up even where others keep the processor busy; between looks"""
LEAST = 4.0
"""seconds of inputs, whatever time is left"""
MEGABYTES, TIMES = 96, 10
"""an input may take so much, and so many times its own size"""
INFLATED = 1200
"""megabytes for formats that are compressed: twice the limit of what they may inflate to"""
CANARY = "canary"
"""a file in the worker's folder that harmful inputs would make"""
FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "pty.spawn",
        "subprocess.Popen",
    ),
    *("pickle.find_class", "marshal.load", "ctypes.dlopen", "socket.connect", "os.putenv", "webbrowser.open"),
)
"""what Python announces before it does it, and no file of data has reason to ask for"""


@dataclass(frozen=True)
class Target:
    """Something that reads inputs of one kind."""

    name: str
    make: Callable[[random.Random], bytes]
    read: Callable[[bytes], object]
    """may refuse with a UserError; is called in an empty folder of its own"""
    specimens: dict[str, Callable[[], bytes]]
    """inputs that are always tried, by name"""
    megabytes: int = MEGABYTES


def attack_with(arena: Arena, targets: list[Target], batch: int = 250) -> None:
    """Every specimen of every target, in half of the time at most, then mutated inputs in turns."""
    end = max(arena.deadline, time.monotonic() + LEAST)
    arena.deadline = end - (end - time.monotonic()) / 2
    specimens = [(target, name) for target in targets for name in target.specimens]
    for target, name in arena.each(specimens):
        try_inputs(arena, target, [name])
    everything, arena.deadline, first = arena.finished, end, 0
    while arena.seconds_left > 0:
        for target in arena.while_time(targets):
            try_inputs(arena, target, [str(n) for n in range(first, first + batch)])
        first += batch
    arena.finished = everything  # of mutations there are always more


def try_inputs(arena: Arena, target: Target, names: list[str]) -> None:
    """Some inputs, and what came of each: nothing where it was read or refused."""
    left = names
    while left and arena.seconds_left > 0:
        for name, verdict in _worker(arena, target, left):
            left = left[1:]
            arena.cases += 1
            arena.add(f"{target.name} inputs")
            if verdict:
                content = _input(arena, target, name)
                told = f"{target.name} {name} ({len(content):,} bytes): {verdict}"
                if arena.find(told, f"{target.name} {_kind(verdict)}"):
                    arena.keep(f"{target.name}-{name.replace(' ', '-')}", content[:10_000_000])
                break  # a worker that was harmed is replaced


def _kind(verdict: str) -> str:
    """An exception's type and place are one kind of finding, whatever its words."""
    return f"{verdict.partition(':')[0]} {verdict.rpartition(' at ')[2]}"


def _input(arena: Arena, target: Target, name: str) -> bytes:
    if name in target.specimens:
        return target.specimens[name]()
    return target.make(random.Random(f"{arena.seed} {target.name} {name}"))


def _worker(arena: Arena, target: Target, names: list[str]) -> Iterator[tuple[str, str]]:
    """One process, until it is through, harmed, or out of time."""
    told, errors = child.Pipe(), child.Pipe()
    folder = arena.folder / f"worker-{target.name}"
    disk.remove(folder)
    folder.mkdir(parents=True)
    number = child.start(
        lambda: _work(arena, target, names, told.entrance), os.devnull, errors.entrance, 2048, folder
    )
    lines = _lines(number, told, errors)
    try:
        for name in names:
            line = next(lines, None)
            if line is None:
                yield name, _end_of(number, errors)
                return
            yield name, line
            if line or arena.seconds_left < 0:
                return
    finally:
        child.signal_group(number, signal.SIGKILL)
        child.reap(number)
        told.text()
        errors.text()


def _lines(number: int, told: child.Pipe, errors: child.Pipe) -> Iterator[str]:
    """What a worker says, line by line, until it ends or falls silent."""
    seen, spoke, worked = 0, time.monotonic(), child.processor_seconds(number)
    while True:
        while (end := told.content.find(b"\n", seen)) >= 0:
            yield told.content[seen:end].decode("utf-8", "replace")
            seen, spoke, worked = end + 1, time.monotonic(), child.processor_seconds(number)
        ended = child.wait(number, LOOK, told, errors, once=True)
        told.drain()
        silent = told.content.find(b"\n", seen) < 0
        if silent and ended:
            return
        busy = child.processor_seconds(number) - worked
        if silent and (busy > 2 * CPU_SECONDS or time.monotonic() - spoke > HANGS):
            return


def _end_of(number: int, errors: child.Pipe) -> str:
    status = child.reap(number, wait=False)
    words = errors.content.decode("utf-8", "replace").strip()[-300:]
    if status is None:
        return f"hung: no end after {2 * CPU_SECONDS:.0f} s of processor time, or {HANGS:.0f} s of waiting"
    return f"the process died with status {status}: {words}"


# ---- inside the worker


def _work(arena: Arena, target: Target, names: list[str], told: int) -> None:
    canary = Canary()
    for name in names:
        content = _input(arena, target, name)
        verdict = _verdict(target, content, canary)
        os.write(told, verdict.replace("\n", " ")[:800].encode("utf-8", "replace") + b"\n")


def _verdict(target: Target, content: bytes, canary: Canary) -> str:
    from deeprnn.errors import UserError

    before, began = child.resident(), time.process_time()
    child.forget_peak()
    canary.listen()
    try:
        target.read(content)
        broken = ""
    except UserError as refused:
        broken = "" if str(refused).strip() else "refused without a word"
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        broken = f"{type(error).__name__}: {error} at {_where(error)}"
    finally:
        canary.rest()
    taken, grown = time.process_time() - began, child.peak() - before
    most = target.megabytes + TIMES * len(content) / 2**20
    if canary.heard or os.path.exists(CANARY):
        return f"code of the input ran: {canary.heard}"
    if not broken and taken > CPU_SECONDS:
        return f"took {taken:.1f} s of processor time"
    if not broken and grown > most:
        return f"took {grown:,.0f} MB, more than {most:,.0f}"
    return broken


def _where(error: BaseException) -> str:
    import traceback

    places = traceback.extract_tb(error.__traceback__)
    ours = [p for p in places if f"{os.sep}deeprnn{os.sep}" in p.filename] or places
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"


class Canary:
    """Hears what a file of data has no business to make happen."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.awake = False
        sys.addaudithook(self._hear)

    def listen(self) -> None:
        """From now on."""
        self.awake = True

    def rest(self) -> None:
        """Until the next input."""
        self.awake = False

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        itself = event == "ctypes.dlopen" and arguments == (
            None,
        )  # loads nothing: the compiler's own look-up
        if self.awake and event in FORBIDDEN and not itself:
            self.heard.append(f"{event} {str(arguments)[:80]}")
