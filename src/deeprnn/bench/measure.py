"""Peers side by side: each is shown to compute the right thing before it is timed, and all in turn.

The work is one ⊕ over a sequence: DT(S) of a given depth (depth 1 is the plain RNN), input to every layer,
sigmoid units, from x (T, B, I) to all states, and back to every weight. `peers.py` holds what is
measured, `measure` gives one row per peer. Rounds are interleaved, so that a busy moment of the machine
meets every peer alike; medians and minima are both reported.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deeprnn.bench.peers import Bench, Peer, Work, backward
from deeprnn.runs.provenance import commit
from deeprnn.training.threads import cores

CLOCK: Callable[[], float] = time.perf_counter
"""`time.process_time` in its place tells one thread's work from waiting, on a machine that others use too"""
CALLS_BEFORE_CHECK = 2
"""with gradients and without: by then a layer goes the way that is timed"""
TOLERANCE = 1e-5
SETTLE = 0.03
"""seconds of calls before a sample on a CPU, not counted: threads of the peer before spin for a while"""
LIBRARY_TOLERANCE = 5e-5  # cuDNN's persistent kernels approximate tanh; TF32 would be off by 3e-4


@dataclass
class Row:
    """What one peer did on one piece of work; no times where its equality check failed."""

    peer: str
    work: Work
    error: float | None = None
    failed: str | None = None
    first_call_s: float | None = None
    forward_us: float | None = None  # per step, median
    forward_us_min: float | None = None
    train_us: float | None = None  # forward and backward, per step, median
    train_us_min: float | None = None
    host_us: float | None = (
        None  # of the host's for `train`, per step, median; None on the CPU, where all of it is
    )
    peak_mb: float | None = None
    note: str = ""
    times: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "train": [], "host": []})

    def to_dict(self, ours: Row | None) -> dict[str, Any]:
        """Plain data, with how many times slower than ours this peer is."""
        data = {k: v for k, v in asdict(self).items() if k not in ("work", "times")}
        data.update({k: v for k, v in asdict(self.work).items() if k != "device"})
        for kind in ("forward", "train"):
            our_time = None if ours is None else getattr(ours, f"{kind}_us")
            time_ = getattr(self, f"{kind}_us")
            data[f"{kind}_ratio"] = round(time_ / our_time, 3) if time_ and our_time else None
        return data


def relative(out: Tensor, truth: Tensor) -> float:
    """‖out - truth‖ / ‖truth‖."""
    return float((out.detach().double().cpu() - truth).norm() / truth.norm())


def check(peer: Peer, g: Tensor) -> tuple[float, str | None]:
    """The largest relative error of outputs and gradients, and the reason to refuse the peer, if any."""
    alone: Tensor | None = None
    if peer.results is None:
        # Later calls of a shape may go another way than the first, and calls without gradients another still.
        forward = without_gradients(peer.run)
        for _ in range(CALLS_BEFORE_CHECK):
            backward(peer.run(), peer.parameters, g)
            forward()
        alone = forward()
        h = peer.run()
        gradients: Sequence[Tensor] = backward(h, peer.parameters, g)
    else:
        h, gradients = peer.results()
    truth, slopes = peer.truth()
    errors = {"outputs": relative(h, truth)}
    if alone is not None:
        errors["outputs without gradients"] = relative(alone, truth)
    for i, (got, want) in enumerate(zip(gradients, slopes, strict=True)):
        errors[f"gradient {i}"] = relative(got, want)
    worst = max(errors, key=lambda name: errors[name])
    allowed = LIBRARY_TOLERANCE if peer.name.startswith("nn.") else TOLERANCE
    if not errors[worst] <= allowed:  # a NaN is refused too
        return errors[worst], f"{worst} off by {errors[worst]:.1e} (allowed {allowed:.0e}): not timed"
    return errors[worst], None


