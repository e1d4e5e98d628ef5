"""Reruns that are kept: each in a folder of `results/replications`, with what it took, beside the published ledger.

results/replications/seed-11/runs/*.json     its entries, one for each run
results/replications/seed-11/clean.json      its models on what the training part does not hold (`clean_scores`)
results/replications/seed-11/calls.json      when its jobs ran, call by call

print(markdown(read_replications("results/replications"), read_ledger("results/runs")))
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.model import paper
from deeprnn.reproduction.cells import places_of
from deeprnn.reproduction.clean_scores import FILE, CleanScore, of_entries, read_scores
from deeprnn.reproduction.compare import Compared, compare, summary, values
from deeprnn.reproduction.entries import Entry, read_ledger
from deeprnn.reproduction.layout import markdown_table
from deeprnn.reproduction.statistics import mean, plus_minus

FOLDER = Path("results/replications")
RUNS, CALLS = "runs", "calls.json"


@dataclass(frozen=True)
class Replication:
    """One rerun."""

    name: str
    entries: tuple[Entry, ...]
    clean: tuple[CleanScore, ...]
    calls: tuple[Mapping[str, Any], ...]

    @property
    def seconds(self) -> float:
        """Of all its calls."""
        return sum(float(call["seconds"]) for call in self.calls)


def read_replications(folder: str | Path = FOLDER) -> list[Replication]:
    """Every rerun of a folder, by name; no folder holds none."""
    return [_read(home) for home in sorted(Path(folder).glob("*")) if (home / RUNS).is_dir()]


def _read(home: Path) -> Replication:
    path = home / CALLS
    try:
        calls = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        for call in calls:
            float(call["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no list of calls with their seconds: {error!r:.80}") from None
    return Replication(
        home.name, tuple(read_ledger(home / RUNS)), tuple(read_scores(home / FILE)), tuple(calls)
    )


def clean_of_cells(reruns: Sequence[Replication], published: Sequence[Entry]) -> list[CleanScore]:
    """All clean scores of runs that stand for a cell."""
    cells = [(r, c.rerun) for r in reruns for c in compare(r.entries, published)]
    return [row for r, entries in cells for row in of_entries(r.clean, entries)]


# ---- words


def markdown(reruns: Sequence[Replication], published: Sequence[Entry], titles: Mapping[str, str]) -> str:
    """Every cell of every rerun beside the published runs, and what is missing."""
    if not any(r.entries for r in reruns):
        return "No rerun has been entered yet.\n"
    out = []
    for replication in reruns:
        compared = compare(replication.entries, published)
        out.append(
            f"**{replication.name}**: {state(replication, compared)}\n\n{_table(replication, compared, titles)}"
        )
    return "\n\n".join(out) + "\n"


def sentence(reruns: Sequence[Replication], published: Sequence[Entry]) -> str:
    """All reruns in a few words, for the README."""
    if not any(r.entries for r in reruns):
        return "No rerun has been entered yet.\n"
    return "\n".join(f"{r.name}: {state(r, compare(r.entries, published))}" for r in reruns) + "\n"


def state(replication: Replication, compared: Sequence[Compared]) -> str:
    """How much of a rerun is there, in which time, and what it says."""
    entered = {(c.cell.data, c.cell.model) for c in compared}
    missing = _missing(entered)
    cells = f"all {len(paper.CELLS)} cells" if not missing else f"{len(entered)} of {len(paper.CELLS)} cells"
    reaching = sum(mean(values(c.rerun)) <= 1.01 * c.cell.value for c in compared)
    took = f", {replication.seconds:.0f} s in {_calls(len(replication.calls))}" if replication.calls else ""
    lacking = f"; still to be run: {', '.join(missing)}" if missing else ""
    return (
        f"{cells}{took}; {reaching} of them within 1 % of the paper's number or better; beside the published runs "
        f"{summary(compared)}{lacking}."
    )


def _missing(entered: Collection[tuple[str, str]]) -> list[str]:
    """Cells that are not there; a data set by its name where none of its cells is."""
    out = []
    for data in dict.fromkeys(c.data for c in paper.CELLS):
        lacking = [c.model for c in paper.CELLS if c.data == data and (data, c.model) not in entered]
        none_entered = not any(name == data for name, _ in entered)
        out += [data] if none_entered else [f"{data}/{model}" for model in lacking]
    return out


def _calls(count: int) -> str:
    return "one call" if count == 1 else f"{count} calls"


def _table(replication: Replication, compared: Sequence[Compared], titles: Mapping[str, str]) -> str:
    headings = ("data", "model", "paper", "published", "rerun", "difference", "p (Holm)", "verdict",
                "without near-duplicates")  # fmt: skip
    lines = []
    for c in compared:
        places = places_of(c.cell.data)
        gap = "" if c.difference is None else f"{c.difference:+.{places}f}".replace("-", "−")
        clean = [row.clean for row in of_entries(replication.clean, c.rerun) if row.clean is not None]
        p = "" if c.corrected is None else f"{c.corrected:.2g}"
        lines.append((
            titles[c.cell.data], paper.LABELS[c.cell.model], f"{c.cell.value:g}",
            plus_minus(values(c.published), places),
            plus_minus(values(c.rerun), places), gap, p, c.verdict, plus_minus(clean, places),
        ))  # fmt: skip
    return markdown_table(headings, lines)
