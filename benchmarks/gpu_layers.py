"""Layers on a GPU beside PyTorch's own at every size people use, like with like: python benchmarks/gpu_layers.py OUT

Every peer of a shape (`shapes.py`) is compared with float64 before it is timed; TF32 is off, except for the peer that
is named so. µs a call, medians:

- host_*: the host's clock around a call that nothing waits for; the queue is empty before each.
- python_*: a call in a row of calls without a graph, by the card's events: the larger of both costs. JAX: one call of
  the jitted function and the wait for its result, by the host's clock; it cannot be captured.
- graph_*: the card's own time, calls captured in a CUDA graph.

Rows go to OUT/layers.jsonl as soon as they are known, groups in the order given; none begins after --seconds.
Kernels are compiled before, by all cores. torch.compile and JAX come last, each in a process of its own that is ended
after --slow-seconds. `--known FILE...` leaves out what files have already: the next run goes on where one was cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.clock import Clock  # noqa: E402
from benchmarks.records import Row, append, read  # noqa: E402
from benchmarks.shapes import (  # noqa: E402
    COMPILED,
    FAIR,
    GPU_GROUPS,
    JAX,
    LOOP,
    OURS,
    TF32,
    TORCH,
    Shape,
    gpu_peers,
)

from deeprnn.bench.measure import CALLS_BEFORE_CHECK  # noqa: E402

TOLERANCE = {
    OURS: 2e-5,
    LOOP: 2e-5,
    COMPILED: 2e-5,
    JAX: 2e-5,
    TORCH: 5e-5,
    TF32: 2e-2,
}  # cuDNN approximates tanh
SLOW = (COMPILED, JAX)
"""peers that compile for seconds at every shape"""
GRACE = 20.0
"""seconds a slow peer's process may take beyond its time to finish the row it is at"""


# ---- one row


def measure(shape: Shape, peer: str, truth: list[Any], device: str, clock: Clock) -> Row:
    """A row: verified, then timed."""
    from benchmarks.cell_peers import calls_of, checked, error_of, kernels_of

    row: Row = {"peer": peer, **asdict(shape), "verified_steps": checked(shape).steps}
    if peer == OURS:
        row["kernels"] = kernels_of(shape, _card(device))
    compared = calls_of(checked(shape), peer, device)
    if peer == OURS:  # launches are recorded when a shape is met again: what is timed is compared
        for _ in range(CALLS_BEFORE_CHECK):
            compared.forward()
            compared.gradients()
        error = error_of([compared.forward(), *compared.gradients()], [truth[0], *truth])
    else:
        error = error_of(compared.gradients(), truth)
    if not clock.dry and not error <= TOLERANCE[peer]:  # a NaN is refused too
        return {**row, "failed": f"off by {error:.1e}: not timed"}
    row["error"] = None if clock.dry else error
    calls = calls_of(shape, peer, device)
    if peer != LOOP or shape in FAIR:
        for name, call in (("forward", calls.forward), ("train", calls.train)):
            for _ in range(3):
                call()
                calls.clear()
            host = clock.host(call, calls.clear)
            row |= {f"python_{name}_us": host} if peer == JAX else {f"host_{name}_us": host}
            if peer != JAX:
                row[f"python_{name}_us"] = clock.device(call, calls.clear)
    calls.clear()
    if peer == JAX:
        return row
    for name, captured in (("forward", calls.forward), ("train", calls.gradients)):
        row[f"graph_{name}_us"] = clock.device(clock.graph(captured), calls.clear)
    return {**row, **peak_memory(calls, clock)}


def _card(device: str) -> Any:
    from deeprnn.backends.cuda.device import device_of

    return device_of(0) if device == "cuda" else None


def peak_memory(calls: Any, clock: Clock) -> Row:
    """MB that a training call takes beyond inputs and parameters."""
    import torch

    if clock.dry:
        return {}
    calls.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    calls.train()
    torch.cuda.synchronize()
    return {"peak_mb": round((torch.cuda.max_memory_allocated() - before) / 1e6, 2)}


