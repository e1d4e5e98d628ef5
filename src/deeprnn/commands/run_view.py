"""What a person sees of a run while it trains: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.console import console, styled, width
from deeprnn.errors import need
from deeprnn.model import metrics
from deeprnn.training import run_folders

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

REFRESH = 0.25
"""seconds between two refreshes, each of which reads the running sums"""
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
        self.refreshed = 0.0
        self.pace_start = (time.perf_counter(), trainer.index)
        self._header(trainer, folder)

    def _header(self, t: Trainer, folder: Path) -> None:
        count = f"{len(t.members)} models in lockstep, " if len(t.members) > 1 else ""
        paper = f", the paper's {self.paper:g}" if self.paper is not None else ""
        self.screen.print(
            styled(
                (str(folder), "bold"),
                f": {count}{run_folders.label(t.recipe)} of {t.layout.total:,} parameters on {t.data.name}, "
                f"{t.length:,} updates an epoch, {t.device} ({metrics.HEADLINE[t.data.kind].name}{paper})",
            )
        )
        if t.epoch > 1 or t.index:
            self.screen.print(f"  going on at epoch {t.epoch}, update {t.index + 1}")
        for remark in t.remarks:
            self.screen.print(f"  {remark}", style="dim")
        headings = "  ".join(f"{name:>{size}}" for name, size in self._columns().items())
        self.screen.print(f"  epoch  {headings}", style="dim")

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
        if self.live is None or now - self.refreshed < REFRESH:
            return
        self.refreshed = now
        self.live.update(self._line(trainer, now), refresh=True)

    def scored(self, trainer: Trainer, split: str, done: int, total: int) -> None:
        """Show how far the scoring of a split has come."""
        now = time.perf_counter()
        if self.live is None or now - self.refreshed < REFRESH:
            return
        self.refreshed = now
        self.live.update(styled(f"  scoring {split} ", *_bar(done, total), f" {done}/{total}"), refresh=True)

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """One line for the epoch."""
        self.pace_start = (time.perf_counter(), 0)
        live = [row for row in rows if row is not None]
        if not live:
            return
        first = live[0]
        mark = " *" if any(row["best"] for row in live) else ""
        reasons = [m.finished for m in trainer.schedule.members if m.finished]
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
                f"  finished: {'; '.join(dict.fromkeys(reasons))}; scoring the best epoch on {splits}"
            )

    def _line(self, t: Trainer, now: float) -> Any:
        sums = t.updater.sums
        nats, count, updates = (float(sums[k].sum()) for k in ("nats", "count", "updates"))
        updates, took = max(1.0, updates), now - self.pace_start[0]
        pace = (t.index - self.pace_start[1]) / max(took, 1e-9)
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


def score(value: float, places: int = 3) -> str:
    """With so many decimal places; that of a model that diverged in a few digits."""
    return f"{value:.{places}f}" if abs(value) < 1e6 else f"{value:.3g}"


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
