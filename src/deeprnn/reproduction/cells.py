"""The 23 cells of Tables 2 and 3 beside what the ledger holds, and whether depth helped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.specs import Dropout
from deeprnn.reproduction import statistics
from deeprnn.reproduction.deviations import deviations, epochs_text, marks_of, unlike_text
from deeprnn.reproduction.entries import Entry, groups
from deeprnn.training.recipe import Recipe

ENOUGH = 3
"""seeds from which a recipe's mean counts as measured"""
DEEP = ("dts", "dots", "srnn")
LEVEL = 0.05
"""significance of the paired test, after Holm's correction"""


@dataclass(frozen=True)
class Row:
    """One cell with the runs that fill it."""

    cell: paper.Cell
    entries: tuple[Entry, ...]

    @property
    def values(self) -> list[float]:
        """Test results, in order of seeds."""
        return [e.value() for e in self.entries]

    @property
    def ours(self) -> float | None:
        """Mean over seeds, None where no run is."""
        return statistics.mean(self.values) if self.entries else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds."""
        return statistics.deviation(self.values)

    @property
    def best(self) -> float | None:
        """Test result of the seed that is best on validation."""
        return min(self.entries, key=lambda e: e.value("valid")).value() if self.entries else None

    @property
    def difference(self) -> float | None:
        """Our mean against the paper's, in percent; below zero is better."""
        return None if self.ours is None else 100 * (self.ours / self.cell.value - 1)

    @property
    def deviations(self) -> tuple[str, ...]:
        """Where the runs depart from what the paper says."""
        if not self.entries:
            return ()
        return deviations(self.entries)

    @property
    def epochs(self) -> str:
        """Epochs of every stage over seeds: 93–98 + 56–104; a question mark where nobody knows."""
        return epochs_text(self.entries)

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know of some of the runs: 1 of 3 cut off by time."""
        return marks_of(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `deeprnn report --cells --json`."""
        return {
            "table": self.cell.table,
            "data": self.cell.data,
            "model": self.cell.model,
            "metric": HEADLINE[self.cell.kind].name,
            "paper": self.cell.value,
            "ours": self.ours,
            "sd": self.sd,
            "seeds": len(self.entries),
            "best_validation_seed": self.best,
            "difference_percent": self.difference,
            "deviations": list(self.deviations),
            "marks": list(self.marks),
            "epochs": [[stage["epochs"] for stage in e.stages] for e in self.entries],
            "updates": [[stage["updates"] for stage in e.stages] for e in self.entries],
            "seed_list": [e.seed for e in self.entries],
            "values": self.values,
            "runs": [e.path.name for e in self.entries],
        }


def rows(entries: Iterable[Entry]) -> list[Row]:
    """All 23 cells, in the paper's order; a cell without runs has none."""
    entries = list(entries)
    return [Row(cell, chosen([e for e in entries if fills(e, cell)])) for cell in paper.CELLS]


def fills(entry: Entry, cell: paper.Cell) -> bool:
    """Whether a run is of a cell: its data, its name, and Table 1's sizes (unpublished for DOT(S)*)."""
    if (entry.data, entry.model) != (cell.data, cell.model) or not entry.has_test:
        return False
    if cell.model == "dots-star":
        return True
    spec = model_spec(entry.recipe)
    # Dropout is a way of training, not a size: `deviations` names it.
    return spec is not None and replace(spec, dropout=Dropout()) == paper.spec(cell.data, cell.model)


def places_of(data: str) -> int:
    """Decimals that results on a data set of the paper are printed with."""
    return HEADLINE[paper.KINDS[data]].places


def model_spec(recipe: Recipe) -> Any:
    """The model that a recipe of a benchmark set describes, None for other data."""
    size = paper.INPUTS.get(recipe.data.name)
    if size is None:
        return None
    return recipe.model.spec(size, recipe.data.name.startswith("ptb"), recipe.regulariser.dropout)


def chosen(candidates: Sequence[Entry]) -> tuple[Entry, ...]:
    """The runs of one recipe: of those with enough seeds the best on validation, never on test."""
    recipes = list(groups(candidates).values())
    if not recipes:
        return ()
    enough = min(ENOUGH, max(len(g) for g in recipes))
    return tuple(
        min(
            (g for g in recipes if len(g) >= enough),
            key=lambda g: statistics.mean([e.value("valid") for e in g]),
        )
    )


