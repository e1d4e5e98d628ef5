"""Layers on a CPU beside PyTorch's own, the eager loop and JAX: python benchmarks/cpu_layers.py FILE --minutes 7

Rows go to FILE as soon as they are known. Called again with the same file it goes on where it stopped, so a
measurement may be made in pieces; what the file has of this commit and machine is not measured twice. Every peer of a
shape is compared with float64 before it is timed, then all take turns; medians and minima are kept, µs a call.

    goals     RNN, DT(S), GRU, LSTM and a user's step beside torch.nn, the eager loop and JAX, where a goal is set
    single    one step, as streams call a layer, and `.step`
    growth    DT(S) against width, batch, length and depth, with the memory of a training call
    cells     as goals, over all widths and batches
    compiled  the step by torch.compile (takes long and a C++ compiler; only if asked for)

All cores that torch may use, or one: `taskset -c 0 python benchmarks/cpu_layers.py FILE --threads 1`. Close other
programs: each row says how many cores they kept busy. JAX's rows are left out where it is not installed
(`pip install jax`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from benchmarks.cell_peers import (  # noqa: E402
    LONGEST_TRUTH,
    Calls,
    JaxCalls,
    another_function,
    calls_of,
    truth_of,
)
from benchmarks.records import Row, append, read  # noqa: E402
from benchmarks.shapes import CPU_GROUPS, JAX, LOOP, OURS, Shape  # noqa: E402

from deeprnn.bench import measure  # noqa: E402
from deeprnn.bench.peers import Peer, Results, Work, backward  # noqa: E402

SAMPLE = 0.02
"""seconds that a sample takes at least: short calls are repeated"""
CALLS_BEFORE_CHECK = 2
ROUNDS, SECONDS_OF_ROUNDS = (3, 9), 6.0
LONGEST_LOOP = 10_000
"""steps of an eager loop; beyond, its graph of one node an operation fills the memory"""


class CpuBench:
    """One shape: data, and weights that all peers share; `make` for `deeprnn.bench.measure`."""

    def __init__(self, shape: Shape, sample: float = SAMPLE):
        self.shape, self.sample = shape, sample
        self.calls: dict[str, int] = {}
        self.g = Calls(shape, OURS, "cpu").g
        self.compared = replace(shape, steps=min(shape.steps, LONGEST_TRUTH))

    @lru_cache(maxsize=2)  # noqa: B019  # one for each object, which lives as long as its row
    def truth(self, another: bool, peer: str) -> Results:
        """Outputs and gradients in float64."""
        h, *slopes = truth_of(self.compared, peer, "cpu")
        return h, slopes

    def peer(self, name: str) -> Peer:
        """The peer of that name; a short call is repeated in each sample."""
        peer = self._peer(name)
        if name == OURS:  # ways of sharing work are tried in the first calls
            for _ in range(6):
                backward(peer.run(), peer.parameters, self.g)
        peer.calls = self.calls[name] = self._repetitions(peer)
        return peer

    def _peer(self, name: str) -> Peer:
        calls, short = calls_of(self.shape, name, "cpu"), calls_of(self.compared, name, "cpu")
        another = another_function(self.shape, name)

        def truth() -> Results:
            h, slopes = self.truth(another, name if another else OURS)
            return torch.stack([h, h]), slopes

        def results() -> Results:
            """Of what is timed: later calls of a shape may go another way than the first, and so without gradients."""
            for _ in range(CALLS_BEFORE_CHECK):
                short.forward()
                short.gradients()
            h, *slopes = short.gradients()
            return torch.stack([h, torch.from_numpy(np.asarray(short.forward()).copy())]), slopes

        if isinstance(calls, JaxCalls):
            return Peer(
                name,
                lambda: short.gradients()[0],
                [],
                truth,
                calls.forward,
                calls.train,
                results,
                by_host=True,
            )
        return Peer(name, calls.run, calls.parameters, truth, results=results)

    def _repetitions(self, peer: Peer) -> int:
        run = peer.train or (lambda: backward(peer.run(), peer.parameters, self.g))
        run()
        began = time.perf_counter()
        run()
        return max(1, min(200, int(self.sample / (time.perf_counter() - began))))


def rows(shape: Shape, peers: list[str], sample: float = SAMPLE) -> Iterator[Row]:
    """One shape by all of these, in turns."""
    before, bench = cores_used(), CpuBench(shape, sample)
    work = Work(shape.steps, shape.batch, shape.hidden, shape.depth, shape.inputs)
    found = measure.measure(work, peers, rounds(shape, len(peers)), make=lambda work, seed: bench)
    busy = others(before, cores_used())
    for row in found:
        same: Row = {
            "peer": row.peer,
            **asdict(shape),
            "verified_steps": bench.compared.steps,
            "error": row.error,
        }
        if row.failed:
            yield {**same, "failed": row.failed}
            continue
        for kind in ("forward", "train"):
            for suffix in ("", "_min"):
                same[f"python_{kind}_us{suffix}"] = round(getattr(row, f"{kind}_us{suffix}") * shape.steps, 2)
        rest = {"peak_mb": row.peak_mb, "calls": bench.calls.get(row.peer)}
        yield {**same, **rest, "cores_used_by_others": busy}


def rounds(shape: Shape, peers: int) -> int:
    """Rounds that fit the time of a shape."""
    products = {"gru": 3, "lstm": 4, "dts": 2 * shape.depth - 1}.get(shape.kind, 1)
    weights = products * shape.hidden * (shape.hidden + shape.inputs)
    a_round = peers * 2 * max(SAMPLE, 6 * shape.steps * shape.batch * weights / 3e10)
    return max(ROUNDS[0], min(ROUNDS[1], int(SECONDS_OF_ROUNDS / a_round)))


def peers_of(shape: Shape, wanted: Iterable[str]) -> list[str]:
    """Those of a group's peers that can compute a shape here."""
    return [
        peer for peer in wanted
        if not (peer == LOOP and shape.steps > LONGEST_LOOP) and not (peer == JAX and find_spec("jax") is None)
    ]  # fmt: skip


