"""The 23 cells of Tables 2 and 3 beside what the ledger holds, and whether depth helped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deeprnn.model import paper
from deeprnn.model.init import CHAR, MUSIC, WORD
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.specs import Dropout
from deeprnn.reproduction import statistics
from deeprnn.reproduction.entries import Entry, groups, without_idle
from deeprnn.training.recipe import Recipe

ENOUGH = 3
"""seeds from which a recipe's mean counts as measured"""
DEEP = ("dts", "dots", "srnn")
LEVEL = 0.05
"""significance of the paired test"""
CHUNKS = {"nottingham": 200, "musedata": 200, "jsb": 50}
BETAS = {"nottingham": 2330.0, "musedata": 1475.0, "jsb": 100.0}
INITS = {"ptb-char": CHAR, "ptb-word": WORD}


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
        named = deviations(self.entries[0].recipe)
        cut = sum(1 for e in self.entries if e.cut_off)
        return (*named, f"{cut} of {len(self.entries)} cut off by time") if cut else named

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


def deviations(recipe: Recipe) -> tuple[str, ...]:
    """Departures from the paper's text that a reader of the table must know."""
    data, part = recipe.data.name, recipe.optimiser
    music = data in CHUNKS
    star = recipe.model.kind == "dots-star"
    rate = "rates " + ", ".join(f"{r:g}" for r in recipe.rates) if recipe.rates else f"rate {part.rate:g}"
    checks = {
        f"{recipe.data.lanes} lanes": recipe.data.lanes != 1,
        f"chunks of {recipe.data.chunk}": music and recipe.data.chunk != CHUNKS[data],
        _optimiser(recipe): not star and part.name != "sgd",
        rate: music and not star and (part.rate != 1.0 or bool(recipe.rates)),
        f"clipping at {part.clip:g}" if part.clip else "no clipping": music and not star and part.clip != 1.0,
        _schedule(recipe): not star and recipe.schedule.name != ("paper" if music else "halving"),
        f"beta {recipe.schedule.beta:g}": music and recipe.schedule.name == "paper"
        and recipe.schedule.beta != BETAS[data] and not star,
        _noise(recipe): not star and recipe.regulariser.weight_noise != (0.0 if data == "ptb-char" else 0.075),
        _dropout(recipe): not star and any(vars(recipe.regulariser.dropout).values()),
        "other initialisation": not star and _init(recipe) != _init(replace(recipe, init=INITS.get(data, MUSIC))),
        "no pretraining": recipe.model.kind in ("dots", "srnn") and not (recipe.pretrain.recipe or recipe.pretrain.run),
        "averaged weights": part.average != "none",
        "bf16": part.precision != "fp32",
        f"scored in {recipe.evaluation.streams} streams": recipe.evaluation.streams != 1,
    }  # fmt: skip
    return tuple(text for text, present in checks.items() if present)


def _init(recipe: Recipe) -> Any:
    return without_idle(recipe)["init"]


def _optimiser(recipe: Recipe) -> str:
    part = recipe.optimiser
    if part.name == "momentum":
        return f"momentum {part.momentum:g}"
    return f"adamw with weight decay {part.weight_decay:g}" if part.name == "adamw" else part.name


def _schedule(recipe: Recipe) -> str:
    """A cosine's length decides as much as its shape: cells of one row may differ in it."""
    name = recipe.schedule.name
    return f"{name} schedule" + (f" of {recipe.stop.epochs} epochs" if name == "cosine" else "")


def _noise(recipe: Recipe) -> str:
    std = recipe.regulariser.weight_noise
    return f"weight noise {std:g}" if std else "no weight noise"


def _dropout(recipe: Recipe) -> str:
    rates = [f"{name} {p:g}" for name, p in vars(recipe.regulariser.dropout).items() if p]
    return "dropout " + ", ".join(rates) if rates else ""


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

    @property
    def deep_wins(self) -> bool:
        """Below the shallow model, beyond chance."""
        test = self.test
        return test is not None and test.p is not None and test.difference < 0 and test.p < LEVEL

    @property
    def text(self) -> str:
        """The verdict in a line."""
        if self.model is None or self.test is None:
            return "not measured"
        return (
            ("yes: " if self.deep_wins else "no: ")
            + self._detail()
            + (f"; {self.star._detail()}" if self.star else "")
        )

    def _detail(self) -> str:
        test = self.test
        assert self.model is not None
        assert test is not None
        places = 1 if self.data == "ptb-word" else 3
        chance = "one seed, no test" if test.p is None else f"p = {test.p:.2g}"
        gap = f"{test.difference:+.{places}f}".replace("-", "−")
        return f"{paper.LABELS[self.model]} {gap}, better at {test.better} of {test.seeds} seeds, {chance}{self.unlike}"


def verdicts(table: Sequence[Row]) -> list[Verdict]:
    """One verdict per data set, in the paper's order."""
    by = {(r.cell.data, r.cell.model): r for r in table}
    verdicts = []
    for data in dict.fromkeys(r.cell.data for r in table):
        verdict = _verdict(data, by[data, "rnn"], [by[data, model] for model in DEEP])
        star = by.get((data, "dots-star"))
        if star is not None and not any(e.cut_off for e in star.entries):
            star_verdict = _verdict(data, by[data, "rnn"], [star])
            verdict = replace(verdict, star=replace(star_verdict, unlike="") if star_verdict.test else None)
        verdicts.append(verdict)
    return verdicts


def _verdict(data: str, shallow: Row, deep: Sequence[Row]) -> Verdict:
    below = {e.seed: e for e in shallow.entries}
    pairs = {r.cell.model: [(e, below[e.seed]) for e in r.entries if e.seed in below] for r in deep}
    pairs = {model: both for model, both in pairs.items() if both}
    if not pairs:
        return Verdict(data)
    best = min(pairs, key=lambda m: statistics.mean([e.value("valid") for e, _ in pairs[m]]))
    ours, theirs = zip(*((a.value(), b.value()) for a, b in pairs[best]), strict=True)
    deeper, other = (e.recipe for e in pairs[best][0])
    ways = [(way(deeper), way(other)) for way in (_schedule, _optimiser, _noise, _dropout)]
    unlike = "".join(f"; {a or 'no dropout'} against {b or 'no dropout'}" for a, b in ways if a != b)
    return Verdict(data, best, statistics.paired(ours, theirs), unlike)
