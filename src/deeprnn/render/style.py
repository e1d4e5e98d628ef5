"""The look shared by every picture: ink on paper, one accent, no clutter; figures without global state."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from deeprnn.errors import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER = "#fdfcf9"
INK = "#1f2a3a"
SOFT = "#7d8797"
RULE = "#d9d7d0"
TRAIN = "#7a8fb0"
VALID = "#c2543a"
ACCENT = "#c2543a"
PAPER_LINE = "#a67c1e"  # the number to beat
SERIES = ("#2f5d8a", "#c2543a", "#4f8a4c", "#8a5aa0", "#c08a2c", "#3d8f95", "#a04668", "#6b6b6b")


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """A figure that belongs to nobody else: pyplot's registry would leak in a long-lived server."""
    figure = need("matplotlib.figure", extra="cli").Figure(
        figsize=(width, height), facecolor=PAPER, layout="constrained", **options
    )
    need("matplotlib.backends.backend_agg", extra="cli").FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str = "", ylabel: str = "") -> None:
    """Give an axes the house look."""
    axes.set_facecolor(PAPER)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=SOFT, labelsize=8.5, length=3, color=RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=10.5, fontweight="bold")
    if ylabel:
        axes.set_ylabel(ylabel, color=SOFT, fontsize=9)


def png_bytes(figure: Figure, dpi: int = 150) -> bytes:
    """The figure as the bytes of a PNG file."""
    with io.BytesIO() as buffer:
        # Software and date are left out, so that the same picture is the same file.
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        return buffer.getvalue()