def still_wanted(path: Path, groups: Iterable[str], here: Row) -> list[tuple[Shape, list[str]]]:
    """Shapes and peers of these groups that the file has not from this commit, machine and number of threads."""
    layers = read(path).layers.items()
    have = {key for key, row in layers if row["about"] == here and not row.get("failed")}
    found = []
    for name in groups:
        shapes, peers = CPU_GROUPS[name]
        for shape in shapes():
            missing = [peer for peer in peers_of(shape, peers) if (shape, peer) not in have]
            have |= {(shape, peer) for peer in missing}  # a shape of two groups is measured in the first
            if missing:  # ours too: peers of a row are measured in turns with it
                found.append((shape, missing if OURS in missing or OURS not in peers else [OURS, *missing]))
    return found


def main() -> int:
    """Measure what is missing until the time is over."""
    given = arguments()
    torch.set_num_threads(given.threads)
    deadline = time.perf_counter() + 60 * given.minutes
    here = measure.surroundings("cpu")
    wanted = still_wanted(given.file, given.only, here)
    if wanted:
        append(given.file, {"about": here})
    for i, (shape, peers) in enumerate(wanted):
        if time.perf_counter() > deadline:
            print(f"{len(wanted) - i} of {len(wanted)} shapes not begun: call it again", file=sys.stderr)
            return 0
        for row in rows(shape, peers):
            append(given.file, row)
            told = (
                row.get("failed")
                or f"{row['python_train_us'] / shape.steps:.3f} µs a step, forward and backward"
            )
            print(f"{shape.label} B={shape.batch} T={shape.steps}, {row['peer']}: {told}", flush=True)
    print("all of it is measured", file=sys.stderr)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Layers on a CPU beside their peers.")
    parser.add_argument("file", type=Path, help="JSON lines; rows are added to it")
    parser.add_argument("--minutes", type=float, default=7.0, help="no shape begins after these")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    usual = [name for name in CPU_GROUPS if name != "compiled"]
    parser.add_argument("--only", nargs="+", choices=CPU_GROUPS, default=usual, help="groups to measure")
    if find_spec("jax") is None:
        print("JAX is not installed: its rows are left out (pip install jax)", file=sys.stderr)
    return parser.parse_args()


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


if __name__ == "__main__":
    raise SystemExit(main())