def rows(device: str, clock: Clock, deadline: float, wanted: dict[Shape, list[str]]) -> Iterator[Row]:
    """Everything in turn until the deadline."""
    from benchmarks.cell_peers import another_function, checked, truth_of

    for i, (shape, peers) in enumerate(wanted.items()):
        if time.perf_counter() > deadline:
            yield {"stopped": f"{len(wanted) - i} of {len(wanted)} shapes not begun"}
            return
        truths: dict[bool, list[Any]] = {}
        for peer in peers:
            other = another_function(shape, peer)
            try:
                if other not in truths:
                    truths[other] = truth_of(checked(shape), peer, device)
                yield measure(shape, peer, truths[other], device, clock)
            except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                text = f"{type(error).__name__}: {str(error)[-300:]}"
                yield {"peer": peer, **asdict(shape), "failed": text}
        truths.clear()
        if device == "cuda":
            import torch

            torch.cuda.empty_cache()


# ---- compiled before


def compile_kernels(shape: Shape) -> str:
    """Every kernel of ours for a shape into the cache on disk, without a GPU; why not, where that fails."""
    import torch
    from benchmarks.cell_peers import Calls, checked
    from benchmarks.rehearsal import rehearsal

    torch.set_num_threads(1)
    try:
        with rehearsal(compile=True):
            for steps in dict.fromkeys((min(shape.steps, 512), checked(shape).steps)):
                calls = Calls(replace(shape, steps=steps), OURS, "cpu")
                calls.train()
                calls.forward()
    except Exception as error:  # noqa: BLE001 - the row that needs this kernel will say so too
        return f"{shape}: {type(error).__name__}: {str(error)[-500:]}"
    return ""


def compile_slowly(peer: str, device: str, shape: Shape) -> str:
    """What torch.compile or JAX makes of a shape into their caches on disk; why not, where that fails."""
    from benchmarks.cell_peers import calls_of

    try:
        calls = calls_of(
            replace(shape, steps=min(shape.steps, 8)) if peer == COMPILED else shape, peer, device
        )
        calls.forward()
        calls.train()
    except Exception as error:  # noqa: BLE001 - the row that needs it will say so too
        return f"{shape}: {type(error).__name__}: {str(error)[-500:]}"
    return ""


def by_all_cores(
    work: Callable[[Shape], str], shapes: Iterable[Shape], seconds: float, most: int = 64
) -> Row:
    """In processes that are forked before anything here touches the card, and ended when the time is over."""
    started, failures = time.perf_counter(), []
    pool = ProcessPoolExecutor(min(os.cpu_count() or 1, most), mp_context=get_context("fork"))
    try:
        for failure in pool.map(work, shapes, timeout=seconds):
            failures += [failure] if failure else []
    except TimeoutError:
        failures.append(f"not all compiled in {seconds:.0f} s")
        for process in active_children():
            process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    return {"compile_s": round(time.perf_counter() - started, 1), "failures": failures[:10]}


# ---- what is wanted


def complete(row: Row) -> bool:
    """Whether a row has all that would be measured today."""
    if row.get("failed"):
        return False
    asked = "python_train_us" if row["peer"] == JAX else "graph_train_us"
    return asked in row and (row["peer"] != LOOP or Shape.of(row) not in FAIR or "python_train_us" in row)


def still_wanted(
    groups: Iterable[str], peers: Iterable[str], known: Iterable[Path]
) -> dict[Shape, list[str]]:
    """Shapes of these groups, each with the peers that no file has."""
    have = {key for path in known for key, row in read(path).layers.items() if complete(row)}
    shapes = dict.fromkeys(shape for name in groups for shape in GPU_GROUPS[name]())
    found = {s: [p for p in gpu_peers(s) if p in peers and (s, p) not in have] for s in shapes}
    return {shape: missing for shape, missing in found.items() if missing}


