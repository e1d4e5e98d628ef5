"""Cells on the CPU backend beside `nn.GRU`, `nn.LSTM` and the plain loop, as one JSON document of ratios.

    python benchmarks/cpu_cells.py [--repeats 15] [--threads 2] [--output results/bench/cpu_cells.json]

88 inputs, H = 400, forward and backward with the gradients of all parameters. The two ways of a row take turns in one
process, so that other programs disturb both alike, and a row gives the median of the ratios; below 1 ours is faster.
Every row is compared with its peer before it is timed. Compiled code is kept in a new folder, so that the first call
of each cell is one that compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
INPUTS, HIDDEN = 88, 400
TOLERANCE = 1e-4
"""between two float32 computations of a hundred steps"""


def main() -> int:
    """Measure every row; print or write the document."""
    parser = argparse.ArgumentParser(description="Cells on the CPU beside their peers.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, help="file to write instead of printing")
    arguments = parser.parse_args()
    os.environ["DEEPRNN_CACHE"] = tempfile.mkdtemp(prefix="deeprnn-bench-")
    import torch

    from deeprnn.bench.measure import surroundings

    torch.set_num_threads(arguments.threads)
    rows = []
    for name, peer in (
        ("gru", "nn.GRU"),
        ("lstm", "nn.LSTM"),
        *((n, "plain loop") for n in cells() if n != "lstm"),
    ):
        for batch in (1, 16, 64):
            rows.append(measure(name, peer, batch, arguments.steps, arguments.repeats))
            print(rows[-1], file=sys.stderr, flush=True)
    report = {
        "commit": commit(),
        **surroundings("cpu"),
        "settings": vars(arguments) | {"output": None},
        "rows": rows,
    }
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)
    return 0


def commit() -> str | None:
    """The code's commit, marked where files differ from it."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def cells() -> dict[str, Any]:
    """Descriptions by name."""
    from tests.backends import cells_by_hand as by_hand

    from deeprnn.cells.deep_transition import DeepTransition

    return {
        "gru": by_hand.gru(HIDDEN),
        "lstm": by_hand.lstm(HIDDEN),
        "dts": DeepTransition((HIDDEN, HIDDEN), ("tanh", "sigmoid"), (False, True)).cell,
        "gru as published": by_hand.gru_as_published(HIDDEN),
        "highway of depth 5": by_hand.highway(HIDDEN, 5),
        "lstm with peepholes": by_hand.lstm(HIDDEN, peepholes=True),
    }


def measure(name: str, peer: str, batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """One row: ours and the peer in turns."""
    ours, theirs, parameters = ways(name, peer, batch, steps)
    import torch

    gradient = torch.randn(steps, batch, HIDDEN)

    def train(way: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        out = way()
        return [out.detach(), *torch.autograd.grad(out, parameters, gradient)]

    first, mine = seconds(lambda: train(ours))
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(mine, train(theirs), strict=True))
    if not error < TOLERANCE:
        raise RuntimeError(f"{name} differs from {peer} by {error:.1e}: nothing is timed")
    for _ in range(6):  # ways of sharing work are tried
        train(ours)
    times = [[seconds(lambda way=way: train(way))[0] for way in (ours, theirs)] for _ in range(repeats)]
    return {
        "cell": name,
        "peer": peer,
        "batch": batch,
        "error": float(f"{error:.1e}"),
        "first_call_s": round(first, 3),
        "ours_us": round(min(t[0] for t in times) / steps * 1e6, 1),
        "peer_us": round(min(t[1] for t in times) / steps * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in times), 3),
    }


def ways(
    name: str, peer: str, batch: int, steps: int
) -> tuple[Callable[[], Any], Callable[[], Any], list[Any]]:
    """Ours and the peer's forward pass with the same parameters, and those."""
    import torch
    from torch import nn

    from deeprnn.backends.protocol import Inputs
    from deeprnn.backends.unrolling import unroll

    torch.manual_seed(0)
    cell, x = cells()[name], torch.randn(steps, batch, INPUTS)
    states = [torch.zeros(batch, n) for n in cell.states]
    place = cell.outputs.index(cell.new_states[0])
    module = {"nn.GRU": nn.GRU, "nn.LSTM": nn.LSTM}.get(peer)
    if module is not None:
        layer = module(INPUTS, HIDDEN)
        U, W, b, c = parameters = list(layer.parameters())
    else:
        U = torch.randn(cell.entry_width, INPUTS) * INPUTS**-0.5
        b = torch.zeros(cell.entry_width)
        matrices = [torch.randn(shape) * 0.5 * shape[1] ** -0.5 for shape in cell.matrices]
        vectors = [torch.rand(n) for n in cell.vectors]
        parameters = [p.requires_grad_() for p in (U, b, *matrices, *vectors)]

    def run(backend: str) -> Any:
        if module is None:
            A = nn.functional.linear(x, U, b)
            return unroll(cell, Inputs(A, states, matrices, vectors, []), backend)[place]
        both = len(b) if name == "lstm" else 2 * HIDDEN  # a GRU's last bias belongs to the product of h
        bias = torch.cat([b[:both] + c[:both], b[both:]])
        own = [] if name == "lstm" else [c[both:]]
        return unroll(cell, Inputs(nn.functional.linear(x, U, bias), states, [W], own, []), backend)[place]

    return (
        lambda: run("cpu"),
        (lambda: layer(x)[0]) if module is not None else (lambda: run("reference")),
        parameters,
    )


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """How long it took, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    raise SystemExit(main())
