"""Figures from the ledger: learning curves, cells against the paper's, size against result, depth and shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deeprnn.files import write_atomically
from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.notation import short_count
from deeprnn.render.curves import legend, series
from deeprnn.render.style import INK, PAPER_LINE, RULE, SERIES, SOFT, dress, new_figure, png_bytes
from deeprnn.reproduction.cells import Row, rows
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.extras import LABELS, extra_rows, parameters
from deeprnn.reproduction.tables import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {**paper.LABELS, **LABELS}
ORDER = ("rnn", "dt", "dts", "dts3", "dts4", "do", "dot", "dots", "srnn", "sdts")
COLOURS = {model: SERIES[i % len(SERIES)] for i, model in enumerate(paper.LABELS)}


def draw_all(entries: Sequence[Entry], folder: str | Path) -> list[Path]:
    """Write every figure that the ledger has something for."""
    folder = Path(folder)
    table = rows(entries)
    pictures: dict[str, bytes] = {}
    for data in paper.INPUTS:
        of_data = [r for r in table if r.cell.data == data and r.entries]
        if of_data:
            pictures[f"learning-{data}"] = learning_curves(data, of_data)
    if any(r.entries for r in table):
        pictures["cells"] = cells_figure(table)
        pictures["parameters"] = parameters_figure(table)
    if extra_rows(entries):
        pictures["depth"] = depth_figure(entries)
    out = []
    for name, picture in pictures.items():
        path = folder / f"{name}.png"
        write_atomically(path, picture)
        out.append(path)
    return out


def learning_curves(data: str, rows: Sequence[Row]) -> bytes:
    """Validation over epochs for each model of a data set: a thin line a seed."""
    figure = new_figure(8.4, 4.2)
    axes = figure.add_subplot()
    dress(axes, f"{TITLES[data]}: validation", HEADLINE[paper.KINDS[data]].name)
    late: list[float] = []
    for row in rows:
        for number, entry in enumerate(row.entries):
            x, y = series(entry.curve, "valid")
            late += y[max(1, len(y) // 3) :]
            name = f"{paper.LABELS[row.cell.model]} ({len(row.entries)})"
            axes.plot(x, y, color=COLOURS[row.cell.model], linewidth=1.1, alpha=0.75,
                      linestyle=":" if entry.marks else "-",  # cut off, or of uncommitted code
                      label=None if number else name)  # fmt: skip
    if late:
        margin = 0.08 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)
    axes.set_xlabel("epoch", color=SOFT, fontsize=9)
    legend(axes)
    return png_bytes(figure)


def cells_figure(table: Sequence[Row]) -> bytes:
    """All cells as a dot plot: our difference from the paper's number in percent, seeds and mean."""
    figure = new_figure(8.4, 6.6)
    axes = figure.add_subplot()
    dress(axes, "Test result against the paper's (left is better)")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.axvline(0, color=PAPER_LINE, linewidth=1.4)
    axes.axvspan(-1, 1, color=PAPER_LINE, alpha=0.08, linewidth=0)
    for place, row in enumerate(table):
        if not row.entries:
            axes.text(0, place, " not run", color=SOFT, fontsize=7.5, va="center")
            continue
        colour = COLOURS[row.cell.model]
        gaps = [100 * (v / row.cell.value - 1) for v in row.values]
        for gap, entry in zip(gaps, row.entries, strict=True):
            fill = "none" if entry.marks else colour
            axes.plot([gap], [place], "o", color=colour, markerfacecolor=fill, alpha=0.35, markersize=4)
        axes.plot(sum(gaps) / len(gaps), place, "o", color=colour, markersize=7.5)
    axes.set_yticks(
        range(len(table)), [f"{TITLES[r.cell.data]}  {paper.LABELS[r.cell.model]}" for r in table]
    )
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set_xlabel("difference from the paper, %", color=SOFT, fontsize=9)
    return png_bytes(figure)


