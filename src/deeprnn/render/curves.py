"""Learning curves: the loss of both splits, the rate and the gradient's norm, and where the paper stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deeprnn.render.style import INK, PAPER_LINE, SERIES, SOFT, TRAIN, VALID, dress, new_figure, png_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]


def curves_png(
    rows: Rows, *, title: str = "", metric: str = "", paper: float | None = None, dpi: int = 150
) -> bytes:
    """Learning curves of one run from its metrics rows (epoch, train, valid, rate, grad_norm)."""
    figure = new_figure(9.2, 5.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    loss = figure.add_subplot(grid[0, :])
    dress(loss, title or "Learning curve", metric)
    for key, colour, width in (("train", TRAIN, 1.4), ("valid", VALID, 2.0)):
        x, y = series(rows, key)
        loss.plot(x, y, color=colour, linewidth=width, label=key, marker="o" if len(x) < 3 else None)
    x, y = series(rows, "valid")
    if y:
        best = min(range(len(y)), key=y.__getitem__)
        loss.plot(x[best], y[best], "o", color=VALID, markersize=6, markerfacecolor="white", zorder=5)
        loss.annotate(
            f"best {y[best]:.3f}", (x[best], y[best]), (0, -14), textcoords="offset points",
            ha="center", color=VALID, fontsize=8.5,
        )  # fmt: skip
    _paper_line(loss, paper)
    _focus(loss, rows, paper)
    legend(loss)
    rate = figure.add_subplot(grid[1, 0])
    dress(rate, "Learning rate")
    rate.plot(*series(rows, "rate"), color=SERIES[0], linewidth=1.5)
    norm = figure.add_subplot(grid[1, 1])
    dress(norm, "Gradient norm")
    norm.plot(*series(rows, "grad_norm"), color=SERIES[3], linewidth=1.5)
    for axes in (rate, norm):
        values = [v for line in axes.lines for v in line.get_ydata() if v > 0]  # type: ignore[union-attr]
        if values and max(values) > 20 * min(values):
            axes.set_yscale("log")
        axes.set_xlabel("epoch", color=SOFT, fontsize=9)
    return png_bytes(figure, dpi)


def comparison_png(
    runs: Mapping[str, Rows], *, title: str = "", metric: str = "", paper: float | None = None, dpi: int = 150
) -> bytes:
    """Validation curves of several runs in one picture."""
    figure = new_figure(9.2, 4.4)
    axes = figure.add_subplot()
    dress(axes, title or "Validation", metric)
    for number, (name, rows) in enumerate(runs.items()):
        axes.plot(*series(rows, "valid"), color=SERIES[number % len(SERIES)], linewidth=1.7, label=name)
    _paper_line(axes, paper)
    _focus(axes, [row for rows in runs.values() for row in rows[len(rows) // 5 :]], paper)
    axes.set_xlabel("epoch", color=SOFT, fontsize=9)
    legend(axes)
    return png_bytes(figure, dpi)


def series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """The epochs at which `key` was written, and its values; rows without it, or not finite, are left out."""
    points = [
        (float(row.get("epoch", number)), float(row[key]))
        for number, row in enumerate(rows, 1)
        if isinstance(row.get(key), int | float) and abs(row[key]) < float("inf")
    ]
    return [x for x, _ in points], [y for _, y in points]


def legend(axes: Axes) -> None:
    """A quiet legend, when there is something to tell apart."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def _paper_line(axes: Axes, paper: float | None) -> None:
    if paper is not None:
        axes.axhline(
            paper, color=PAPER_LINE, linewidth=1.3, linestyle=(0, (5, 3)), label=f"paper, test: {paper:g}"
        )


def _focus(axes: Axes, rows: Rows, paper: float | None) -> None:
    """Cut off the first plunge: it would press everything of interest into the bottom of the picture."""
    values = [v for key in ("train", "valid") for v in series(rows[max(1, len(rows) // 8) :], key)[1]]
    values += [paper] if paper is not None else []
    if len(values) > 8:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
