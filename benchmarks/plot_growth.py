"""How a step's cost grows with width, batch, length and depth, beside torch.nn and the eager loop; and memory.

python benchmarks/plot_growth.py [FOLDER]      # growth-gpu.png and growth-cpu.png from results/bench
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.records import Results, read  # noqa: E402
from benchmarks.shapes import CPU_GROWTH, GPU_GROWTH, LOOP, OURS, TORCH, Curve, Shape  # noqa: E402
from benchmarks.speed_format import kernel_of, title_of  # noqa: E402
from benchmarks.speed_goals import GRAPH, PYTHON  # noqa: E402

from deeprnn.files import write_atomically  # noqa: E402
from deeprnn.render import style  # noqa: E402
from deeprnn.render.style import ACCENT, INK, SERIES, SOFT, dress  # noqa: E402

BENCH = ROOT / "results" / "bench"
PEERS = {  # drawn in this order, ours last and on top
    LOOP: ("eager loop in PyTorch", SERIES[7]),
    TORCH: ("torch.nn (cuDNN)", SERIES[0]),
    OURS: ("deeprnn", ACCENT),
}
MARKS = {"cluster": "o", "cluster, tensor cores": "s", "whole card": "v", "whole card, tensor cores": "D",
         "stepwise": "X"}  # fmt: skip
NAMES = {"hidden": "width", "batch": "batch", "steps": "length", "depth": "depth of the transition"}
LABELS = {"hidden": "units", "batch": "batch rows", "steps": "steps of a sequence", "depth": "layers"}
Value = Callable[[Shape, str], float | None]


def points(curve: Curve, peer: str, value: Value) -> list[tuple[Shape, float]]:
    """What was measured along a curve."""
    found = ((shape, value(shape, peer)) for shape in curve.shapes)
    return [(shape, y) for shape, y in found if y is not None]


def panel(
    axes: Any, name: str, curve: Curve, value: Value, unit: str, kernel: Callable[[Shape], str]
) -> None:
    """One panel: a line a peer, broken where a point is missing; ours marked by the kernel of the backward pass."""
    dress(axes, ylabel=unit)
    axes.set_title(f"{name}\n", loc="left", color=INK, fontsize=11, fontweight="bold", pad=6)
    axes.text(0, 1.025, title_of(curve), transform=axes.transAxes, color=SOFT, fontsize=9)
    places: set[int] = set()
    values: list[float] = []
    for peer, (_, colour) in PEERS.items():
        found, ours = points(curve, peer, value), peer == OURS
        line = [value(shape, peer) for shape in curve.shapes]
        axes.plot([getattr(shape, curve.field) for shape in curve.shapes],
                  [math.nan if y is None else y for y in line],
                  color=colour, linewidth=2.4 if ours else 1.4, zorder=3 if ours else 2)  # fmt: skip
        for shape, y in found:
            axes.plot(getattr(shape, curve.field), y, MARKS.get(kernel(shape), "o") if ours else ".", color=colour,
                      markersize=6 if ours else 5, zorder=4 if ours else 2)  # fmt: skip
        places |= {getattr(shape, curve.field) for shape, _ in found}
        values += [y for _, y in found]
    if values:
        logarithmic(axes, sorted(places), values, LABELS[curve.field])
    else:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=SOFT, fontsize=9)
        axes.set(xticks=[], yticks=[])


def logarithmic(axes: Any, xs: Sequence[int], ys: Sequence[float], label: str) -> None:
    """Both axes logarithmic, a tick at every measured place, few and round values upwards."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(xs, apart(xs))
    low, high = min(ys) / 1.4, max(ys) * 1.5
    digits = (1,) if high > 1000 * low else (1, 3) if high > 60 * low else (1, 2, 5)
    shown = [v for e in range(-1, 6) for m in digits if low <= (v := m * 10.0**e) <= high]
    axes.set_yticks(shown, [f"{v:,g}" for v in shown])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.set_xlim(min(xs) / 1.2, max(xs) * 1.2)
    axes.set_xlabel(label, color=SOFT, fontsize=9)
    axes.tick_params(axis="x", labelsize=7.5)


