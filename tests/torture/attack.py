"""What an attack is, and the arena it takes place in."""

from __future__ import annotations

import random
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.torture.scene import Scene, scene

T = TypeVar("T")


class Finding(NamedTuple):
    """Something that must not be, in the words of its first case."""

    text: str
    count: int


@dataclass
class Arena:
    """One attack's place, time and chance, and what came of it."""

    name: str
    folder: Path
    """empty, and the attack's own"""
    seed: int
    deadline: float
    kept: Path = Path("out/torture")
    """where inputs that did harm are kept"""
    findings: dict[str, Finding] = field(default_factory=dict)
    cases: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
    """numbers worth showing: kill points, percentiles"""
    finished: bool = True
    """whether everything there was to try has been tried"""

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed} {self.name}")
        """the attack's randomness: the seed's and its name's alone"""

    @property
    def scene(self) -> Scene:
        """Small data and trained runs, shared by all attacks: take copies."""
        return scene(self.folder.parent / "scene")

    @property
    def failed(self) -> int:
        """Cases that ended in a finding."""
        return sum(finding.count for finding in self.findings.values())

    @property
    def seconds_left(self) -> float:
        """Until the attack's time is over."""
        return self.deadline - time.monotonic()

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items in random order, while there is time: a short run samples what a long one goes through."""
        order = list(items)
        self.chance.shuffle(order)
        return self.while_time(order)

    def while_time(self, items: Iterable[T]) -> Iterator[T]:
        """The items as they come, while there is time; the first in any case, so that no attack is left out."""
        for number, item in enumerate(items):
            if number and self.seconds_left <= 0:
                self.finished = False
                return
            yield item

    @contextmanager
    def case(self, label: str) -> Iterator[None]:
        """Count one case; a failed assertion or an exception inside it is a finding."""
        self.cases += 1
        try:
            yield
        except AssertionError as broken:
            self.find(f"{label}: {broken}", getattr(broken, "kind", str(broken)))
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.find(
                f"{label}: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )

    def find(self, text: str, kind: str = "") -> bool:
        """Note something that must not be; whether it is the first of its kind, by its words without the numbers."""
        kind = kind or text
        mark = re.sub(r"0x[0-9a-f]+|\d+|'[^']*'", "#", kind)
        known = self.findings.get(mark)
        self.findings[mark] = Finding(known.text, known.count + 1) if known else Finding(text, 1)
        return known is None

    def add(self, figure: str, amount: int = 1) -> None:
        """Count something beside the cases."""
        self.figures[figure] = self.figures.get(figure, 0) + amount

    def keep(self, name: str, content: bytes) -> Path:
        """Keep an input that did harm, to be looked at."""
        place = self.kept / self.name.replace(" ", "-")
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
        return place / name

    def to_dict(self) -> dict[str, Any]:
        """What came of it, as plain data."""
        findings = [finding._asdict() for finding in self.findings.values()]
        names = ("name", "cases", "finished", "figures")
        return {**{name: getattr(self, name) for name in names}, "findings": findings}


@dataclass(frozen=True)
class Attack:
    """A function that tries cases, and how much of the time it may have."""

    name: str
    run: Callable[[Arena], None]
    share: float
    most: float
    """seconds that are always enough"""
    alone: bool
    """whether it measures, and nothing else may go on"""


REGISTRY: dict[str, Attack] = {}


def attack(
    name: str, *, share: float = 1.0, most: float = float("inf"), alone: bool = False
) -> Callable[[Callable[[Arena], None]], Callable[[Arena], None]]:
    """Register a function as an attack; its docstring's first line is its description."""

    def register(run: Callable[[Arena], None]) -> Callable[[Arena], None]:
        assert name not in REGISTRY, f"two attacks are named {name!r}"
        REGISTRY[name] = Attack(name, run, share, most, alone)
        return run

    return register
