"""The pictures of docs/kernels.md from results/bench, and its tables:

python benchmarks/plot_kernels.py [FOLDER] [--file measure.json]
python benchmarks/plot_kernels.py --tables [--file measure.json]      # Markdown, to the terminal
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from kernel_tables import BATCHES, BENCH, GOALS, Row, all_tables, measured, select, times, write_into  # noqa: E402

from deeprnn.render import style  # noqa: E402
from deeprnn.render.style import ACCENT, INK, PAPER, PAPER_LINE, RULE, SERIES, SOFT, dress  # noqa: E402

PEERS = {  # in the file -> in the picture
    "eager loop": ("eager PyTorch", SERIES[0]),
    "torch.compile": ("torch.compile of the step", SERIES[6]),
    "CUDA graph": ("eager in a CUDA graph", SERIES[3]),
    "JAX lax.scan": ("JAX lax.scan", SERIES[4]),
    "nn.RNN x2": ("cuDNN nn.RNN, 2 layers", SERIES[5]),
    "nn.LSTM": ("cuDNN nn.LSTM, 1 layer", SERIES[2]),
    "nn.RNN": ("cuDNN nn.RNN, 1 layer", SERIES[7]),
    "ours": ("deeprnn", ACCENT),
}
KERNELS = {  # the mark of a point says which kernel served it
    "cluster": ("o", "cluster, FFMA"),
    "tensor_core": ("s", "cluster, tensor cores"),
    "whole_card": ("D", "whole card"),
    "stepwise": ("X", "a launch a step"),
}
BLUE = SERIES[0]


def logarithmic(axes: Any, xs: list[Any], ys: list[float], label: str) -> None:
    """Both axes logarithmic, a tick at every measured place, few and round values upwards."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(xs, [f"{x:,}" for x in xs])
    low, high = min(ys) / 1.35, max(ys) * 1.45
    digits = (1, 2, 5) if high > 12 * low else (1, 1.5, 2, 3, 4, 5, 7)
    steps = [m * 10**e for e in range(-1, 4) for m in digits]
    shown = [v for v in steps if low <= v <= high]
    axes.set_yticks(shown, [f"{v:g}" for v in shown])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.35)
    axes.set_xlabel(label, color=SOFT, fontsize=9)


def batch_figure(data: dict[str, Any]) -> bytes:
    """Cost of a step against the batch, all peers, a panel for each width."""
    widths = [h for h in (400, 384, 512) if select(data["rows"], hidden=h, peer="ours")]
    figure = style.new_figure(4.2 * len(widths) + 0.9, 4.7)
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    for axes, hidden in zip(panels, widths, strict=True):
        dress(axes, f"H = {hidden}", "µs per step, forward and backward" if axes is panels[0] else "")
        for peer, (label, colour) in PEERS.items():
            points = times(data["rows"], "batch", peer=peer, hidden=hidden)
            ours = peer == "ours"
            axes.plot(list(points), list(points.values()), "o-", color=colour, linewidth=2.6 if ours else 1.3,
                      markersize=6 if ours else 3.5, zorder=3 if ours else 2,
                      label=label if select(data["rows"], peer=peer) else None)  # fmt: skip
            for batch, us in points.items() if ours else ():
                axes.annotate(f"{us:.1f}", (batch, us), (8, -11), textcoords="offset points", ha="left",
                              color=colour, fontsize=8.5, fontweight="bold")  # fmt: skip
        if hidden == 400:
            axes.plot(list(GOALS), list(GOALS.values()), "_", color=PAPER_LINE, markersize=17,
                      markeredgewidth=2.2, label="goal (H = 400)", zorder=4)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axes.set_yticks([1, 3, 10, 30, 100, 300, 1000], ["1", "3", "10", "30", "100", "300", "1000"])
        axes.minorticks_off()
        axes.set_ylim(1.7, 1300)
        axes.set_xlim(0.7, 620)
        axes.set_xlabel("batch", color=SOFT, fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5, labelcolor=INK
    )
    return style.png_bytes(figure)


