"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, and the table at the end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.console import console, escape, program, show_table
from deeprnn.errors import MissingExtra, need
from deeprnn.model import metrics
from deeprnn.runs.folder import Run, population

if TYPE_CHECKING:
    from deeprnn.training.loop import Trainer

UNITS = {"music": "nats/frame", "char": "bits/char", "word": "perplexity"}
REFRESH = 0.25
"""seconds between two looks at the running sums"""
SHOWN = 6
"""members of a population that are shown one by one"""


class View:
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
            f"[bold]{escape(str(folder))}[/]: {count}{escape(t.recipe.model.kind)} of {t.layout.total:,} "
            f"parameters on {escape(t.data.name)}, {t.length:,} updates an epoch, {t.device} "
            f"({UNITS[t.data.kind]}{paper})"
        )
        if t.epoch > 1 or t.index:
            self.screen.print(f"  going on at epoch {t.epoch}, update {t.index + 1}")
        names = ("train", "valid", "rate", "norm", "clipped", "steps/s", "time")
        widths = (8, 8, 8, 6, 7, 8, 7)
        head = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
        self.screen.print(f"  [dim]epoch  {head}[/]")

    def __enter__(self) -> View:
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
        self.live.update(self._line(trainer, now))

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """One line for the epoch."""
        self.since = (time.perf_counter(), 0)
        found = [row for row in rows if row is not None]
        if not found:
            return
        first = found[0]
        mark = " [green]*[/]" if any(row["best"] for row in found) else ""
        done = [m.finished for m in trainer.schedule.members if m.finished]
        self.screen.print(
            f"  {first['epoch']:>5}  {_join(found, 'train'):>8}  {_join(found, 'valid'):>8}  "
            f"{_join(found, 'rate', '.3g'):>8}  {_join(found, 'grad_norm', '.2f'):>6}  "
            f"{_join(found, 'clipped', '.0%'):>7}  {sum(r['frames_per_second'] for r in found):>8,.0f}  "
            f"{clock(first['seconds']):>7}{mark}"
        )
        if trainer.schedule.done:
            self.screen.print(f"  finished: {'; '.join(dict.fromkeys(done))}")

    def _line(self, t: Trainer, now: float) -> str:
        sums = t.updater.sums
        nats, count, updates = (float(sums[k].sum()) for k in ("nats", "count", "updates"))
        updates, took = max(1.0, updates), now - self.since[0]
        pace = (t.index - self.since[1]) / max(took, 1e-9)
        left = (t.length - t.index) / max(pace, 1e-9)
        filled = int(24 * t.index / max(1, t.length))
        best = [m.best for m in t.schedule.members if m.best is not None]
        first = f"  epoch {t.epoch} [cyan]{'━' * filled}[/][dim]{'━' * (24 - filled)}[/] {t.index}/{t.length}"
        first += (
            f"  {clock(left)} left{self._total_left(t, pace)}  {count / max(t.epoch_seconds, 1e-9):,.0f}/s"
        )
        parts = [
            f"train {metrics.headline(t.data.kind, nats, int(count)):.3f}" if count else "",
            f"best valid {metrics.headline(t.data.kind, min(best) * 10**6, 10**6):.3f}" if best else "",
            f"rate {float(t.schedule.rates(t.updater.tau).max()):.3g}",
            f"norm {float(sums['norm'].sum()) / updates:.2f}",
            f"clipped {float(sums['clipped'].sum()) / updates:.0%}",
            f"paper {self.paper:g}" if self.paper is not None else "",
        ]
        return first + "\n  " + "  ".join(part for part in parts if part)

    def _total_left(self, t: Trainer, pace: float) -> str:
        stop = t.recipe.stop
        if not stop.epochs or pace <= 0:
            return ""
        left = ((stop.epochs - t.epoch) * t.length + t.length - t.index) / pace
        if stop.minutes:
            left = min(left, 60 * stop.minutes - t.seconds)
        return f" (all: {clock(left)})"


