"""The CPU backend beside its peers, and what holds it back, as one JSON document with its tables.

    python benchmarks/cpu_peers.py [--minutes 7] [--only cells single ...] [--output results/bench/cpu.json]
    python benchmarks/cpu_peers.py --tables results/bench/cpu.json        # Markdown, to the terminal

All cores that torch may use, or one: `taskset -c 0 python benchmarks/cpu_peers.py --threads 1`. Close other programs.
Every peer of a row is compared with float64 before it is timed, all take turns, and medians and minima are noted.

    peers    DT(S) 88 -> 400/400, T = 200: the README's table, and the least time of its multiplications
    cells    RNN, DT(S), GRU, LSTM and a user's step beside torch.nn, the eager loop and JAX, over widths and batches
    single   one step, as streams call a layer, and `.step`
    growth   a step against width, batch, length and depth, for benchmarks/plot_cpu.py
    first    the first call of a cell in a new process, with an empty cache and with a full one
    compiled the step by torch.compile (takes long; only if asked for)
    population, words   members of a population; the output layer over 10,000 words
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import cpu_cells  # noqa: E402
import torch  # noqa: E402
from cpu_cells import CELLS, COMPILED, EAGER, OURS, STEP, CpuBench, torch_nn  # noqa: E402
from cpu_extra import population, words  # noqa: E402
from cpu_tables import tables  # noqa: E402

from deeprnn.bench import measure  # noqa: E402
from deeprnn.bench.first_call import first_calls  # noqa: E402
from deeprnn.bench.peers import JAX, Work  # noqa: E402
from deeprnn.commands.bench import Bench  # noqa: E402
from deeprnn.files import write_json  # noqa: E402

WIDTHS, BATCHES = (64, 128, 400, 512, 1024), (1, 16, 64)
GOALS = (64, 400, 1024)
"""widths at which a goal is set: measured first"""
SAMPLE = 0.02
"""seconds that a sample takes at least: short calls are repeated"""


def main() -> int:
    """Measure everything; print or write the document."""
    parser = argparse.ArgumentParser(description="The CPU backend beside its peers.")
    parser.add_argument("--minutes", type=float, default=7.0, help="about how long it may take")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    clock_help = "cpu: the time of this process, for one thread on a machine that others use too"
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=clock_help)
    parser.add_argument("--only", nargs="*", choices=PARTS, help="parts to measure")
    parser.add_argument("--output", type=Path, help="file to write instead of printing")
    parser.add_argument("--tables", type=Path, help="print the tables of a document and measure nothing")
    arguments = parser.parse_args()
    if arguments.tables is not None:
        print(tables(json.loads(arguments.tables.read_text())))
        return 0
    torch.set_num_threads(arguments.threads)
    if arguments.clock == "cpu":
        measure.CLOCK = time.process_time
    parts = arguments.only or [name for name in PARTS if name != "compiled"]
    keep = (lambda report: write_json(arguments.output, report)) if arguments.output else lambda report: None
    report = measured(parts, arguments.minutes * 60, keep)
    report["settings"]["clock"] = arguments.clock
    keep(report)
    if arguments.output is None:
        print(json.dumps(report, indent=1))
    print(tables(report), file=sys.stderr)
    return 0


def measured(
    parts: Iterable[str], seconds: float, keep: Callable[[dict[str, Any]], None] = lambda report: None
) -> dict[str, Any]:
    """The document; `keep` is called with it after every part, so that a run that is cut off has measured something."""
    before, peak = cores_used(), gigaflops()
    settings = {"seconds": seconds, "parts": list(parts), "jax": find_spec("jax") is not None}
    report: dict[str, Any] = {"format": 2, **measure.surroundings("cpu"), "settings": settings}
    report["products"] = {"gigaflops": peak, "note": "1024 x 1024 float32 products by torch, best of the run"}
    whole = sum(SHARES[name] for name in parts)
    for name in parts:
        print(name, file=sys.stderr, flush=True)
        began = time.perf_counter()
        report["rows" if name == "peers" else name] = PARTS[name](seconds * SHARES[name] / whole)
        settings[f"{name}_s"] = round(time.perf_counter() - began, 1)
        keep(report)
    for row in report.get("rows", ()):
        if row["peer"] == "ours":
            row["least_us"] = least(row, peak)
    report["machine"]["cores_used_by_others"] = others(before, cores_used())
    return report


# ---- the parts; each takes about as many seconds as it is given


def readme(seconds: float) -> list[dict[str, Any]]:
    """The README's table."""
    rows = Bench(device="cpu", repeats=max(3, int(seconds / 6))).measure("cpu")["rows"]
    return [row | {"cell": "DT(S)"} for row in rows]