def draw_line(axes: Any, rows: list[Row], along: str, colour: str, label: str, style_: str = "-") -> None:
    """One curve, every point marked by the kernel that served it, its name at the end."""
    rows = sorted(rows, key=lambda r: r[along])
    if not rows:
        return
    xs, ys = [r[along] for r in rows], [r["train_us"] for r in rows]
    axes.plot(xs, ys, style_, color=colour, linewidth=1.8, zorder=2)
    for r in rows:
        mark = KERNELS.get(r["path"].split("+")[0], ("o", ""))[0]
        filled = style_ == "-"
        axes.plot(r[along], r["train_us"], mark, color=colour, markersize=5.5, zorder=3,
                  markerfacecolor=colour if filled else PAPER, markeredgewidth=1.3)  # fmt: skip
    axes.plot([], [], style_, color=colour, linewidth=1.8, label=label)


def panel(
    axes: Any,
    data: dict[str, Any],
    title: str,
    along: str,
    lines: list[tuple[dict, str, str, str]],
    name: str,
) -> None:
    """One panel of the curves: lines are (what is fixed, colour, label, line style)."""
    left = axes.get_subplotspec().is_first_col()
    dress(axes, title, "µs per step, forward and backward" if left else "")
    everything: list[Row] = []
    for fixed, colour, label, line in lines:
        rows = select(data["curves"], **fixed)
        draw_line(axes, rows, along, colour, label, line)
        everything += rows
    if not everything:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=SOFT, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    logarithmic(axes, sorted({r[along] for r in everything}), [r["train_us"] for r in everything], name)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")


def curves_figure(data: dict[str, Any]) -> bytes:
    """Cost of a step against batch, width, length, depth and members."""
    figure = style.new_figure(12.6, 7.6)
    (batch, width, length), (depth, members, key) = figure.subplots(2, 3)
    base = {"hidden": 400, "depth": 2, "steps": 200, "batch": 1, "members": 1, "precision": "fp32"}

    def fixed(*free: str, **changed: Any) -> dict[str, Any]:
        return {k: v for k, v in {**base, **changed}.items() if k not in free}

    lines = (("fp32", "-"), ("bf16", "--"))
    panel(batch, data, "Batch, H = 400", "batch",
          [(fixed("batch", precision=p), ACCENT, p, line) for p, line in lines], "batch")  # fmt: skip
    batch.plot(
        list(GOALS), list(GOALS.values()), "_", color=PAPER_LINE, markersize=15, markeredgewidth=2.2, zorder=4
    )
    batch.tick_params(axis="x", labelsize=7.5)
    panel(width, data, "Width", "hidden",
          [(fixed("hidden", batch=b, precision=p), colour, f"B = {b}, {p}", line)
           for b, colour in ((1, ACCENT), (16, BLUE)) for p, line in lines], "units")  # fmt: skip
    width.tick_params(axis="x", labelsize=7, rotation=55)
    panel(length, data, "Length, H = 400", "steps",
          [(fixed("steps", batch=b), colour, f"B = {b}", "-") for b, colour in ((1, ACCENT), (16, BLUE))],
          "steps")  # fmt: skip
    panel(depth, data, "Depth of the transition", "depth",
          [(fixed("depth", hidden=h, batch=b), colour, f"H = {h}, B = {b}", line)
           for h, line in ((400, "-"), (300, "--")) for b, colour in ((1, ACCENT), (16, BLUE))], "layers")  # fmt: skip
    panel(members, data, "Members of a population, B = 1", "members",
          [(fixed("members"), ACCENT, "all members together", "-")], "members")  # fmt: skip
    alone(members, times(data["curves"], "members", **fixed("members")))
    legend_panel(key)
    return style.png_bytes(figure)


