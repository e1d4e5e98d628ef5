"""A rerun beside the published ledger, cell by cell: the difference, both spreads, and whether they agree.

    print(comparison_text(compare(read_ledger("runs/fresh/ledger"), read_ledger("results/runs"))))

A cell is compared with the published runs of the very same recipe where there are some, else with those of the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deeprnn.model import paper
from deeprnn.reproduction import statistics
from deeprnn.reproduction.cells import LEVEL, chosen, fills, places_of
from deeprnn.reproduction.entries import Entry, groups
from deeprnn.reproduction.layout import aligned


@dataclass(frozen=True)
class Compared:
    """One cell of the rerun beside its published runs."""

    cell: paper.Cell
    rerun: tuple[Entry, ...]
    published: tuple[Entry, ...]
    p: float | None = None
    """that runs of one kind differ by so much, two-sided; None where the published have too few seeds to say"""
    corrected: float | None = None
    """the same after Holm's correction over all cells compared"""

    @property
    def difference(self) -> float | None:
        """Mean of the rerun less that of the published, None where nothing is published."""
        if not self.published:
            return None
        return statistics.mean(values(self.rerun)) - statistics.mean(values(self.published))

    @property
    def same_recipe(self) -> bool:
        """Whether both were trained by one recipe, first stages included."""
        return bool(self.published) and self.rerun[0].identity == self.published[0].identity

    @property
    def verdict(self) -> str:
        """agrees, differs, or why that cannot be said."""
        if not self.published:
            return "not published"
        if self.corrected is None:
            return "too few seeds"
        words = "agrees" if self.corrected >= LEVEL else "differs"
        marks = sorted({mark for entry in (*self.rerun, *self.published) for mark in entry.marks})
        notes = [*([] if self.same_recipe else ["another recipe"]), *marks]
        return f"{words} ({', '.join(notes)})" if notes else words

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "data": self.cell.data,
            "model": self.cell.model,
            "rerun": values(self.rerun),
            "rerun_seeds": [e.seed for e in self.rerun],
            "published": values(self.published),
            "difference": self.difference,
            "p": self.p,
            "p_holm": self.corrected,
            "same_recipe": self.same_recipe,
            "verdict": self.verdict,
        }


def values(entries: Sequence[Entry]) -> list[float]:
    """Test results, in order of seeds."""
    return [e.value() for e in entries]


def compare(rerun: Sequence[Entry], published: Sequence[Entry]) -> list[Compared]:
    """Every cell that the rerun has runs of, in the paper's order."""
    out = []
    for cell in paper.CELLS:
        new = chosen([e for e in rerun if fills(e, cell)])
        if not new:
            continue
        known = [e for e in published if fills(e, cell)]
        old = tuple(groups(known).get(new[0].identity) or chosen(known))
        out.append(Compared(cell, new, old, chance(values(new), values(old))))
    corrected = statistics.holm([c.p for c in out])
    return [replace(c, corrected=p) for c, p in zip(out, corrected, strict=True)]


def chance(new: Sequence[float], old: Sequence[float]) -> float | None:
    """Welch's test where both have several seeds; a single new one is held against the spread of the old."""
    spread = statistics.deviation(old)
    if spread is None:
        return None
    if len(new) > 1:
        return statistics.welch(new, old).p
    error = spread * math.sqrt(1 + 1 / len(old))
    return statistics.t_test(new[0] - statistics.mean(old), error, len(old) - 1)


def comparison_text(compared: Sequence[Compared]) -> str:
    """The comparison as lines of plain text, and a sentence of what it comes to."""
    if not compared:
        return "nothing to compare: the rerun has no finished cell yet"
    lines = [("cell", "rerun", "published", "difference", "%", "p (Holm)", "verdict")]
    for c in compared:
        places, gap = places_of(c.cell.data), c.difference
        share = None if gap is None else 100 * gap / statistics.mean(values(c.published))
        chance_text = "" if c.corrected is None else f"{c.corrected:.2g}"
        lines.append((
            f"{c.cell.data}/{c.cell.model}", _spread(values(c.rerun), places), _spread(values(c.published), places),
            "" if gap is None else f"{gap:+.{places}f}", "" if share is None else f"{share:+.1f}", chance_text,
            c.verdict,
        ))  # fmt: skip
    rule = f"(p < {LEVEL:g} after Holm's correction over the cells compared)"
    return "\n".join([aligned(lines), f"{len(compared)} cells: {summary(compared)} {rule}."])


def summary(compared: Sequence[Compared]) -> str:
    """How many cells agree."""
    count = {word: sum(c.verdict.startswith(word) for c in compared) for word in ("agrees", "differs")}
    other = len(compared) - sum(count.values())
    return f"{count['agrees']} agree, {count['differs']} differ, {other} cannot be judged"


def _spread(numbers: Sequence[float], places: int) -> str:
    return statistics.plus_minus(numbers, places) + (f" ({len(numbers)})" if numbers else "")
