"""What is measured: shapes of layers in groups, and who computes each. Needs Python alone.

A group is a list of shapes, the most wanted first; a shape of two groups is measured once. GPU groups are those of
`gpu_layers.py`, CPU groups those of `cpu_layers.py`; `speed_tables.py` and `plot_growth.py` ask for rows by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

OURS, STEP, TORCH, TF32 = "ours", "ours, .step", "torch.nn", "torch.nn, TF32"
LOOP, COMPILED, JAX = "eager loop", "torch.compile", "JAX"
LABELS = {"rnn": "RNN", "gru": "GRU", "lstm": "LSTM", "dts": "DT(S)", "rhn": "RHN", "paced": "own step"}
LONGEST_LOOP = 200
"""steps of a loop that is captured: every operation is a node of the graph"""


@dataclass(frozen=True)
class Shape:
    """A layer and its input. `depth`: of a transition or a highway; `reset`: share of steps where sequences begin anew.

    `dts` is the paper's DT(S): sigmoid layers, inputs to all, the shortcut to the last; `paced` a step of a user's own.
    """

    kind: str
    hidden: int
    batch: int
    steps: int
    inputs: int = 128
    depth: int = 1
    reset: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Shape:
        """The shape that a row of results is about."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @property
    def in_torch(self) -> bool:
        """Whether torch.nn has this function; else an `nn.RNN` of about the same cost stands beside it."""
        return self.kind in ("rnn", "gru", "lstm")

    @property
    def label(self) -> str:
        depth = f", depth {self.depth}" if self.depth > 2 or (self.depth > 1 and self.kind == "rhn") else ""
        return f"{LABELS[self.kind]} {self.hidden}{depth}" + (
            f", marks {self.reset:.0%}" if self.reset else ""
        )


@dataclass(frozen=True)
class Curve:
    """Shapes along one of their fields."""

    field: str
    shapes: tuple[Shape, ...]


# ---- GPU


def gates() -> Iterator[Shape]:
    """Gated cells, highways and a user's own step."""
    for hidden, batch, kind in itertools.product((512, 128), (1, 16, 64, 256), ("gru", "lstm")):
        yield Shape(kind, hidden, batch, 128)
    for batch in (1, 16, 64, 256):
        yield Shape("rhn", 400, batch, 128, depth=5)
        yield Shape("paced", 512, batch, 128)
    yield Shape("rhn", 830, 20, 35, depth=10)


def wide() -> Iterator[Shape]:
    """Weights of up to fifty megabytes."""
    for batch in (1, 16, 64, 256):
        yield Shape("dts", 1024, batch, 100, depth=2)
    for (kind, depth), batch in itertools.product((("dts", 2), ("rnn", 1)), (1, 16, 64)):
        yield Shape(kind, 2048, batch, 100, depth=depth)
    for kind, batch in itertools.product(("gru", "lstm"), (1, 16, 64, 256)):
        yield Shape(kind, 1024, batch, 100)


def batches() -> Iterator[Shape]:
    """Large batches, as in reinforcement learning."""
    for batch, hidden, kind in itertools.product((1024, 4096), (512, 256, 128), ("rnn", "gru", "lstm")):
        yield Shape(kind, hidden, batch, 64)
    yield Shape("dts", 512, 1024, 64, depth=2)


def resets() -> Iterator[Shape]:
    """Sequences that begin anew at 3 % of all steps, and the same without."""
    for kind, batch, share in itertools.product(("gru", "lstm"), (64, 1024), (0.0, 0.03)):
        yield Shape(kind, 256, batch, 128, reset=share)


FAIR_WIDTHS, FAIR_BATCHES = (400, 128, 512, 1024), (1, 16, 64)


def fair() -> Iterator[Shape]:
    """The table: every kind at four widths, beside every peer."""
    for batch in (*FAIR_BATCHES, 256):
        yield Shape("dts", 400, batch, 200, 88, depth=2)
    for hidden, batch, kind in itertools.product(FAIR_WIDTHS, FAIR_BATCHES, ("rnn", "gru", "lstm")):
        yield Shape(kind, hidden, batch, 128)