@dataclass(frozen=True)
class Verdict:
    """Whether the deep model that is best on validation beats the shallow one on test, seed by seed."""

    data: str
    model: str | None = None
    """of the deep models, the one with the lowest mean on validation; None where nothing can be compared"""
    test: statistics.Comparison | None = None
    unlike: str = ""
    """what the two were not trained alike in"""
    star: Verdict | None = None
    """the same for DOT(S)-RNN*, which has dropout in place of weight noise, apart from the others"""
    corrected: float | None = None
    """p after Holm's correction over the rows of the tables"""
    never: tuple[str, ...] = ()
    """deep models that are better at no seed at all"""

    @property
    def deep_wins(self) -> bool:
        """Below the shallow model, beyond chance, all rows considered."""
        return self._beyond_chance and self.test is not None and self.test.difference < 0

    @property
    def shallow_wins(self) -> bool:
        """The other way round, beyond chance."""
        return self._beyond_chance and self.test is not None and self.test.difference > 0

    @property
    def _beyond_chance(self) -> bool:
        return self.corrected is not None and self.corrected < LEVEL

    @property
    def answer(self) -> str:
        """The verdict in a word or two."""
        if self.test is None:
            return "not measured"
        return "shown" if self.deep_wins else "the RNN is better" if self.shallow_wins else "not shown"

    @property
    def everywhere(self) -> str:
        """That the RNN is better than each deep model at every seed, where it is."""
        behind = ", ".join(paper.LABELS[m] for m in self.never)
        return f"the RNN is better than {behind} at every seed" if len(self.never) == len(DEEP) else ""

    @property
    def text(self) -> str:
        """The verdict in a line."""
        if self.test is None:
            return self.answer
        parts = (
            f"{self.answer}: {self._detail()}",
            self.everywhere,
            self.star._detail() if self.star else "",
        )
        return "; ".join(filter(None, parts))

    def _detail(self) -> str:
        parts = (f"{self.name} {self.gap}", f"better at {self.better} seeds", self.chance)
        return "; ".join(filter(None, (", ".join(parts), self.unlike)))

    @property
    def name(self) -> str:
        """The deep model's."""
        return paper.LABELS[self.model] if self.model else ""

    @property
    def gap(self) -> str:
        """The difference on test with its interval; below zero the deep model is better."""
        assert self.test is not None
        places, interval = places_of(self.data), self.test.interval
        gap = f"{self.test.difference:+.{places}f}"
        if interval is not None:
            gap += f" (95 %: {interval.low:+.{places}f} to {interval.high:+.{places}f})"
        return gap.replace("-", "−")

    @property
    def better(self) -> str:
        """At how many seeds the deep model is better: 4 of 5."""
        assert self.test is not None
        return f"{self.test.better} of {self.test.seeds}"

    @property
    def chance(self) -> str:
        """p before and after Holm's correction."""
        assert self.test is not None
        if self.test.p is None:
            return "one seed, no test"
        return f"p = {self.test.p:.2g}" + (
            f", Holm {self.corrected:.2g}" if self.corrected is not None else ""
        )


def verdicts(table: Sequence[Row]) -> list[Verdict]:
    """One verdict per data set, in the paper's order."""
    by = {(r.cell.data, r.cell.model): r for r in table}
    verdicts = []
    for data in dict.fromkeys(r.cell.data for r in table):
        verdict = _verdict(data, by[data, "rnn"], [by[data, model] for model in DEEP])
        star = by.get((data, "dots-star"))
        if star is not None and not any(e.cut_off for e in star.entries):
            star_verdict = _verdict(data, by[data, "rnn"], [star])
            verdict = replace(verdict, star=star_verdict if star_verdict.test else None)
        verdicts.append(verdict)
    return _corrected(verdicts)


def _corrected(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """With Holm's correction over the rows; those of DOT(S)-RNN* are a question of their own."""
    rows = statistics.holm([v.test.p if v.test else None for v in verdicts])
    stars = [v.star for v in verdicts]
    of_stars = statistics.holm([star.test.p if star and star.test else None for star in stars])
    return [
        replace(v, corrected=p, star=None if star is None else replace(star, corrected=q))
        for v, p, star, q in zip(verdicts, rows, stars, of_stars, strict=True)
    ]


def _verdict(data: str, shallow: Row, deep: Sequence[Row]) -> Verdict:
    below = {e.seed: e for e in shallow.entries}
    pairs = {r.cell.model: [(e, below[e.seed]) for e in r.entries if e.seed in below] for r in deep}
    pairs = {model: scored for model, scored in pairs.items() if scored}
    if not pairs:
        return Verdict(data)
    best = min(pairs, key=lambda m: statistics.mean([e.value("valid") for e, _ in pairs[m]]))
    ours, theirs = zip(*((a.value(), b.value()) for a, b in pairs[best]), strict=True)
    never = tuple(m for m, scored in pairs.items() if all(a.value() > b.value() for a, b in scored))
    unlike = unlike_text([e for e, _ in pairs[best]], shallow.entries)
    return Verdict(data, best, statistics.paired(ours, theirs), unlike, never=never)