def add_kernels(path: Path) -> None:
    """Which kernels served, into a file from before rows said so: right where the planner is the measured commit's."""
    from benchmarks.cell_peers import kernels_of
    from benchmarks.records import lines

    from deeprnn.errors import UserError
    from deeprnn.files import write_atomically

    found, planner = [], ["src/deeprnn/backends/cuda/recurrence/*.py", "src/deeprnn/backends/cuda/device.py"]
    for row in lines(path):
        if "about" in row:
            commit = str(row["about"]["commit"])
            changed = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", *planner, "src/deeprnn/cells"]
            if subprocess.run(changed, capture_output=True).returncode:
                raise UserError(
                    f"{path}: the planner is not that of {commit}: try in a checkout of that commit"
                )
        if row.get("peer") == OURS and "kernels" not in row:
            row["kernels"] = kernels_of(Shape.of(row))
        found.append(row)
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in found))


def main() -> None:
    """Compile, measure; then the slow peers, each in a process of its own."""
    given = arguments()
    if given.add_kernels:
        add_kernels(given.add_kernels)
        return
    deadline = time.perf_counter() + given.seconds
    quick = [peer for peer in given.peers if peer not in SLOW]
    slow = [peer for peer in given.peers if peer in SLOW]
    if JAX in slow and find_spec("jax") is None:
        print("JAX is not installed: its rows are left out (pip install 'jax[cuda13]')", file=sys.stderr)
        slow.remove(JAX)
    if quick:
        wanted = still_wanted(given.groups, quick, given.known)
        ahead = [shape for shape, peers in wanted.items() if OURS in peers]
        put(given.out, by_all_cores(compile_kernels, ahead, given.seconds / 3))
        run(given.out, wanted, deadline)
    elif len(slow) == 1:
        wanted = still_wanted(given.groups, slow, given.known)
        use_caches(given.out)
        work = partial(compile_slowly, slow[0], "cuda")
        put(given.out, by_all_cores(work, wanted, 0.6 * given.seconds, most=12))
        run(given.out, wanted, deadline)
        return
    for peer in slow:
        in_own_process(given, peer)


def in_own_process(given: argparse.Namespace, peer: str) -> None:
    """A slow peer, ended where it does not end itself."""
    command = [
        sys.executable,
        __file__,
        str(given.out),
        "--peers",
        peer,
        "--seconds",
        str(given.slow_seconds),
    ]
    command += ["--groups", *given.groups, *(["--known", *map(str, given.known)] if given.known else [])]
    try:
        code = subprocess.run(command, timeout=given.slow_seconds + GRACE).returncode
        ended = "" if code == 0 else f"{peer}: exit status {code}"
    except subprocess.TimeoutExpired:
        ended = f"{peer}: ended after {given.slow_seconds + GRACE:.0f} s"
    if ended:
        put(given.out, {"stopped": ended})


def use_caches(out: Path) -> None:
    """Where compilers keep what processes before this one have made."""
    folder = Path(tempfile.gettempdir()) / f"compiled-{out.resolve().name}"
    settings = {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})


def run(out: Path, wanted: dict[Shape, list[str]], deadline: float) -> None:
    """Measure on the card and keep every row."""
    import torch

    from deeprnn.bench.measure import surroundings

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 beside fp32
    put(out, {"about": surroundings("cuda")})
    for row in rows("cuda", Clock(False), deadline, wanted):
        put(out, row)


def put(out: Path, row: Row) -> None:
    append(out / "layers.jsonl", row)
    print(json.dumps(row), flush=True)


def arguments() -> argparse.Namespace:
    everyone = [OURS, TORCH, TF32, LOOP, COMPILED, JAX]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="folder for layers.jsonl")
    parser.add_argument("--groups", nargs="+", choices=GPU_GROUPS, default=list(GPU_GROUPS))
    parser.add_argument("--peers", nargs="+", choices=everyone, default=everyone)
    parser.add_argument(
        "--known", nargs="+", type=Path, default=[], help="files or folders whose rows are left out"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no row begins after these")
    parser.add_argument("--slow-seconds", type=float, default=120.0, help="for torch.compile, and for JAX")
    parser.add_argument(
        "--add-kernels", type=Path, metavar="FILE", help="say in an older file which kernels served"
    )
    given = parser.parse_args()
    if given.out is None and given.add_kernels is None:
        parser.error("where shall the results go? python benchmarks/gpu_layers.py OUT")
    return given


if __name__ == "__main__":
    main()
