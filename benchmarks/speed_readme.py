"""The README's tables of speed: how many times as fast as PyTorch's own layers, at a glance."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Results
from benchmarks.shapes import (
    CPU_BATCHES,
    CPU_GOALS,
    FAIR_BATCHES,
    LABELS,
    LOOP,
    OURS,
    TORCH,
    Shape,
    cells,
    fair,
)
from benchmarks.speed_format import commits, gain, table
from benchmarks.speed_goals import GRAPH, PYTHON


def readme(gpu: Results, cpu: Results) -> str:
    """How many times as fast as PyTorch's own layers, at a glance."""
    return "\n\n".join([_readme_gpu(gpu), _readme_cpu(cpu)]) + "\n"


def _readme_gpu(gpu: Results) -> str:
    def row(label: str, shapes: Sequence[Shape], peer: str) -> list[str]:
        us = gpu.microseconds
        return [label, *(gain(us(s, OURS, how), us(s, peer, how)) for how in (PYTHON, GRAPH) for s in shapes)]

    lines = [
        row(f"{LABELS[kind]}, {hidden} units", [Shape(kind, hidden, B, 128) for B in FAIR_BATCHES], TORCH)
        for kind in ("rnn", "gru", "lstm")
        for hidden in (128, 400, 512, 1024)
    ]
    deep = [Shape("dts", 400, B, 200, 88, depth=2) for B in FAIR_BATCHES]
    lines.append(row("DT(S)-RNN, 400 + 400: the same as a loop", deep, LOOP))
    lines.append(row("DT(S)-RNN, 400 + 400: two layers of `nn.RNN`", deep, TORCH))
    head = [
        "one NVIDIA H200",
        *(f"{how} B = {B}" for how in ("Python,", "graph,") for B in FAIR_BATCHES),
    ]
    text = (
        "**How many times as fast as `torch.nn`'s layer** of the same name and size, forward and backward in fp32 "
        f"(TF32 off for both), called from Python and inside a CUDA graph; commit {commits(gpu, fair())}:"
    )
    return f"{text}\n\n{table(head, lines)}"


def _readme_cpu(cpu: Results) -> str:
    def row(label: str, kind: str, hidden: int, peer: str) -> list[str]:
        shapes = [s for s in cells() if s.kind == kind and s.hidden == hidden]
        return [label, *(gain(cpu.microseconds(s, OURS), cpu.microseconds(s, peer)) for s in shapes)]

    lines = [
        row(f"{LABELS[kind]}, {hidden} units", kind, hidden, TORCH)
        for kind in ("rnn", "gru", "lstm")
        for hidden in CPU_GOALS
    ]
    lines.append(row("DT(S)-RNN, 400 + 400: the same as a loop", "dts", 400, LOOP))
    lines.append(row("a step of your own, 400 units: the same as a loop", "paced", 400, LOOP))
    head = ["CPU, two cores", *(f"B = {B}" for B in CPU_BATCHES)]
    return f"The same on a CPU; commit {commits(cpu, cells())}:\n\n{table(head, lines)}"