def alone(axes: Any, points: dict[int, float]) -> None:
    """What the members would take one after another, and the goal for fifteen."""
    if 1 not in points or len(points) < 2:
        return
    one, top = points[1], axes.get_ylim()[1]
    few = [m for m in points if m * one <= 3 * top]
    axes.plot(
        few, [m * one for m in few], ":", color=SOFT, linewidth=1.4, label="one after another", zorder=1
    )
    if 15 in points:
        axes.plot([15], [1.5 * one], "_", color=PAPER_LINE, markersize=15, markeredgewidth=2.2, zorder=4)
    axes.set_ylim(one / 1.35, max(top, 6 * one))
    axes.set_yticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")


def legend_panel(axes: Any) -> None:
    """What marks and lines mean."""
    axes.set_axis_off()
    for mark, label in KERNELS.values():
        axes.plot([], [], mark, color=INK, markersize=6, linestyle="none", label=label)
    axes.plot(
        [], [], "_", color=PAPER_LINE, markersize=15, markeredgewidth=2.2, linestyle="none", label="goal"
    )
    axes.legend(frameon=False, fontsize=9.5, labelcolor=INK, loc="center left", title="kernel that served a point",
                title_fontproperties={"size": 9.5, "weight": "bold"}, alignment="left", labelspacing=0.7)  # fmt: skip


def population_figure(data: dict[str, Any]) -> bytes:
    """Cost of a step for a whole population, beside the members one after another."""
    rows = times(data["curves"], "members", hidden=400, depth=2, steps=200, batch=1, precision="fp32")
    members, us = list(rows), list(rows.values())
    figure = style.new_figure(5.6, 3.5)
    axes = figure.subplots()
    dress(axes, "A population, batch 1 each", "µs per step, forward and backward")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(members, [m * us[0] for m in members], "--", color=SOFT, linewidth=1.3)
    axes.annotate("one after another", (4.2, 4.2 * us[0]), (-6, 4), textcoords="offset points", ha="right",
                  color=SOFT, fontsize=8.5)  # fmt: skip
    axes.axhline(1.5 * us[0], color=PAPER_LINE, linewidth=1.3)
    axes.annotate("goal at 15: 1.5 times one", (1, 1.5 * us[0]), (0, 4), textcoords="offset points", ha="left",
                  color=PAPER_LINE, fontsize=8.5)  # fmt: skip
    axes.plot(members, us, "o-", color=ACCENT, linewidth=2.6, markersize=6)
    for m, value in rows.items():
        axes.annotate(f"{value:.2f}", (m, value), (0, -14), textcoords="offset points", ha="center", color=ACCENT,
                      fontsize=8.5, fontweight="bold")  # fmt: skip
    axes.set_xticks(members, [str(m) for m in members])
    axes.set_yticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
    axes.minorticks_off()
    axes.set_ylim(us[0] / 1.45, 50)
    axes.set_xlabel("members", color=SOFT, fontsize=9)
    return style.png_bytes(figure)


def plans_figure() -> bytes:
    """What the planner expected of each measured shape, beside what it takes."""
    figure = style.new_figure(5.6, 4.4)
    axes = figure.subplots()
    dress(axes, "Shapes of the kernels", "measured, µs per step and direction")
    axes.plot([1, 20], [1, 20], color=RULE, linewidth=1.2, zorder=1)
    lines = (BENCH / "h200-sweep.jsonl").read_text().splitlines()
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


def main() -> None:
    """Draw all, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--file", type=Path, help="a measure.json instead of the one in results/bench")
    parser.add_argument("--tables", action="store_true", help="print Markdown instead")
    parser.add_argument("--into", type=Path, help="put the tables between the marks of this file instead")
    args = parser.parse_args()
    data = measured(args.file)
    if args.tables:
        print(all_tables(data))
        return
    if args.into:
        print("written:", ", ".join(write_into(args.into, data)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    pictures = {"batch": batch_figure(data), "population": population_figure(data),
                "plans": plans_figure(), "curves": curves_figure(data)}  # fmt: skip
    for name, content in pictures.items():
        (args.folder / f"kernel-{name}.png").write_bytes(content)


if __name__ == "__main__":
    main()