def apart(xs: Sequence[int]) -> list[str]:
    """Ticks' labels, without those that would touch the next one."""
    found, room = [f"{xs[-1]:,}"], math.log(xs[-1] / xs[0]) / 11
    last = xs[-1]
    for x in reversed(xs[:-1]):
        found.append(f"{x:,}" if math.log(last / x) >= room else "")
        last = x if found[-1] else last
    return found[::-1]


def legends(figure: Any, title: str, names: dict[str, str], kernels: Sequence[str] = ()) -> None:
    """Who is who above the panels, what marks mean below them."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linewidth=2.4 if peer == OURS else 1.4, label=names.get(peer, label))
             for peer, (label, colour) in reversed(PEERS.items())]  # fmt: skip
    wide = figure.get_figwidth() > 6
    look: dict[str, Any] = {"frameon": False, "fontsize": 10 if wide else 8, "labelcolor": INK}
    heading = {"title": title, "title_fontproperties": {"size": 13 if wide else 10.5, "weight": "bold"}}
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), **look, **heading)
    marks = [
        Line2D([], [], color=ACCENT, marker=MARKS[kernel], linestyle="none", markersize=6, label=kernel)
        for kernel in kernels
    ]
    if marks:
        below = {
            "title": "the kernel that served deeprnn's backward pass",
            "title_fontsize": 9,
            **look,
            "fontsize": 9,
        }
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), **below)


def gpu_figure(gpu: Results) -> bytes:
    """Time along four curves, and the memory of a training call along two of them."""

    def kernel(shape: Shape) -> str:
        found = gpu.layers.get((shape, OURS), {}).get("kernels")
        return "" if found is None else kernel_of(found["backward"])

    def memory(shape: Shape, peer: str) -> float | None:
        return gpu.layers.get((shape, peer), {}).get("peak_mb")

    def time(shape: Shape, peer: str) -> float | None:
        return gpu.microseconds(shape, peer, GRAPH)

    figure = style.new_figure(13.2, 8.6)
    panels = list(figure.subplots(2, 3).flat)
    for axes, curve in zip(panels[:4], GPU_GROWTH, strict=True):
        panel(axes, f"Time: {NAMES[curve.field]}", curve, time, "µs a step, forward + backward", kernel)
    for axes, curve in zip(panels[4:], GPU_GROWTH[:2], strict=True):
        panel(axes, f"Memory: {NAMES[curve.field]}", curve, memory, "MB of a training call", lambda shape: "")
    served = {kernel(shape) for curve in GPU_GROWTH for shape in curve.shapes}
    title = "Training on one NVIDIA H200, fp32, calls in a CUDA graph: lower is better"
    legends(figure, title, {}, [name for name in MARKS if name in served])
    return style.png_bytes(figure)


def cpu_figure(cpu: Results) -> bytes | None:
    """Time along what was measured, and memory along batch and length; nothing where no curve has two points."""

    def time(shape: Shape, peer: str) -> float | None:
        return cpu.microseconds(shape, peer, PYTHON)

    def memory(shape: Shape, peer: str) -> float | None:
        return cpu.layers.get((shape, peer), {}).get("peak_mb")

    by_time = [("Time", curve, time, "µs a step, forward + backward") for curve in CPU_GROWTH]
    by_memory = [
        ("Memory", c, memory, "MB of a training call") for c in CPU_GROWTH if c.field in ("batch", "steps")
    ]
    panels = [p for p in (*by_time, *by_memory) if len(points(p[1], OURS, p[2])) > 1]
    if not panels:
        return None
    wide = min(3 if len(panels) > 4 else 2, len(panels))
    high = -(-len(panels) // wide)
    figure = style.new_figure((4.4 if wide > 2 else 5.4) * wide, 4.2 * high)
    places = figure.subplots(high, wide, squeeze=False).flat
    for axes, (what, curve, value, label) in zip(places, panels, strict=False):
        panel(axes, f"{what}: {NAMES[curve.field]}", curve, value, label, lambda shape: "")
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    legends(figure, "Training on a CPU, fp32: lower is better", {TORCH: "nn.RNN, as many layers"})
    return style.png_bytes(figure)


def draw_all(folder: Path, bench: Path = BENCH) -> None:
    """Both pictures."""
    pictures = {"gpu": gpu_figure(read(bench / "h200-layers")), "cpu": cpu_figure(read(bench / "cpu-layers"))}
    for name, content in pictures.items():
        if content is not None:
            write_atomically(folder / f"growth-{name}.png", content)


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
