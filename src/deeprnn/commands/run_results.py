"""Results of runs for a person: the table, learning curves as a picture, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeprnn.cells.lookup import import_option
from deeprnn.commands.run_view import score
from deeprnn.console import console, program, show_rows, two_columns
from deeprnn.errors import MissingExtra
from deeprnn.runs.folder import Run, population
from deeprnn.runs.summary import MARK, summary


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
    for remark in dict.fromkeys(filter(None, notes)):
        names = ", ".join(run.name for run, note in zip(runs, notes, strict=True) if note == remark)
        console().print(f"{MARK} {remark}: {names}", style="dim")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return score(value, 3 if value < 100 else 1)
    return "-" if value is None else str(value)


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
    imports = import_option(runs[0].recipe["model"].get("cell", ""))
    command, arguments = program(), f"{shlex.quote(str(folder))} {imports}".rstrip()
    root = folder.parent if str(folder.parent) != "runs" else ""
    part = "" if runs[0].recipe["evaluation"].get("test", True) else " --split valid"
    steps = [
        (f"{command} evaluate {arguments}{part}", "every metric convention"),
        (f"{command} generate {arguments}", "let it write"),
        (f"{command} runs {shlex.quote(str(root)) if root else ''}".rstrip(), "all runs so far"),
    ]
    screen.print(f"\nnext:\n{two_columns(steps)}", soft_wrap=True)


def _spread(runs: Sequence[Run]) -> str:
    values = [v for v in (summary(run)["test"] for run in runs) if v is not None]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"test over {len(values)} members: mean {score(mean)}, from {score(min(values))} to {score(max(values))}"