def cells(seconds: float) -> list[dict[str, Any]]:
    """Every cell at every width and batch, those with a goal first; what time is left to decides the repetitions."""
    widths = sorted(WIDTHS, key=lambda H: H not in GOALS)
    works = [(cell, Work(_length(H, B), B, H)) for H in widths for B in BATCHES for cell in CELLS]
    return _measured_in_turn(works, seconds, lambda cell: [OURS, torch_nn(cell), EAGER, *_jax()])


def single(seconds: float) -> list[dict[str, Any]]:
    """One step: x (1, B, I)."""
    works = [(cell, Work(1, B, H)) for H in GOALS for B in BATCHES for cell in CELLS]
    return _measured_in_turn(works, seconds, lambda cell: [OURS, STEP, torch_nn(cell)])


def growth(seconds: float) -> list[dict[str, Any]]:
    """DT(S) against width, batch, length and depth; nn.RNN has as many layers."""
    works = {
        "hidden": [Work(20 if H > 1024 else 50, 1, H) for H in (64, 128, 256, 512, 1024, 1400, 2048, 4096)],
        "batch": [Work(50 if B < 128 else 10, B, 128) for B in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)],
        "steps": [Work(T, 1, 128) for T in (1, 2, 5, 10, 100, 1000, 10_000)],
        "depth": [Work(50, 1, 128, depth) for depth in (1, 2, 3, 5, 7, 10)],
    }
    rows = []
    for along, of_it in works.items():
        found = _measured_in_turn([("DT(S)", work) for work in of_it], seconds / 4,
                                  lambda cell: [OURS, cpu_cells.TWO_LAYERS, EAGER])  # fmt: skip
        rows += [row | {"along": along} for row in found]
    return rows


def compiled(seconds: float) -> list[dict[str, Any]]:
    """The step by torch.compile."""
    works = [(cell, Work(50, B, 400)) for cell in CELLS for B in BATCHES]
    return _measured_in_turn(works, seconds, lambda cell: [OURS, COMPILED])


def first(seconds: float) -> list[dict[str, Any]]:
    """First calls in new processes."""
    return [first_calls(Work(50, 1, 400), parts=False)]


PARTS: dict[str, Callable[[float], Any]] = {
    "peers": readme, "cells": cells, "single": single, "growth": growth, "first": first,
    "population": population, "words": words, "compiled": compiled,
}  # fmt: skip
SHARES = {
    "peers": 8,
    "cells": 50,
    "single": 8,
    "growth": 14,
    "first": 3,
    "population": 2,
    "words": 2,
    "compiled": 40,
}
"""of the time"""


def _jax() -> list[str]:
    return [JAX] if find_spec("jax") is not None else []


def _length(hidden: int, batch: int) -> int:
    """Steps: fewer where they take long, so that all of a table fits the time."""
    return 200 if hidden < 400 else 100 if hidden * batch < 10_000 else 30


def _measured_in_turn(
    works: list[tuple[str, Work]], seconds: float, peers: Callable[[str], list[str]]
) -> list[dict[str, Any]]:
    """Rows of all pieces of work: each has its share of the time that is left, and three repetitions at least."""
    rows, end = [], time.perf_counter() + seconds
    for i, (cell, work) in enumerate(works):
        bench, names = CpuBench(cell, work, sample=SAMPLE), peers(cell)
        repeats = _repeats(cell, work, len(names), (end - time.perf_counter()) / (len(works) - i))
        found = measure.measure(work, names, repeats, make=lambda w, s, b=bench: b)
        rows += [{"cell": cell, **row.to_dict(found[0]), "calls": bench.calls.get(row.peer)} for row in found]
        told = ", ".join(f"{r.peer} {r.failed or f'{r.forward_us}/{r.train_us}'}" for r in found)
        print(f"{cell} H={work.hidden} B={work.batch} T={work.steps}: {told}", file=sys.stderr, flush=True)
    return rows


def _repeats(cell: str, work: Work, peers: int, seconds: float) -> int:
    """Rounds that fit the time, half of which goes to the first calls and the comparison with float64."""
    gates = {"GRU": 3, "LSTM": 4, "DT(S)": 2 * work.depth - 1}.get(cell, 1)
    products = 2 * 3 * gates * work.steps * work.batch * work.hidden * (work.hidden + work.inputs)
    a_round = peers * 2 * max(SAMPLE, products / 3e10)
    return max(3, min(9, int(seconds / 2 / a_round)))


# ---- the machine


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
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    return round(2 * size**3 / min(times) / 1e9, 1)


def least(row: dict[str, Any], peak: float) -> float:
    """Microseconds a step of forward and backward cannot beat at the peak: three times the forward's products.

    The input's own gradient is not asked for, so its products count twice.
    """
    n, H, inputs = row["depth"], row["hidden"], row["inputs"]
    recurrent = (2 * n - 1) * H * H
    products = row["batch"] * (3 * recurrent + 2 * n * H * inputs)
    return round(2 * products / peak / 1e3, 1)


if __name__ == "__main__":
    raise SystemExit(main())
