"""Results as JSON lines: a row is on disk as soon as it is known, so a run that is cut off has measured something.

A row {"about": ...} says which code, versions and machine the rows after it come from. Files of a folder are read in
the order of their names, and a later row of a shape and peer takes the place of an earlier one, failed or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape

from deeprnn.errors import UserError

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Add a line to a file; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def lines(path: Path) -> Iterator[Row]:
    """The rows of a file; one that was cut off in the middle of its last line has all but that."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if not text.endswith(line):
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error


@dataclass
class Results:
    """Rows of layers by shape and peer, and those of other parts as they came; each with where it comes from."""

    layers: dict[tuple[Shape, str], Row] = field(default_factory=dict)
    parts: list[Row] = field(default_factory=list)

    def microseconds(self, shape: Shape, peer: str, how: str = "python_train") -> float | None:
        """µs a step, None where there is no such row or it failed."""
        us = self.layers.get((shape, peer), {}).get(f"{how}_us")
        return None if us is None else us / shape.steps

    def part(self, name: str) -> list[Row]:
        """The rows of a part that is about more than one layer."""
        return [row for row in self.parts if row["part"] == name]

    def failures(self, shapes: Iterable[Shape]) -> list[tuple[Shape, str, str, str]]:
        """What was refused or went wrong, why, and in which commit."""
        wanted = set(shapes)
        return [
            (shape, peer, row["failed"], row["about"]["commit"])
            for (shape, peer), row in self.layers.items()
            if row.get("failed") and shape in wanted
        ]


def read(place: Path) -> Results:
    """A file, or all of a folder; nothing where there is neither."""
    found = Results()
    for path in sorted(place.glob("*.jsonl")) if place.is_dir() else [place] * place.exists():
        about: Row = {}
        for row in lines(path):
            if "about" in row:
                about = row["about"]
            elif "part" in row:
                found.parts.append({**row, "about": about, "file": path.name})
            elif "peer" in row:
                found.layers[Shape.of(row), row["peer"]] = {**row, "about": about, "file": path.name}
    return found
