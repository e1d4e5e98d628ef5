"""One run in a few numbers: for the terminal, the report and the page.

Every value has a known type and a bounded length, whoever wrote the run's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deeprnn.model.metrics import HEADLINE
from deeprnn.runs.folder import Run
from deeprnn.runs.reading import finite, number, table, text

SPARK = 48
"""points of the small curve in a list"""


@dataclass(frozen=True)
class Curve:
    """What a list needs of a learning curve."""

    epochs: int
    best: Mapping[str, Any]
    """the epoch of the lowest validation score; empty where there is none"""
    spark: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Curve:
        """From the rows of metrics.jsonl."""
        scored = [row for row in rows if finite(row.get("valid"))]
        last: Any = rows[-1].get("epoch") if rows else 0
        return cls(
            int(last) if finite(last) else len(rows),
            min(scored, key=lambda row: row["valid"], default={}),
            tuple(thin([float(row["valid"]) for row in scored], SPARK)),
        )


MARK = "†"
"""beside a number of a run that `marks` says something of"""


def is_cut_off(stopped: Any) -> bool:
    """Whether time, rather than the recipe's other rules, ended a run, by the words it ended with."""
    return "minutes" in str(stopped)


def marks(cut_off: bool, uncommitted: bool) -> tuple[str, ...]:
    """What a reader must know wherever a run is shown."""
    words = {"cut off by time": cut_off, "code with changes in no commit": uncommitted}
    return tuple(text for text, present in words.items() if present)


def summarise(info: Mapping[str, Any], curve: Curve) -> dict[str, Any]:
    """A run by its run.json and learning curve: the results, or the best so far where it is not finished."""
    data = table(info.get("data"))
    kind = text(data.get("kind"))
    result = table(info.get("result"))
    so_far = {} if result else curve.best
    return {
        "status": text(info.get("status")) or "unknown",
        "kind": kind if kind in HEADLINE else "",
        "data": text(data.get("name")),
        "label": text(info.get("label")),
        "parameters": number(info.get("parameters")),
        "seed": number(info.get("seed")),
        "metric": text(info.get("metric")),
        "paper": number(info.get("paper")),
        "created": text(info.get("created")) or None,
        "updated": text(info.get("updated")) or None,
        "train": _headline(result.get("train", so_far.get("train")), kind),
        "valid": _headline(result.get("valid", so_far.get("valid")), kind),
        "test": _headline(result.get("test"), kind),
        "best_epoch": number(result.get("best_epoch", so_far.get("epoch"))),
        "epochs": curve.epochs,
        "marks": list(marks(is_cut_off(text(info.get("reason"))), text(info.get("commit")).endswith("+"))),
    }


def summary(run: Run) -> dict[str, Any]:
    """A run in one flat table, with its name and whether somebody trains it now."""
    return {
        "path": str(run.path),
        "name": run.name,
        **summarise(run.info, Curve.of(run.metrics())),
        "status": run.status,
    }


def _headline(value: Any, kind: str) -> float | None:
    """The number that stands in tables, whether alone or among other conventions."""
    if isinstance(value, dict):
        value = value.get(HEADLINE[kind].key) if kind in HEADLINE else None
    return float(value) if finite(value) else None


def thin(values: Sequence[float], most: int) -> list[float]:
    """At most `most` of the values, evenly chosen, ends kept, four digits each."""
    if len(values) > most:
        step = (len(values) - 1) / (most - 1)
        values = [values[round(i * step)] for i in range(most)]
    return [float(f"{value:.4g}") for value in values]