def measure(
    work: Work,
    names: Sequence[str],
    repeats: int = 7,
    seed: int = 0,
    make: Callable[[Work, int], Any] = Bench,
) -> list[Row]:
    """Check every peer, then time all of them in turn; `make` gives what holds the peers of a piece of work."""
    bench = make(work, seed)
    rows, running = [], []
    for name in names:
        row = Row(name, work)
        rows.append(row)
        try:
            prepared = _prepare(row, bench)
        except (RuntimeError, ImportError) as error:  # what a library cannot do here is a result, not the end
            row.failed = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            continue
        if prepared is not None:
            running.append(prepared)
    for _ in range(repeats):
        for row, peer, forward, train in running:
            if work.device == "cpu":
                settle(forward)
            row.times["forward"].append(seconds_of(forward, work.device, peer))
            row.times["train"].append(seconds_of(train, work.device, peer))
            if work.device != "cpu" and not peer.by_host:
                row.times["host"].append(host_seconds_of(train))
    for row, *_ in running:
        host = row.times.pop("host")
        row.host_us = round(statistics.median(host) / work.steps * 1e6, 3) if host else None
        for kind, times in row.times.items():
            per_step = [t / work.steps * 1e6 for t in times]
            setattr(row, f"{kind}_us", round(statistics.median(per_step), 3))
            setattr(row, f"{kind}_us_min", round(min(per_step), 3))
    return rows


def _prepare(row: Row, bench: Any) -> tuple[Row, Peer, Callable[[], Any], Callable[[], Any]] | None:
    """Make a peer, call it once, check it and note its memory; what is to be timed, None if it is wrong."""
    device = row.work.device
    peer = bench.peer(row.peer)
    row.note = peer.note

    def called() -> Any:
        return backward(peer.run(), peer.parameters, bench.g)

    train = peer.train or called
    row.first_call_s = round(seconds_of(train, device, peer, once=True), 4)
    row.error, row.failed = check(peer, bench.g)
    if row.failed is not None:
        return None
    if not peer.by_host:
        row.peak_mb = peak_memory(train if device == "cpu" else called, device)
    forward = peer.forward or without_gradients(peer.run)
    forward()
    return row, peer, forward, train


def settle(work: Callable[[], Any]) -> None:
    """Call it until other peers' threads sleep and its own are awake."""
    began = time.perf_counter()
    while time.perf_counter() - began < SETTLE:
        work()


def without_gradients(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward


def seconds_of(work: Callable[[], Any], device: str, peer: Peer | None = None, once: bool = False) -> float:
    """Wall time on the CPU and of a first call, device events on CUDA."""
    calls = 1 if peer is None or once else peer.calls
    if device != "cpu":
        torch.cuda.synchronize()
    if device == "cpu" or once or (peer is not None and peer.by_host):
        start = CLOCK()
        for _ in range(calls):
            work()
        if device != "cpu":
            torch.cuda.synchronize()
        return (CLOCK() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_seconds_of(work: Callable[[], Any]) -> float:
    """What a call on a GPU costs the host: nothing is in the queue before it, and nothing waits for what it queues."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken


def peak_memory(work: Callable[[], Any], device: str) -> float | None:
    """MB a call takes beyond what was there before; None where the system does not tell."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 2)
    with _fresh_high_water_mark() as high_water:
        if high_water is None:
            return None
        before = high_water("VmRSS")
        work()
        return round(max(0, high_water("VmHWM") - before) / 1e3, 2)


@contextmanager
def _fresh_high_water_mark() -> Iterator[Callable[[str], int] | None]:
    """On Linux, reset this process's largest resident size; yields a reader of its status in kB.

    Memory that was freed but kept is given back first: a call that only reuses it would seem to need none.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        yield None
        return

    def read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    yield read


def surroundings(device: str) -> dict[str, Any]:
    """The code's commit, versions and machine, without names of hosts or paths."""
    packages = ("deeprnn", "torch", "numpy", "llvmlite", "jax")
    versions = {name: _version(name) for name in packages}
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
    }
    if device != "cpu":
        machine["gpu"] = torch.cuda.get_device_name()
        machine["cuda"] = torch.version.cuda
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **versions},
        "machine": machine,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
