"""Every table of speed, from results/bench into the pages, between their marks: python benchmarks/speed_tables.py

Rewrites the tables of README.md and docs/speed.md and draws their pictures (`plot_growth.py`); a test fails where a
page does not say what the results say. What was not measured, or was refused, is a dash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.records import Results, read  # noqa: E402
from benchmarks.shapes import (  # noqa: E402
    COMPILED,
    CPU_GROUPS,
    CPU_GROWTH,
    CPU_KINDS,
    FAIR,
    GPU_GROUPS,
    GPU_GROWTH,
    JAX,
    LABELS,
    LOOP,
    OURS,
    STEP,
    TF32,
    TORCH,
    Curve,
    Shape,
    cells,
    cpu_growth,
    fair,
    single,
)
from benchmarks.speed_format import (  # noqa: E402
    against,
    bold,
    figure,
    folded,
    gain,
    kernels_of,
    sources,
    table,
    title_of,
    versions_of,
)
from benchmarks.speed_goals import (  # noqa: E402
    GRAPH,
    PYTHON,
    cpu_goal_list,
    gpu_goal_list,
    gpu_goal_rows,
    slower_on_gpu,
    verdict,
)
from benchmarks.speed_readme import readme  # noqa: E402

from deeprnn.files import write_atomically  # noqa: E402
from deeprnn.reproduction.documents import with_section  # noqa: E402

BENCH = ROOT / "results" / "bench"
EPOCH_GOALS, POPULATION_GOAL, FIRST_CALL_GOAL = {1: 1.5, 15: 2.2}, {15: 1.5}, 3.0
# ---- the GPU


GRAPH_PEERS = (TORCH, TF32, LOOP, COMPILED)
PYTHON_PEERS = (*GRAPH_PEERS, JAX)
HEADS = {TORCH: "torch.nn", TF32: "torch.nn, TF32", LOOP: "eager loop", COMPILED: "step by torch.compile",
         JAX: "JAX, jitted scan"}  # fmt: skip


def gpu_width(gpu: Results, hidden: int) -> str:
    """Every peer at one width, in a graph and from Python."""
    shapes = sorted((s for s in fair() if s.hidden == hidden), key=lambda s: list(LABELS).index(s.kind))
    parts = []
    for how, label, peers in ((GRAPH, "in a CUDA graph", GRAPH_PEERS), (PYTHON, "from Python", PYTHON_PEERS)):
        lines = [_beside(gpu, s, f"{s.label}, B = {s.batch}", how, peers) for s in shapes]
        parts.append(table([label, "ours", *(HEADS[p] for p in peers)], lines))
    return "\n\n".join(parts)


def _beside(found: Results, shape: Shape, label: str, how: str, peers: Sequence[str]) -> list[str]:
    ours = found.microseconds(shape, OURS, how)
    return [label, bold(figure(ours)), *(against(ours, found.microseconds(shape, p, how)) for p in peers)]


def gpu_forward(gpu: Results) -> str:
    """Without gradients."""
    lines = []
    for s in sorted(fair(), key=lambda s: (s.hidden, list(LABELS).index(s.kind))):
        graph = _beside(gpu, s, f"{s.label}, B = {s.batch}", "graph_forward", (TORCH, LOOP))
        lines.append([*graph, *_beside(gpu, s, "", "python_forward", (TORCH,))[1:]])
    head = ["", "ours, graph", "torch.nn, graph", "eager loop, graph", "ours, Python", "torch.nn, Python"]
    return folded("Forward alone, without gradients", table(head, lines))


def gpu_group(gpu: Results, name: str) -> str:
    """Shapes of a group that no table before has, in a line each."""
    lines = []
    for s in GPU_GROUPS[name]():
        if s in FAIR:
            continue
        graph = _beside(gpu, s, f"{s.label}, B = {s.batch}, T = {s.steps}", GRAPH, (TORCH, LOOP))
        lines.append([*graph, *_beside(gpu, s, "", PYTHON, (TORCH,))[1:]])
    head = ["", "ours, graph", "torch.nn, graph", "eager loop, graph", "ours, Python", "torch.nn, Python"]
    return table(head, lines)


def gpu_goals(gpu: Results) -> str:
    """µs a step that were aimed at, and goals that compare."""
    rows = table(["in a CUDA graph", "", "", "", ""], gpu_goal_rows(gpu))
    return rows + "\n\n" + "\n".join(f"- {line}" for line in gpu_goal_list(gpu))


AXES = {"hidden": "units", "batch": "batch", "steps": "steps", "depth": "depth"}


def growth_tables(found: Results, curves: Sequence[Curve], how: str, kernels: bool) -> str:
    """A table a curve: µs a step, MB of a training call, and on a GPU which kernel served."""
    parts = []
    for curve in curves:
        lines, missing = [], []
        for s in curve.shapes:
            if not any((s, peer) in found.layers for peer in (OURS, TORCH, LOOP)):
                missing.append(f"{getattr(s, curve.field):,}")
                continue
            line = _beside(found, s, f"{getattr(s, curve.field):,}", how, (TORCH, LOOP))
            line += [_megabytes(found, s, peer) for peer in (OURS, TORCH, LOOP)]
            lines.append(line + ([kernels_of(found, s)] if kernels else []))
        head = [AXES[curve.field], "ours", "torch.nn", "eager loop", "MB: ours", "torch.nn", "eager loop"]
        head += ["kernel, or forward / backward"] if kernels else []
        without = f"\n\nNot measured yet: {AXES[curve.field]} {', '.join(missing)}." if missing else ""
        parts.append(f"**{title_of(curve)}**\n\n{table(head, lines)}{without}")
    return "\n\n".join(parts)


def _megabytes(found: Results, shape: Shape, peer: str) -> str:
    return figure(found.layers.get((shape, peer), {}).get("peak_mb"))


def memory(found: Results, shapes: Iterable[Shape]) -> str:
    """What a training call takes beside the eager loop's, over all shapes."""
    both = [
        [found.layers.get((s, peer), {}).get("peak_mb") for peer in (OURS, LOOP)]
        for s in dict.fromkeys(shapes)
    ]
    ratios = sorted(ours / loop for ours, loop in both if ours and loop)
    if not ratios:
        return "Not measured yet."
    above = sum(ratio > 1 for ratio in ratios)
    return (
        f"Of {len(ratios)} shapes ours takes more than the eager loop at {above}: {ratios[len(ratios) // 2]:.1f} times "
        f"as much in the middle of all, {ratios[0]:.1f} times at best, {ratios[-1]:.1f} at worst."
    )


