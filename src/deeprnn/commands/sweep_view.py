"""What a person sees of a sweep: on a terminal a live table of the best trials, in a pipe a line a trial."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.commands.run_view import clock
from deeprnn.console import console, fitting, program, show_rows, styled, two_columns
from deeprnn.errors import need
from deeprnn.sweeps.space import value_text

if TYPE_CHECKING:
    from deeprnn.sweeps.run import Outcome
    from deeprnn.sweeps.spec import Spec
    from deeprnn.sweeps.study import Study, Trial

SHOWN = 10
BARS = "▁▂▃▄▅▆▇█"
SPARKS = (24, 16, 8)
"""characters of a curve, the fewer the narrower the terminal is"""
NUMBERS = ("trial", "valid", "epochs")
CURVE = "curve"
REFRESH = 0.5


def sparkline(values: Sequence[float], most: int = SPARKS[0]) -> str:
    """A curve in one line; of many values the lowest of each group of neighbours, for scores fall."""
    if not values:
        return ""
    if len(values) > most:
        edges = [round(i * len(values) / most) for i in range(most + 1)]
        values = [min(values[a:b]) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[min(int((v - low) / span * len(BARS)), len(BARS) - 1)] for v in values)


class SweepView:
    """Shows a sweep while it runs."""

    def __init__(self, spec: Spec, folder: Path, shown: bool = True) -> None:
        self.spec, self.folder, self.shown = spec, folder, shown
        self.screen = console()
        self.live: Any = None
        self.began = self.refreshed = time.monotonic()
        self.ended_here = 0

    def __enter__(self) -> SweepView:
        if not self.shown:
            return self
        names = ", ".join(self.spec.space.dimensions)
        self.screen.print(
            styled(
                (str(self.folder), "bold"), f": {self.spec.trials} trials over {names} ({self.spec.sampler})"
            )
        )
        if self.screen.is_terminal:
            self.live = need("rich.live", extra="cli").Live(console=self.screen, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a remark."""
        if self.shown:
            self.screen.print(f"  {text}")

    def ended(self, trial: Trial) -> None:
        """A line where there is no live table; a failure's reason always."""
        self.ended_here += 1
        if self.shown and (self.live is None or trial.state == "failed"):
            score = "" if trial.value is None else f"  valid {trial.value:.4f}"
            why = f"  {trial.reason}" if trial.reason else ""
            self.screen.print(f"  trial {trial.number}: {trial.state}{score}  {point_text(trial)}{why}")

    def changed(self, study: Study, running: int) -> None:
        """Refresh the table."""
        now = time.monotonic()
        if self.live is None or (running and now - self.refreshed < REFRESH):
            return
        self.refreshed, trials = now, study.trials()
        # What is printed in the end takes the place of a table whose trials have all ended.
        self.live.transient = sum(t.state != "running" for t in trials) == self.spec.trials
        self.live.update(self._table(trials, running, now - self.began))

    def _table(self, trials: Sequence[Trial], running: int, seconds: float) -> Any:
        table = need("rich.table", extra="cli").Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        scored = sorted(
            (t for t in trials if t.value is not None and t.state != "failed"), key=lambda t: t.value or 0
        )
        headings, rows = columns(scored[:SHOWN], self.spec)
        for heading in headings:
            table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        pace = f", {3600 * self.ended_here / seconds:,.0f} an hour" if self.ended_here and seconds > 1 else ""
        status = (
            f"{_counts(trials) or 'none ended'}, {running} training, of {self.spec.trials}{pace}, "
            f"{clock(seconds)}"
        )
        return need("rich.console", extra="cli").Group(table, styled((status, "dim")))


def _counts(trials: Sequence[Trial]) -> str:
    """`8 complete, 4 pruned`."""
    counts = {s: sum(t.state == s for t in trials) for s in ("complete", "pruned", "failed")}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def columns(trials: Sequence[Trial], spec: Spec) -> tuple[list[str], list[list[str]]]:
    """Headings and rows that fit the terminal: names and curves become shorter before columns are left out."""
    names = list(spec.space.dimensions)
    last = [name.rpartition(".")[2] for name in names]
    short = last if len({*last}) == len(names) else names
    for fields, most in ((names, SPARKS[0]), *((short, most) for most in SPARKS)):
        headings = [*NUMBERS, CURVE, *fields]
        rows = [_cells(trial, spec, most) for trial in trials]
        spare = ["epochs", CURVE, *reversed(fields)]
        kept = fitting(headings, rows, spare, gap=1)
        if kept == headings:
            break
    places = [headings.index(heading) for heading in kept]
    return kept, [[row[place] for place in places] for row in rows]


def _cells(trial: Trial, spec: Spec, most: int) -> list[str]:
    mark = "" if trial.state == "complete" else " …" if trial.state == "running" else f" {trial.state}"
    values = [value_text(trial.point.get(name)) for name in spec.space.dimensions]
    score = "" if trial.value is None else f"{trial.value:.4f}"
    return [f"{trial.number}{mark}", score, str(len(trial.curve)), sparkline(trial.curve, most), *values]


def point_text(trial: Trial) -> str:
    """A trial's values as they would be typed."""
    return " ".join(f"{name}={value_text(value)}" for name, value in trial.point.items())


def conclude(spec: Spec, folder: Path, outcome: Outcome, shown: bool) -> None:
    """The best trials, the winner's recipe, the page, and what to do next."""
    from deeprnn.sweeps.html import write_page
    from deeprnn.sweeps.winner import write_winner

    page = write_page(spec, folder, outcome)
    winner = write_winner(spec, folder, outcome.trials) if outcome.finished else None
    if shown:
        _show_best(spec, outcome)
        _show_next(folder, outcome, page, winner)


def _show_best(spec: Spec, outcome: Outcome) -> None:
    from deeprnn.sweeps.study import best

    console().print(f"{len(outcome.trials)} trials: {_counts(outcome.trials) or 'none ended'}")
    ranked = best(outcome.trials, SHOWN)
    if ranked:
        show_rows(*columns(ranked, spec), right=NUMBERS)
    for trial in [t for t in outcome.trials if t.state == "failed"][:SHOWN]:
        console().print(f"failed: trial {trial.number}: {trial.reason}", style="dim")


def _show_next(folder: Path, outcome: Outcome, page: Path, winner: Path | None) -> None:
    """What can be done with the sweep now."""
    steps = [(str(page), "parallel coordinates and importances")]
    if not outcome.finished:
        unfinished = [t for t in outcome.trials if t.state == "running"]
        places = ", ".join(sorted({t.place for t in unfinished})) or "another sweep"
        console().print(
            f"still trained elsewhere: {len(unfinished)} of {len(outcome.trials)} trials, in {places}"
        )
        steps += [
            (f"{program()} sweep {shlex.quote(str(folder))}", "the best of all trials, when those have ended")
        ]
    elif winner is not None:
        steps += [
            (f"{program()} train {shlex.quote(str(winner))}", "train the winner again, in a run folder")
        ]
        if outcome.score is not None:
            console().print(score_text(outcome.score))
        else:
            score = f"{program()} sweep {shlex.quote(str(folder))} --score-test"
            steps += [(score, "score the winner on test, once")]
    console().print(two_columns(steps))


def score_text(record: Mapping[str, Any]) -> str:
    """The winner's test score as it was recorded."""
    return (
        f"winner: trial {record['trial']}, valid {record['valid']:.4f}, test {record['test']:.4f} {record['metric']} "
        f"(scored once, {record['scored']})"
    )