def _join(rows: Sequence[Mapping[str, Any]], key: str, form: str = ".3f") -> str:
    values = [row[key] for row in rows]
    if len(values) > SHOWN:
        return f"{min(values):{form}}..{max(values):{form}}"
    texts = [f"{value:{form}}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def clock(seconds: float) -> str:
    """3:07 or 1:02:45."""
    minutes, s = divmod(int(max(0.0, seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


class Board:
    """Writes an epoch's numbers for TensorBoard."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        module = need("torch.utils.tensorboard", extra="tensorboard")
        names = [m.name for m in trainer.members]
        self.writers = [module.SummaryWriter(str(folder / "tensorboard" / name)) for name in names]

    def updated(self, trainer: Trainer) -> None:
        """Nothing: an epoch is the unit."""

    def epoch_ended(self, trainer: Trainer, rows: Sequence[Mapping[str, Any] | None]) -> None:
        """Every number of the epoch's line."""
        for writer, row in zip(self.writers, rows, strict=True):
            for key in ("train", "valid", "rate", "grad_norm", "clipped", "frames_per_second"):
                if row is not None:
                    writer.add_scalar(key, row[key], row["step"])
            writer.flush()


# ---- afterwards


def members(folder: Path) -> list[Run]:
    """The run of a folder, or the members of a population."""
    return population(folder) if (folder / "population.json").exists() else [Run(folder)]


COLUMNS = ("run", "model", "data", "status", "epoch", "valid", "test", "paper", "metric")
"""what fits eighty characters"""


def results_table(found: Sequence[Run], columns: Sequence[str] = COLUMNS) -> Any:
    """Runs with their results, as rich shows them."""
    table = need("rich.table", extra="cli").Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("epoch", "train", "valid", "test", "paper")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name == "run")
    for run in found:
        row = summary(run)
        row |= {"run": run.name, "model": row["label"].removesuffix("-RNN"), "epoch": row["best_epoch"]}
        table.add_row(*(escape(_cell(row[name])) for name in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 100 else f"{value:.1f}"
    return "-" if value is None else str(value)


def summary(run: Run) -> dict[str, Any]:
    """A run in one flat dict: the best so far where it is not finished."""
    info, rows = run.info, run.metrics()
    headline = metrics.HEADLINE[run.kind]
    result = info.get("result") or {}
    best = min(rows, key=lambda r: r["valid"], default=None)
    out = {
        "path": str(run.path),
        "name": run.name,
        "label": info["label"],
        "data": info["data"]["name"],
        "status": run.status,
        "seed": info["seed"],
        "parameters": info["parameters"],
        "metric": info["metric"],
        "paper": info.get("paper"),
        "epochs": len(rows),
        "best_epoch": result.get("best_epoch", best["epoch"] if best else None),
        "updated": info.get("updated"),
    }
    for split in ("train", "valid", "test"):
        fallback = best["valid"] if best and split == "valid" else None
        out[split] = result[split][headline] if split in result else fallback
    return out


def write_curves(folder: Path) -> Path | None:
    """Learning curves of a run, or of all members, as curves.png; None without matplotlib."""
    from deeprnn.render.curves import comparison_png, curves_png
    from deeprnn.runs.checkpoint import write_atomically

    found = members(folder)
    first = found[0].info
    settings = {"metric": first["metric"], "paper": first.get("paper")}
    title = f"{first['label']} on {first['data']['name']}"
    try:
        if len(found) == 1:
            png = curves_png(found[0].metrics(), title=title, **settings)
        else:
            png = comparison_png({r.path.name: r.metrics() for r in found}, title=title, **settings)
    except MissingExtra:
        return None
    path = folder / "curves.png"
    write_atomically(path, png)
    return path


def conclusion(folder: Path) -> None:
    """The table, the picture and what to try next."""
    screen = console()
    found = members(folder)
    screen.print()
    show_table(results_table(found, ("run", "model", "epoch", "train", "valid", "test", "paper", "metric")))
    if len(found) > 1:
        screen.print(_spread(found))
    picture = write_curves(folder)
    if picture:
        screen.print(f"\nlearning curves: {escape(str(picture))}")
    screen.print("\nnext:")
    me, place = program(), shlex.quote(str(folder))
    for command, why in (
        (f"{me} evaluate {place}", "every metric convention"),
        (f"{me} generate {place}", "let it write"),
        (f"{me} runs", "all runs so far"),
    ):
        screen.print(escape(f"  {command:<48} {why}"))


def _spread(found: Sequence[Run]) -> str:
    values = [v for v in (summary(run)["test"] for run in found) if v is not None]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"test over {len(values)} members: mean {mean:.3f}, from {min(values):.3f} to {max(values):.3f}"
