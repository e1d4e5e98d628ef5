"""The picture of docs/kernels.md: what the planner expected of each measured shape, beside what it takes.

python benchmarks/plot_kernels.py [FILE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from deeprnn.files import write_atomically  # noqa: E402
from deeprnn.render import style  # noqa: E402
from deeprnn.render.style import ACCENT, INK, RULE, SERIES, SOFT, dress  # noqa: E402

SWEEP = ROOT / "results" / "bench" / "h200-sweep.jsonl"


def plans_figure() -> bytes:
    """What the planner expected of each measured shape, beside what it takes."""
    figure = style.new_figure(5.6, 4.4)
    axes = figure.subplots()
    dress(axes, "Shapes of the kernels", "measured, µs per step and direction")
    axes.plot([1, 20], [1, 20], color=RULE, linewidth=1.2, zorder=1)
    lines = SWEEP.read_text().splitlines()
    rows = [
        row
        for row in map(json.loads, lines)
        if row.get("us_per_step") and row.get("cell", "dts400") == "dts400"
    ]
    for colour, batch in zip((SERIES[3], SERIES[0], SERIES[2], ACCENT), (8, 16, 64, 256), strict=True):
        for r in (r for r in rows if r["batch"] == batch):
            filled = r["plan"]["path"] != "cluster"
            axes.plot(r["plan"]["cost"] / 1980, r["us_per_step"], "o", color=colour, alpha=0.8, markersize=5.5,
                      markerfacecolor=colour if filled else "none")  # fmt: skip
        axes.plot([], [], "o", color=colour, markersize=5.5, label=f"B = {batch}")
    axes.plot([], [], "o", color=SOFT, markerfacecolor="none", markersize=5.5, label="by FFMA")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [1.5, 2, 3, 5, 10, 15]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlim(1.3, 17)
    axes.set_ylim(1.3, 17)
    axes.set_xlabel("expected by the planner, µs", color=SOFT, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")
    return style.png_bytes(figure)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "kernel-plans.png"
    write_atomically(target, plans_figure())