def parameters_figure(table: Sequence[Row]) -> bytes:
    """Parameters against the test result, a panel for each data set that has runs; hollow: the paper's."""
    sets = [d for d in paper.INPUTS if any(r.entries for r in table if r.cell.data == d)]
    across, down = min(3, len(sets) + 1), -(-(len(sets) + 1) // 3)  # one place more, for the names
    figure = new_figure(3.3 * across + 0.6, 3.2 * down)
    for place, data in enumerate(sets, 1):
        axes = figure.add_subplot(down, across, place)
        dress(axes, TITLES[data], HEADLINE[paper.KINDS[data]].name)
        for row in (r for r in table if r.cell.data == data and r.entries):
            colour = COLOURS[row.cell.model]
            size = parameters(row.entries[0])
            average = sum(row.values) / len(row.values)
            axes.errorbar([size], [average], yerr=[row.sd or 0.0], fmt="X" if row.marks else "o",
                          color=colour, markersize=6,
                          label=paper.LABELS[row.cell.model])  # fmt: skip
            if row.cell.model != "dots-star":  # its size is not published
                axes.plot([size], [row.cell.value], "o", color=colour, markerfacecolor="none", markersize=6)
        axes.set_xscale("log")
        ticks = sorted({parameters(r.entries[0]) for r in table if r.cell.data == data and r.entries})
        shown = [t for i, t in enumerate(ticks) if not i or t > 1.12 * ticks[i - 1]]  # labels need room
        axes.set_xticks(shown, [short_count(t) for t in shown])
        axes.minorticks_off()
        axes.set_xlabel("parameters", color=SOFT, fontsize=9)
    names = figure.add_subplot(down, across, len(sets) + 1)
    names.set_axis_off()
    shown = dict.fromkeys(r.cell.model for r in table if r.entries)
    for model in shown:
        names.plot([], [], "o", color=COLOURS[model], markersize=6, label=f"{paper.LABELS[model]}, mean ± sd")
    names.plot(
        [], [], "o", color=SOFT, markerfacecolor="none", markersize=6, label="the paper's, in the same colour"
    )
    names.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    return png_bytes(figure)


def depth_figure(entries: Sequence[Entry]) -> bytes:
    """Every model of a data set that has extra ones, in order of depth: does depth help, does the shortcut?"""
    table = {(r.cell.data, r.cell.model): r.entries for r in rows(entries) if r.entries}
    table |= {(r.data, r.model): r.entries for r in extra_rows(entries)}
    sets = list(dict.fromkeys(r.data for r in extra_rows(entries)))
    figure = new_figure(8.4, 3.4 * len(sets))
    for place, data in enumerate(sets, 1):
        axes = figure.add_subplot(len(sets), 1, place)
        dress(
            axes,
            f"{TITLES[data]}: depth and shortcut, test (hollow: cut off, or uncommitted code)",
            HEADLINE[paper.KINDS[data]].name,
        )
        models = [m for m in ORDER if (data, m) in table]
        for x, model in enumerate(models):
            _seeds(axes, x, table[data, model], model)
        axes.set_xticks(range(len(models)), [NAMES[m].replace("-RNN, ", "\n") for m in models], color=INK)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlim(-0.6, len(models) - 0.4)
    return png_bytes(figure)


def _seeds(axes: Axes, x: float, entries: Sequence[Entry], model: str) -> None:
    """A point a seed, hollow where the run was cut off or its code is in no commit, and a bar at the mean."""
    colour, values = SERIES[0] if model in paper.LABELS else SERIES[1], [e.value() for e in entries]
    for entry in entries:
        fill = "none" if entry.marks else colour
        axes.plot([x], [entry.value()], "o", color=colour, markerfacecolor=fill, alpha=0.5, markersize=4)
    average = sum(values) / len(values)
    axes.plot([x - 0.22, x + 0.22], [average, average], color=colour, linewidth=2.4)