def failures(found: Results, groups: Iterable[Callable[[], Iterable[Shape]]]) -> str:
    """What was refused, or could not be done."""
    shapes = dict.fromkeys(s for group in groups for s in group())
    lines = [
        f"- {s.label}, B = {s.batch}, T = {s.steps}, {peer}, commit {commit[:7]}: {why}"
        for s, peer, why, commit in found.failures(shapes)
    ]
    return "\n".join(lines) or "None."


# ---- training


def population(training: Results) -> str:
    """A whole population beside one of its members."""
    us = {row["members"]: row["train_us"] for row in training.part("population") if "train_us" in row}
    ratios = []
    for members, value in us.items():
        ratio, goal = value / us[1] if 1 in us else None, POPULATION_GOAL.get(members)
        ratios.append(figure(ratio) if goal is None else verdict(ratio, goal))
    head = ["models at once", *us]
    return table(head, [["µs a step of all", *map(figure, us.values())], ["times one", *ratios]])


def epochs(training: Results) -> str:
    """Seconds of the first and of later epochs, for one seed and for fifteen."""
    lines, rows = [], training.part("epochs")
    for seeds in dict.fromkeys(row["seeds"] for row in rows):
        of_it = [row for row in rows if row["seeds"] == seeds]
        later = sorted(row["updates_s"] for row in of_it if row["epoch"] > 1)
        check = sorted(row["validation_s"] for row in of_it if row["epoch"] > 1)
        median, goal = later[len(later) // 2], EPOCH_GOALS.get(seeds)
        reached = figure(median) if goal is None else verdict(median, goal)
        first = of_it[0]["setup_s"] + of_it[0]["updates_s"]
        lines.append([seeds, reached, figure(check[len(check) // 2]), figure(first)])
    head = [
        "seeds",
        "updates of an epoch, s (median from the 2nd on)",
        "validation, s",
        "setting up and 1st epoch, s",
    ]
    return table(head, lines)


def first_call(training: Results) -> str:
    """The first call of a process."""
    (row,) = training.part("first_call")[-1:]
    cells_ = [
        figure(row["cold_s"]),
        verdict(row["cached_s"], FIRST_CALL_GOAL),
        f"{row['cached_again_s'] * 1e3:.1f} ms",
    ]
    head = ["first call of a process, s", "kernels compiled", "kernels on disk", "a second call"]
    text = table(head, [["forward and backward", *cells_]])
    parts = ", ".join(
        f"{name} {figure(seconds)}" for name, seconds in row["parts_s"].items() if seconds >= 0.005
    )
    return f"{text}\n\nOf the call with kernels on disk, s: {parts}."


def training_source(training: Results) -> str:
    """Which commit these are of."""
    found = dict.fromkeys(
        (row["about"]["commit"], versions_of(row["about"]["versions"])) for row in training.parts
    )
    return "; ".join(f"commit {commit[:7]}, {versions}" for commit, versions in found)


# ---- the CPU


def cpu_cells(cpu: Results) -> str:
    """Every cell beside its peers, forward / forward and backward."""
    lines = []
    for s in sorted(cells(), key=lambda s: (s.hidden, s.batch, CPU_KINDS.index(s.kind))):
        times = [_both(cpu, s, peer) for peer in (TORCH, LOOP, JAX, COMPILED)]
        ratio = gain(cpu.microseconds(s, OURS), cpu.microseconds(s, JAX))
        lines.append([f"{s.label}, B = {s.batch}", s.steps, bold(_both(cpu, s, OURS)), *times, ratio])
    head = ["", "T", "ours", "torch.nn", "eager loop", "JAX", "torch.compile", "JAX over ours, training"]
    return table(head, lines)


def _both(found: Results, shape: Shape, peer: str) -> str:
    forward, train = (found.microseconds(shape, peer, f"python_{how}") for how in ("forward", "train"))
    return "-" if forward is None and train is None else f"{figure(forward)} / {figure(train)}"


def cpu_single(cpu: Results) -> str:
    """One step a call."""
    lines = [
        [f"{s.label}, B = {s.batch}", *(_both(cpu, s, peer) for peer in (OURS, STEP, TORCH))]
        for s in single()
    ]
    return table(["one step", "`layer(x)`", "`layer.step(x)`", "torch.nn"], lines)


def cpu_goals(cpu: Results) -> str:
    """What was aimed at."""
    return "\n".join(f"- {line}" for line in cpu_goal_list(cpu))


def cpu_machine(cpu: Results) -> str:
    """Where it was measured."""
    abouts = {id(row["about"]): row["about"]["machine"] for row in cpu.layers.values()}
    return "; ".join(dict.fromkeys(f"{m['cpu']}, {m['threads']} threads" for m in abouts.values()))


# ---- pages


def sections(bench: Path = BENCH) -> dict[str, dict[str, str]]:
    """Page -> name of a place in it -> what stands there."""
    gpu, cpu, training = (read(bench / name) for name in ("h200-layers", "cpu-layers", "h200-training.jsonl"))
    gpu_all = [s for group in GPU_GROUPS.values() for s in group()]
    cpu_all = [s for group, _ in CPU_GROUPS.values() for s in group()]
    places = {
        "gpu-sources": sources(gpu, gpu_all, "h200-layers"),
        **{f"gpu-{hidden}": gpu_width(gpu, hidden) for hidden in (128, 400, 512, 1024)},
        "gpu-forward": gpu_forward(gpu),
        "gpu-goals": gpu_goals(gpu),
        "gpu-slower": slower_on_gpu(gpu),
        "gpu-memory": memory(gpu, gpu_all),
        "gpu-growth": folded("The figures of the picture", growth_tables(gpu, GPU_GROWTH, GRAPH, kernels=True)),
        **{f"gpu-{name}": folded(summary, gpu_group(gpu, name)) for name, summary in FOLDED.items()},
        "gpu-failures": failures(gpu, GPU_GROUPS.values()),
        "training-source": training_source(training),
        "population": population(training),
        "epochs": epochs(training),
        "first-call": first_call(training),
        "cpu-sources": f"{cpu_machine(cpu)}.\n\n{sources(cpu, cpu_all, 'cpu-layers')}",
        "cpu-goals": cpu_goals(cpu),
        "cpu-cells": folded("Every cell, width and batch", cpu_cells(cpu)),
        "cpu-single": folded("One step a call, µs", cpu_single(cpu)),
        "cpu-memory": memory(cpu, cpu_growth()),
        "cpu-growth": folded("The figures of the picture", growth_tables(cpu, CPU_GROWTH, PYTHON, kernels=False)),
        "cpu-failures": failures(cpu, [group for group, _ in CPU_GROUPS.values()]),
    }  # fmt: skip
    return {
        "README.md": {"speed": readme(gpu, cpu)},
        "docs/speed.md": {n: f"{t}\n" for n, t in places.items()},
    }


FOLDED = {
    "gates": "Gated cells, highways and a user's own step",
    "wide": "Wide layers",
    "batches": "Large batches",
    "resets": "Sequences that begin anew at 3 % of all steps",
}


def rebuilt(text: str, places: Mapping[str, str]) -> str:
    """A page with its tables as the results say."""
    for name, content in places.items():
        text = with_section(text, name, content)
    return text


def main() -> None:
    """Rewrite pages and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-pictures", action="store_true", help="tables alone")
    given = parser.parse_args()
    for page, places in sections().items():
        path = ROOT / page
        write_atomically(path, rebuilt(path.read_text(encoding="utf-8"), places))
    if not given.no_pictures:
        from benchmarks.plot_growth import draw_all

        draw_all(ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
