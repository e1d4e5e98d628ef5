"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.cells.lookup import import_option
from deeprnn.console import console, program, show_rows, styled, two_columns, width
from deeprnn.errors import MissingExtra, need
from deeprnn.model import metrics
from deeprnn.runs.folder import Run, population
from deeprnn.runs.summary import MARK, summary
from deeprnn.training import saving

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

REFRESH = 0.25
"""seconds between two looks at the running sums"""
SHOWN = 6
"""members of a population that are shown one by one"""
WIDE = 80
"""columns of a terminal on which everything is shown"""
EPOCH = {"train": 8, "valid": 8, "rate": 8, "norm": 6, "clipped": 7, "steps/s": 8, "time": 7}
"""an epoch's numbers, and the columns of each"""


class RunView:
    """Watches a trainer: a line an epoch, and on a terminal a live line below."""

    def __init__(self, trainer: Trainer, folder: Path, paper: float | None) -> None:
        self.screen = console()
        self.paper = paper
        self.live: Any = None
        self.looked = 0.0
        self.since = (time.perf_counter(), trainer.index)
        self._header(trainer, folder)

    def _header(self, t: Trainer, folder: Path) -> None:
        count = f"{len(t.members)} models in lockstep, " if len(t.members) > 1 else ""
        paper = f", the paper's {self.paper:g}" if self.paper is not None else ""
        self.screen.print(
            styled(
                (str(folder), "bold"),
                f": {count}{saving.label(t.recipe)} of {t.layout.total:,} parameters on {t.data.name}, "
                f"{t.length:,} updates an epoch, {t.device} ({metrics.HEADLINE[t.data.kind].name}{paper})",
            )
        )
        if t.epoch > 1 or t.index:
            self.screen.print(f"  going on at epoch {t.epoch}, update {t.index + 1}")
        for remark in t.remarks:
            self.screen.print(f"  {remark}", style="dim")
        head = "  ".join(f"{name:>{size}}" for name, size in self._columns().items())
        self.screen.print(f"  epoch  {head}", style="dim")

    def _columns(self) -> dict[str, int]:
        """An epoch's numbers and their places; a narrow terminal does without those that seldom matter."""
        spare = ("norm", "clipped") if width() < WIDE else ()
        return {name: size for name, size in EPOCH.items() if name not in spare}

    def __enter__(self) -> RunView:
        if self.screen.is_terminal:
            self.live = need("rich.live", extra="cli").Live(
                console=self.screen, transient=True, refresh_per_second=8
            )
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    # ---- watching

    def updated(self, trainer: Trainer) -> None:
        """Refresh the live line, not too often: on a GPU a look waits for the device."""
        now = time.perf_counter()
        if self.live is None or now - self.looked < REFRESH:
            return
        self.looked = now
        self.live.update(self._line(trainer, now), refresh=True)

    def scored(self, trainer: Trainer, split: str, done: int, total: int) -> None:
        """Show how far the scoring of a split has come."""
        now = time.perf_counter()
        if self.live is None or now - self.looked < REFRESH:
            return
        self.looked = now
        self.live.update(styled(f"  scoring {split} ", *_bar(done, total), f" {done}/{total}"), refresh=True)

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """One line for the epoch."""
        self.since = (time.perf_counter(), 0)
        live = [row for row in rows if row is not None]
        if not live:
            return
        first = live[0]
        mark = " *" if any(row["best"] for row in live) else ""
        done = [m.finished for m in trainer.schedule.members if m.finished]
        cells = {
            "train": _join(live, "train"),
            "valid": _join(live, "valid"),
            "rate": _join(live, "rate", ".3g"),
            "norm": _join(live, "grad_norm", ".2f"),
            "clipped": _join(live, "clipped", ".0%"),
            "steps/s": f"{sum(r['frames_per_second'] for r in live):,.0f}",
            "time": clock(first["seconds"]),
        }
        line = "  ".join(f"{cells[name]:>{size}}" for name, size in self._columns().items())
        self.screen.print(styled(f"  {first['epoch']:>5}  {line}", (mark, "green")))
        if trainer.schedule.done:
            splits = ", ".join(trainer.scored_splits)
            self.screen.print(
                f"  finished: {'; '.join(dict.fromkeys(done))}; scoring the best epoch on {splits}"
            )

    def _line(self, t: Trainer, now: float) -> Any:
        sums = t.updater.sums
        nats, count, updates = (float(sums[k].sum()) for k in ("nats", "count", "updates"))
        updates, took = max(1.0, updates), now - self.since[0]
        pace = (t.index - self.since[1]) / max(took, 1e-9)
        left = (t.length - t.index) / max(pace, 1e-9)
        best = [m.best for m in t.schedule.members if m.best is not None]
        rest = f"{clock(left)} left{self._total_left(t, pace)}  {count / max(t.epoch_seconds, 1e-9):,.0f}/s"
        parts = [
            f"train {score(metrics.headline(t.data.kind, nats, int(count)))}" if count else "",
            f"best valid {metrics.headline(t.data.kind, min(best) * 10**6, 10**6):.3f}" if best else "",
            f"rate {float(t.schedule.rates(t.updater.tau).max()):.3g}",
            f"norm {float(sums['norm'].sum()) / updates:.2f}",
            f"clipped {float(sums['clipped'].sum()) / updates:.0%}",
            f"paper {self.paper:g}" if self.paper is not None else "",
        ]
        return styled(
            f"  epoch {t.epoch} ",
            *_bar(t.index, t.length),
            f" {t.index}/{t.length}  {rest}\n  ",
            "  ".join(part for part in parts if part),
        )

    def _total_left(self, t: Trainer, pace: float) -> str:
        stop, left = t.recipe.stop, math.inf
        if stop.epochs and pace > 0:
            left = ((stop.epochs - t.epoch) * t.length + t.length - t.index) / pace
        if stop.minutes:
            left = min(left, 60 * stop.minutes - t.seconds)
        return "" if math.isinf(left) else f" (all: {clock(left)})"


