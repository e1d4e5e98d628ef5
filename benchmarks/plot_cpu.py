"""The picture of docs/kernels-cpu.md: how a step's cost grows, from a document of `cpu_peers.py`.

python benchmarks/plot_cpu.py [results/bench/cpu.json] [docs/images/cpu-growth.png]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

from plot_kernels import logarithmic  # noqa: E402

from deeprnn.files import write_atomically  # noqa: E402
from deeprnn.render import style  # noqa: E402
from deeprnn.render.style import ACCENT, INK, SERIES, dress  # noqa: E402

PEERS = {
    "eager loop": ("eager PyTorch loop", SERIES[0]),
    "nn.RNN x2": ("nn.RNN, as many layers as the depth", SERIES[5]),
    "ours": ("deeprnn, DT(S)", ACCENT),
}
PANELS = {
    "hidden": ("width H (B = 1, depth 2)", "H"),
    "batch": ("batch (H = 128, depth 2)", "B"),
    "steps": ("length (H = 128, B = 1, depth 2)", "T"),
    "depth": ("depth (H = 128, B = 1)", "layers of the transition"),
}


def picture(report: dict[str, Any]) -> bytes:
    """A panel for each thing that grows."""
    figure = style.new_figure(10.5, 8.2)
    for axes, (along, (title, label)) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        dress(axes, title, "µs per step, forward and backward")
        rows = [row for row in report["growth"] if row["along"] == along and not row["failed"]]
        for peer, (name, colour) in PEERS.items():
            points = sorted((row[along], row["train_us_min"]) for row in rows if row["peer"] == peer)
            ours = peer == "ours"
            axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=2.6 if ours else 1.3,
                      markersize=5.5 if ours else 3.5, zorder=3 if ours else 2, label=name)  # fmt: skip
        places = sorted({row[along] for row in rows})
        logarithmic(axes, places, [row["train_us_min"] for row in rows], label)
        axes.tick_params(axis="x", labelsize=7.5)
    machine, clock = report["machine"], report["settings"]["clock"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} thread(s), {clock} time, commit {report['commit']}",
                    fontsize=8, color=INK)  # fmt: skip
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, labelcolor=INK
    )
    return style.png_bytes(figure)


def main() -> int:
    """Draw it."""
    places = [Path(p) for p in sys.argv[1:]]
    source = places[0] if places else ROOT / "results/bench/cpu.json"
    target = places[1] if len(places) > 1 else ROOT / "docs/images/cpu-growth.png"
    write_atomically(target, picture(json.loads(source.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