GPU_GROWTH = (
    Curve("hidden", tuple(Shape("rnn", H, 16, 64) for H in (64, 256, 512, 1024, 1536, 2048, 3072, 4096))),
    Curve("batch", tuple(Shape("gru", 256, B, 64) for B in (1, 4, 16, 64, 256, 1024, 4096))),
    Curve("steps", tuple(Shape("rnn", 256, 1, T) for T in (10, 100, 1000, 10_000, 100_000))),
    Curve("depth", tuple(Shape("dts", 256, 16, 64, depth=L) for L in (1, 2, 3, 5, 7, 10))),
)


def growth() -> Iterator[Shape]:
    """Against width, batch, length and depth."""
    yield from (shape for curve in GPU_GROWTH for shape in curve.shapes)


GPU_GROUPS: dict[str, Callable[[], Iterator[Shape]]] = {
    g.__name__: g for g in (gates, wide, batches, resets, fair, growth)
}


def gpu_peers(shape: Shape) -> list[str]:
    """Who computes a shape, or something of about its cost. What takes long to compile: the fair table alone."""
    found = [OURS]
    if not shape.reset:  # torch.nn has no marks
        found += [TORCH]
        found += [LOOP] if shape.steps <= LONGEST_LOOP else []
        if shape in FAIR and shape.batch in FAIR_BATCHES:
            found += [TF32, COMPILED, JAX]
    return found


FAIR = frozenset(fair())


# ---- CPU; inputs are the 88 keys of a piano

CPU_KINDS = ("rnn", "dts", "gru", "lstm", "paced")
CPU_WIDTHS, CPU_BATCHES = (64, 400, 1024, 128, 512), (1, 16, 64)
CPU_GOALS = (64, 400, 1024)
"""widths at which a goal is set"""


def _on_cpu(kind: str, hidden: int, batch: int, steps: int, depth: int = 2) -> Shape:
    return Shape(kind, hidden, batch, steps, 88, depth if kind == "dts" else 1)


def _length(hidden: int, batch: int) -> int:
    """Steps: fewer where they take long, so that all of a table fits the time."""
    return 200 if hidden < 400 else 100 if hidden * batch < 10_000 else 30


def cells() -> Iterator[Shape]:
    """Every cell at every width and batch."""
    for H, B, kind in itertools.product(CPU_WIDTHS, CPU_BATCHES, CPU_KINDS):
        yield _on_cpu(kind, H, B, _length(H, B))


def goals() -> Iterator[Shape]:
    """Those at which a goal is set."""
    yield from (shape for shape in cells() if shape.hidden in CPU_GOALS)


def single() -> Iterator[Shape]:
    """One step, as streams call a layer."""
    for H, B, kind in itertools.product(CPU_GOALS, CPU_BATCHES, CPU_KINDS):
        yield _on_cpu(kind, H, B, 1)


CPU_GROWTH = (
    Curve("hidden", tuple(_on_cpu("dts", H, 1, 50 if H <= 1024 else 20)
                          for H in (64, 128, 256, 512, 1024, 1400, 2048, 4096))),
    Curve("batch", tuple(_on_cpu("dts", 128, B, 50 if B < 128 else 10)
                         for B in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096))),
    Curve("steps", tuple(_on_cpu("dts", 128, 1, T) for T in (1, 2, 5, 10, 100, 1000, 10_000, 100_000))),
    Curve("depth", tuple(_on_cpu("dts", 128, 1, 50, L) for L in (1, 2, 3, 5, 7, 10))),
)  # fmt: skip


def cpu_growth() -> Iterator[Shape]:
    """DT(S) against width, batch, length and depth."""
    yield from (shape for curve in CPU_GROWTH for shape in curve.shapes)


def compiled() -> Iterator[Shape]:
    """The step by torch.compile, which takes its time."""
    yield from (shape for shape in cells() if shape.hidden == 400)


CPU_GROUPS: dict[str, tuple[Callable[[], Iterator[Shape]], tuple[str, ...]]] = {
    "goals": (goals, (OURS, TORCH, LOOP, JAX)),
    "single": (single, (OURS, STEP, TORCH)),
    "growth": (cpu_growth, (OURS, TORCH, LOOP)),
    "cells": (cells, (OURS, TORCH, LOOP, JAX)),
    "compiled": (compiled, (COMPILED,)),
}
"""shapes, and who computes them; the most wanted first"""
