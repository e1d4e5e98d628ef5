"""The CPU backend beside its peers, and what holds it back, as one JSON document.

    python benchmarks/cpu_peers.py [--repeats 9] [--output results/bench/cpu.json]

DT(S) 88 -> 400/400, 200 steps, on all cores torch uses: peers at several batch sizes; the cost against
width, depth, length and population; the output layer over 10,000 words with its memory; and the speed of
large matrix products on the same cores, from which the least possible time follows. Close other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends import unroll
from deeprnn.backends.protocol import Inputs
from deeprnn.bench import measure
from deeprnn.bench.peers import Work
from deeprnn.commands.bench import Bench, with_ratios
from deeprnn.model.large_softmax import linear_cross_entropy
from deeprnn.model.losses import categorical_nll


def main() -> int:
    """Measure everything; print or write the document."""
    parser = argparse.ArgumentParser(description="The CPU backend beside its peers.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="file to write instead of printing")
    arguments = parser.parse_args()
    before = cores_used()
    peak = gigaflops()
    report = Bench(device="cpu", repeats=arguments.repeats).measure("cpu")
    report["products"] = {
        "gigaflops": peak,
        "note": "1024 x 1024 float32 products by torch, best of the run: the cores' peak",
    }
    for row in report["rows"]:
        if row["peer"] == "ours":
            row["least_us"] = least(row, peak)
    report["machine"]["cores_used_by_others"] = others(before, cores_used())
    report["shapes"] = shapes(max(3, arguments.repeats // 2))
    report["population"] = population(max(3, arguments.repeats // 2))
    report["words"] = words(max(3, arguments.repeats // 2))
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
        print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def cores_used() -> tuple[float, float, float] | None:
    """(time, seconds of work of all programs, of this one) on Linux, to tell how quiet the machine was."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system = (int(n) for n in stat.read_text().split()[1:4])
    return time.perf_counter(), (user + nice + system) / os.sysconf("SC_CLK_TCK"), time.process_time()


def others(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    """Cores that other programs kept busy in between, on average."""
    if before is None or after is None:
        return None
    elapsed, everyone, own = (b - a for a, b in zip(before, after, strict=True))
    return round(max(0.0, everyone - own) / elapsed, 2)


def gigaflops(size: int = 1024, repeats: int = 30) -> float:
    """What large matrix products reach on these cores."""
    x = torch.randn(size, size)
    times = [_seconds(lambda: x @ x) for _ in range(repeats)]
    return round(2 * size**3 / min(times) / 1e9, 1)


def least(row: dict[str, Any], peak: float) -> float:
    """Microseconds a step of forward and backward cannot beat at the peak: three times the forward's products.

    The input's own gradient is not asked for, so its products count twice.
    """
    n, H, inputs = row["depth"], row["hidden"], row["inputs"]
    recurrent = (2 * n - 1) * H * H
    products = row["batch"] * (3 * recurrent + 2 * n * H * inputs)
    return round(2 * products / peak / 1e3, 1)


def shapes(repeats: int) -> list[dict[str, Any]]:
    """Ours and the eager loop against width, depth and length."""
    works = [Work(200, 1, H) for H in (100, 200, 400, 600, 800)]
    works += [Work(200, 1, 400, depth) for depth in (1, 3)]
    works += [Work(T, 1, 400) for T in (50, 800)]
    works += [Work(200, B, 400) for B in (2, 4, 8, 32)]
    rows = []
    for work in works:
        print(work, file=sys.stderr, flush=True)
        rows += with_ratios(measure.measure(work, ("ours", "eager loop", "reference"), repeats))
    return rows


def population(repeats: int) -> list[dict[str, Any]]:
    """Forward and backward of P models at once, batch 1, through vmap."""
    cell, T, rows = Work(200, 1, 400).cell, 200, []
    h0 = torch.zeros(1, 400)

    def states(A: Tensor, matrices: list[Tensor]) -> Tensor:
        return unroll(cell, Inputs(A, [h0], matrices, [], []))[-1]

    for P in (1, 2, 4, 8, 15):
        A = torch.randn(P, T, 1, cell.entry_width, requires_grad=True)
        matrices = [(torch.randn(P, *shape) * 0.05).requires_grad_() for shape in cell.matrices]

        def train(A: Tensor = A, matrices: list[Tensor] = matrices) -> None:
            h = torch.func.vmap(states)(A, matrices)
            torch.autograd.grad(h.sum(), [A, *matrices])

        train()
        times = [_seconds(train) / T * 1e6 for _ in range(repeats)]
        median = statistics.median(times)
        rows.append({"members": P, "train_us": round(median, 1), "per_member_us": round(median / P, 1)})
    return rows


def words(repeats: int, rows: int = 1000, width: int = 400, classes: int = 10_000) -> list[dict[str, Any]]:
    """Output layer and cross-entropy over ten thousand words: whole logits against pieces."""
    h = torch.randn(rows, 1, width, requires_grad=True)
    weight = (torch.randn(classes, width) * 0.05).requires_grad_()
    bias = torch.zeros(classes, requires_grad=True)
    targets, mask = torch.randint(classes, (rows, 1)), torch.ones(rows, 1, dtype=torch.bool)

    def whole() -> list[Tensor]:
        total, _ = categorical_nll(h @ weight.t() + bias, targets, mask)
        return [total, *torch.autograd.grad(total, [h, weight, bias])]

    def pieces() -> list[Tensor]:
        total, _ = linear_cross_entropy(h, weight, bias, targets, mask)
        return [total, *torch.autograd.grad(total, [h, weight, bias])]

    error = max(float((a - b).norm() / b.norm()) for a, b in zip(pieces(), whole(), strict=True))
    ways: dict[str, Callable[[], Any]] = {"whole logits": whole, "in pieces": pieces}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(_seconds(way))
    return [
        {
            "way": name,
            "rows": rows,
            "classes": classes,
            "seconds": round(statistics.median(times[name]), 4),
            "peak_mb": measure.peak_memory(way, "cpu"),
            "difference": float(f"{error:.1e}"),
        }
        for name, way in ways.items()
    ]


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())
