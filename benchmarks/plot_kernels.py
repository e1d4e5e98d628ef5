"""The pictures of docs/kernels.md from results/bench: `python benchmarks/plot_kernels.py [FOLDER]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from deeprnn.backends import TransitionSpec  # noqa: E402
from deeprnn.backends.cuda import planning  # noqa: E402
from deeprnn.render import style  # noqa: E402
from deeprnn.render.style import ACCENT, INK, PAPER_LINE, RULE, SERIES, SOFT, dress  # noqa: E402

BENCH = ROOT / "results" / "bench"
GOALS = {1: 3.5, 16: 4.0, 64: 5.0, 256: 12.0}
PEERS = {  # in the file -> in the picture
    "eager loop": ("eager PyTorch", SERIES[0]),
    "CUDA graph": ("eager in a CUDA graph", SERIES[3]),
    "JAX lax.scan": ("JAX lax.scan", SERIES[4]),
    "nn.RNN x2": ("cuDNN nn.RNN, 2 layers", SERIES[5]),
    "nn.LSTM": ("cuDNN nn.LSTM, 1 layer", SERIES[2]),
    "nn.RNN": ("cuDNN nn.RNN, 1 layer", SERIES[7]),
    "ours": ("deeprnn", ACCENT),
}
BATCHES = (1, 16, 64, 256)


def read(name: str):
    """A measurement file."""
    return json.loads((BENCH / name).read_text())


def batch_figure() -> bytes:
    """Cost of a step against the batch, all peers, at H = 400 and 384."""
    figure = style.new_figure(9.2, 4.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, hidden, name in ((left, 400, "h200-peers-400.json"), (right, 384, "h200-peers-384-512.json")):
        rows = [r for r in read(name)["rows"] if r["hidden"] == hidden and "train_us" in r]
        dress(axes, f"H = {hidden}", "µs per step, forward and backward" if axes is left else "")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for peer, (label, colour) in PEERS.items():
            points = sorted((r["batch"], r["train_us"]) for r in rows if r["peer"] == peer)
            ours = peer == "ours"
            axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=2.6 if ours else 1.3,
                      markersize=6 if ours else 3.5, zorder=3 if ours else 2, label=label)  # fmt: skip
            if ours:
                for batch, us in points:
                    axes.annotate(f"{us:.1f}", (batch, us), (10, -7), textcoords="offset points", ha="left",
                                  color=colour, fontsize=8.5, fontweight="bold")  # fmt: skip
        axes.plot(list(GOALS), list(GOALS.values()), "_", color=PAPER_LINE, markersize=17, markeredgewidth=2.2,
                  label="goal (H = 400)" if axes is left else None, alpha=1 if axes is left else 0)  # fmt: skip
        axes.set_xticks(BATCHES, [str(b) for b in BATCHES])
        axes.minorticks_off()
        axes.set_yticks([1, 3, 10, 30, 100, 300, 1000], ["1", "3", "10", "30", "100", "300", "1000"])
        axes.set_ylim(1.7, 1000)
        axes.set_xlim(0.75, 480)
        axes.set_xlabel("batch", color=SOFT, fontsize=9)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK
    )
    return style.png_bytes(figure)


def population_figure() -> bytes:
    """Cost of a step for a whole population, beside the members one after another."""
    rows = {r["members"]: r["both"] for r in read("h200-kernels.json") if r["batch"] == 1}
    members, times = list(rows), list(rows.values())
    figure = style.new_figure(5.6, 3.5)
    axes = figure.subplots()
    dress(axes, "A population, batch 1 each", "µs per step, forward and backward")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(members, [m * times[0] for m in members], "--", color=SOFT, linewidth=1.3)
    axes.annotate("one after another", (4.2, 4.2 * times[0]), (-6, 4), textcoords="offset points", ha="right",
                  color=SOFT, fontsize=8.5)  # fmt: skip
    axes.axhline(1.5 * times[0], color=PAPER_LINE, linewidth=1.3)
    axes.annotate("goal at 15: 1.5 times one", (15, 1.5 * times[0]), (0, 4), textcoords="offset points", ha="right",
                  color=PAPER_LINE, fontsize=8.5)  # fmt: skip
    axes.plot(members, times, "o-", color=ACCENT, linewidth=2.6, markersize=6)
    for m, us in rows.items():
        axes.annotate(f"{us:.2f}", (m, us), (0, -14), textcoords="offset points", ha="center", color=ACCENT,
                      fontsize=8.5, fontweight="bold")  # fmt: skip
    axes.set_xticks(members, [str(m) for m in members])
    axes.set_yticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
    axes.minorticks_off()
    axes.set_ylim(1.9, 50)
    axes.set_xlabel("members", color=SOFT, fontsize=9)
    return style.png_bytes(figure)


def plans_figure() -> bytes:
    """What the planner expects of each measured shape, beside what it takes."""
    spec = TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True))
    figure = style.new_figure(5.6, 4.4)
    axes = figure.subplots()
    dress(axes, "Shapes of the kernels", "measured, µs per step and direction")
    axes.plot([1, 20], [1, 20], color=RULE, linewidth=1.2, zorder=1)
    rows = [json.loads(line) for line in (BENCH / "h200-sweep.jsonl").read_text().splitlines()]
    for colour, batch in zip((SERIES[3], SERIES[0], SERIES[2], ACCENT), (8, 16, 64, 256), strict=True):
        for r in (r for r in rows if r["batch"] == batch):
            p, common = r["plan"], (planning.ring(spec, r["backward"]), batch, 1, False, planning.Device())
            if p["path"] == "mma":
                plan = planning.mma_plan(*common, p["cluster"], p["mgroups"], p["kgroups"], p["rows"])
            else:
                lanes = (p["threads"], p["klanes"], p["vec"])
                plan = planning.cluster_plan(*common, p["cluster"], *lanes, p["rows"])
            assert plan is not None
            filled = p["path"] == "mma"
            axes.plot(plan.cost / 1980, r["us_per_step"], "o", color=colour, alpha=0.8, markersize=5.5,
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
    """Draw all."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    for name, draw in (("batch", batch_figure), ("population", population_figure), ("plans", plans_figure)):
        (folder / f"kernel-{name}.png").write_bytes(draw())


if __name__ == "__main__":
    main()
