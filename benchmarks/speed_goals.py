"""The goals of speed that the project set itself, and whether they are met: Markdown from what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.records import Results
from benchmarks.shapes import (
    CPU_GOALS,
    FAIR,
    GPU_GROUPS,
    JAX,
    LOOP,
    OURS,
    STEP,
    TORCH,
    Shape,
    cells,
    resets,
    single,
)

GRAPH, PYTHON, HOST = "graph_train", "python_train", "host_train"
NAMED = 7
"""shapes that miss a goal, by name; the tables have all"""


@dataclass(frozen=True)
class Goal:
    """µs a step of a training call in a CUDA graph, at several batches."""

    shape: Shape
    microseconds: dict[int, float]


def _goal(
    kind: str, hidden: int, steps: int, us: dict[int, float], depth: int = 1, inputs: int = 128
) -> Goal:
    return Goal(Shape(kind, hidden, 1, steps, inputs, depth), us)


def _at(*us: float) -> dict[int, float]:
    return dict(zip((1, 16, 64, 256), us, strict=False))


GOALS = (
    _goal("dts", 400, 200, _at(3.5, 4, 5, 12), depth=2, inputs=88),
    *(_goal(kind, 512, 128, _at(2.5, 4.5, 8, 22)) for kind in ("gru", "lstm")),
    *(_goal(kind, 128, 128, _at(1.3, 1.5, 2.2, 5)) for kind in ("gru", "lstm")),
    _goal("rhn", 400, 128, _at(6, 9, 15, 40), depth=5),
    _goal("rhn", 830, 35, {20: 60}, depth=10),
    _goal("dts", 1024, 100, _at(4, 7, 14, 40), depth=2),
    _goal("dts", 2048, 100, _at(15, 20, 35), depth=2),
    _goal("rnn", 2048, 100, _at(4, 8, 20)),
)


def verdict(value: float | None, goal: float) -> str:
    """What was reached of a goal."""
    if value is None:
        return f"- of {goal:g}"
    return f"**{value:.3g}** of {goal:g}" if value <= goal else f"{value:.3g} of {goal:g}: missed"


def gpu_goal_rows(gpu: Results) -> list[list[str]]:
    """A row for each layer: batch by batch what was reached of the goal."""
    found = []
    for goal in GOALS:
        cells_ = [
            f"B={batch}: {verdict(gpu.microseconds(replace(goal.shape, batch=batch), OURS, GRAPH), us)}"
            for batch, us in goal.microseconds.items()
        ]
        found.append([goal.shape.label, *cells_, *[""] * (4 - len(cells_))])
    return found


def counted(
    pairs: Iterable[tuple[Shape, float | None, float | None]],
    least: float | None = None,
    most: float | None = None,
) -> str:
    """Of how many shapes b / a is at least or at most so much, and the worst of the others by name."""
    known = [(b / a, shape) for shape, a, b in pairs if a is not None and b is not None]
    if not known:
        return "not measured"
    missed = [x for x in known if (least is not None and x[0] < least) or (most is not None and x[0] > most)]
    missed.sort(key=lambda found: found[0], reverse=least is None)
    named = "; ".join(f"{s.label}, B = {s.batch}{_steps(s)} ({r:.2f}×)" for r, s in missed[:NAMED])
    more = f"; and {len(missed) - NAMED} more" if len(missed) > NAMED else ""
    return f"{len(known) - len(missed)} of {len(known)}" + (f". Not: {named}{more}" if missed else "")


def _steps(shape: Shape) -> str:
    return "" if shape in FAIR or shape.steps in (1, 128) else f", T = {shape.steps}"


def of_one_commit(results: Results, *shapes: Shape) -> bool:
    """Whether our rows of these shapes were measured with the same kernels."""
    return len({results.layers.get((s, OURS), {}).get("about", {}).get("commit") for s in shapes}) == 1


def gpu_goal_list(gpu: Results) -> list[str]:
    """Goals that compare."""
    everything = list(dict.fromkeys(s for group in GPU_GROUPS.values() for s in group()))
    us = gpu.microseconds
    rnn = [s for s in FAIR if s.kind == "rnn"]
    rnn.sort(key=lambda s: (s.hidden, s.batch))
    host = counted(((s, us(s, TORCH, HOST), us(s, OURS, HOST)) for s in rnn), most=0.5)
    deep = Shape("dts", 400, 1, 200, 88, depth=2)
    called = counted([(deep, us(deep, OURS, GRAPH), us(deep, OURS, PYTHON))], most=1.4)
    large = [
        s for s in everything if s.in_torch and s.hidden in (128, 256, 512) and not s.reset and s.steps > 10
    ]
    large = [s for s in large if s.batch >= 256]
    twice = counted(((s, us(s, OURS, GRAPH), us(s, TORCH, GRAPH)) for s in large), least=2)
    marked = [
        (s, us(plain, OURS, GRAPH), us(s, OURS, GRAPH))
        for s in resets()
        if s.reset and of_one_commit(gpu, s, plain := replace(s, reset=0.0))
    ]
    own = [
        (s, us(replace(s, kind="rnn"), OURS, GRAPH), us(s, OURS, GRAPH))
        for s in everything
        if s.kind == "paced"
    ]
    loop = counted(((s, us(s, LOOP, GRAPH), us(s, OURS, GRAPH)) for s in everything), most=1)
    return [
        f"Host time of a training call at most half of `nn.RNN`'s (RNN, 128 to 1024 units): {host}.",
        f"From Python at most 1.4 times the graph's time, DT(S) 400 at B = 1, T = 200: {called}.",
        f"RNN, GRU, LSTM of 128 to 512 units at B = 256 to 4,096 at least twice as fast as torch.nn: {twice}.",
        f"Marks at 3 % of all steps cost at most 5 %, in a graph: {counted(marked, most=1.05)}.",
        f"A user's own step at most 1.1 times the RNN of its size, in a graph: {counted(own, most=1.1)}.",
        f"Nowhere slower than the eager loop, in a graph: {loop}.",
    ]


def slower_on_gpu(gpu: Results) -> str:
    """Where torch.nn is ahead."""
    everything = list(dict.fromkeys(s for group in GPU_GROUPS.values() for s in group() if not s.reset))
    us = gpu.microseconds
    lines = []
    for how, label in ((GRAPH, "in a graph"), (PYTHON, "called from Python")):
        found = counted(((s, us(s, TORCH, how), us(s, OURS, how)) for s in everything), most=1)
        lines.append(f"- Not slower than torch.nn {label}: {found}.")
    return "\n".join(lines)


def cpu_goal_list(cpu: Results) -> list[str]:
    """The same on a CPU."""
    us = cpu.microseconds
    goal = [s for s in cells() if s.hidden in CPU_GOALS]
    found = []
    for how, label in ((PYTHON, "training"), ("python_forward", "without gradients")):
        jax = counted(((s, us(s, OURS, how), us(s, JAX, how)) for s in goal), least=1.5)
        found.append(f"1.5 times as fast as JAX's scan, {label}: {jax}.")
    for peer, label in ((OURS, "`layer(x)`"), (STEP, "`layer.step(x)`")):
        how = "python_forward"
        one = counted(((s, us(s, TORCH, how), us(s, peer, how)) for s in single()), most=1.2)
        found.append(f"One step by {label} at most 1.2 times torch.nn's, without gradients: {one}.")
    theirs = [s for s in cells() if s.in_torch]
    for how, label in ((PYTHON, "training"), ("python_forward", "without gradients")):
        ahead = counted(((s, us(s, TORCH, how), us(s, OURS, how)) for s in theirs), most=1)
        found.append(f"RNN, GRU and LSTM not slower than torch.nn's, {label}: {ahead}.")
    own = [s for s in cells() if s.kind == "paced" and s.batch == 1]
    fast = counted(((s, us(s, OURS), us(s, LOOP)) for s in own), least=4)
    found.append(f"A user's own step at B = 1 at least 4 times the eager loop's speed, training: {fast}.")
    return found
