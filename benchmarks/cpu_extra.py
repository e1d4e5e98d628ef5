"""Parts of `cpu_peers.py` about more than one layer: populations, and the output layer over many words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.protocol import Inputs
from deeprnn.backends.unrolling import unroll
from deeprnn.bench import measure
from deeprnn.bench.peers import Work
from deeprnn.model.large_softmax import linear_cross_entropy
from deeprnn.model.losses import categorical_nll

REPEATS = 5


def population(seconds: float) -> list[dict[str, Any]]:
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
        times = [_seconds(train) / T * 1e6 for _ in range(REPEATS)]
        median = statistics.median(times)
        rows.append({"members": P, "train_us": round(median, 1), "per_member_us": round(median / P, 1)})
    return rows


def words(seconds: float, rows: int = 1000, width: int = 400, classes: int = 10_000) -> list[dict[str, Any]]:
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
    for _ in range(REPEATS):
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