def _join(rows: Sequence[Mapping[str, Any]], key: str, form: str = "") -> str:
    """A number of every member, or their range; nats and bits where no form is given."""

    def text(value: float) -> str:
        return f"{value:{form}}" if form else score(value)

    values = [row[key] for row in rows]
    if len(values) > SHOWN:
        return f"{text(min(values))}..{text(max(values))}"
    texts = [text(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def clock(seconds: float) -> str:
    """3:07 or 1:02:45."""
    minutes, s = divmod(int(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _bar(done: int, total: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """A progress bar as styled parts, shorter on a narrow terminal."""
    length = 24 if width() >= WIDE else 10
    filled = int(length * done / max(1, total))
    return ("━" * filled, "cyan"), ("━" * (length - filled), "dim")


class ScoringBar:
    """A bar on a terminal's stderr while a split is scored; nothing elsewhere."""

    def __init__(self, title: str) -> None:
        self.screen, self.title = console(stderr=True), title
        self.bar: Any = None

    def __enter__(self) -> ScoringBar:
        if self.screen.is_terminal:
            self.bar = need("rich.progress", extra="cli").Progress(console=self.screen, transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title)
        return self

    def __call__(self, done: int, total: int) -> None:
        """So many batches of all are done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


# ---- afterwards


def members(folder: Path) -> list[Run]:
    """The run of a folder, or the members of a population."""
    return population(folder) if (folder / "population.json").exists() else [Run(folder)]


COLUMNS = ("run", "model", "data", "status", "epoch", "valid", "test", "paper", "metric")
"""what fits eighty characters"""


def show_results(runs: Sequence[Run], columns: Sequence[str] = COLUMNS) -> None:
    """Print runs with their results."""
    rows, notes = [], list[str]()
    for run in runs:
        row = summary(run)
        notes.append("; ".join(row["marks"]))
        name = f"{run.name} {MARK}" if row["marks"] else run.name
        row |= {"run": name, "model": row["label"].removesuffix("-RNN"), "epoch": row["best_epoch"]}
        rows.append([_cell(row[name]) for name in columns])
    unknown = ["paper"] if all(cells[columns.index("paper")] == "-" for cells in rows) else []
    spare = [name for name in (*unknown, "metric", "data", "train", "status") if name in columns]
    show_rows(columns, rows, right=("epoch", "train", "valid", "test", "paper"), spare=spare)
    for told in dict.fromkeys(filter(None, notes)):
        names = ", ".join(run.name for run, note in zip(runs, notes, strict=True) if note == told)
        console().print(f"{MARK} {told}: {names}", style="dim")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return score(value, 3 if value < 100 else 1)
    return "-" if value is None else str(value)


def score(value: float, places: int = 3) -> str:
    """With so many decimal places; that of a model that diverged in a few digits."""
    return f"{value:.{places}f}" if abs(value) < 1e6 else f"{value:.3g}"


def write_curves(folder: Path) -> Path | None:
    """Learning curves of a run, or of all members, as curves.png; None without matplotlib."""
    from deeprnn.files import write_atomically
    from deeprnn.render.curves import comparison_png, curves_png

    runs = members(folder)
    first = runs[0].info
    settings = {"metric": first["metric"], "paper": first.get("paper")}
    title = f"{first['label']} on {first['data']['name']}"
    try:
        if len(runs) == 1:
            png = curves_png(runs[0].metrics(), title=title, **settings)
        else:
            png = comparison_png({r.path.name: r.metrics() for r in runs}, title=title, **settings)
    except MissingExtra:
        return None
    path = folder / "curves.png"
    write_atomically(path, png)
    return path


def conclusion(folder: Path) -> None:
    """The table, the picture and what to try next."""
    screen = console()
    runs = members(folder)
    screen.print()
    show_results(runs, ("run", "model", "epoch", "train", "valid", "test", "paper", "metric"))
    if len(runs) > 1:
        screen.print(_spread(runs))
    picture = write_curves(folder)
    if picture:
        screen.print(f"\nlearning curves: {picture}")
    own = import_option(runs[0].recipe["model"].get("cell", ""))
    me, place = program(), f"{shlex.quote(str(folder))} {own}".rstrip()
    root = folder.parent if str(folder.parent) != "runs" else ""
    part = "" if runs[0].recipe["evaluation"].get("test", True) else " --split valid"
    steps = [
        (f"{me} evaluate {place}{part}", "every metric convention"),
        (f"{me} generate {place}", "let it write"),
        (f"{me} runs {shlex.quote(str(root)) if root else ''}".rstrip(), "all runs so far"),
    ]
    screen.print(f"\nnext:\n{two_columns(steps)}", soft_wrap=True)


def _spread(runs: Sequence[Run]) -> str:
    values = [v for v in (summary(run)["test"] for run in runs) if v is not None]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"test over {len(values)} members: mean {score(mean)}, from {score(min(values))} to {score(max(values))}"
