"""`deeprnn bench`: the backends beside their peers, each shown to be right before it is timed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deeprnn.console import console
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.bench.measure import Row


@dataclass(frozen=True)
class Bench:
    """Measure one unrolled ⊕, DT(S) with sigmoid units, against other ways to compute it.

    Every peer's outputs and gradients are compared with the reference in float64 first; one that is off is
    named and not timed. Microseconds per time step, medians over rounds in which all peers take turns.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to run (the GPU where there is one)"""
    batch: tuple[int, ...] = ()
    """batch sizes (1 16 64, on a GPU also 256)"""
    hidden: tuple[int, ...] = (400,)
    """units of the state and of the intermediate layers"""
    depth: tuple[int, ...] = (2,)
    """layers of the transition; 1 is the plain RNN"""
    steps: int = 200
    """length of the sequence"""
    repeats: int = 7
    """rounds"""
    peers: tuple[str, ...] = ()
    """only these: ours, "eager loop", nn.RNN, "nn.RNN x2", nn.LSTM, "JAX lax.scan", ..."""
    compile: bool = False
    """also time the step under torch.compile (needs a C++ compiler, takes its time)"""
    first_call: Literal["auto", "yes", "no"] = "auto"
    """time the first call in fresh processes, with and without kernels on disk (on a GPU by default)"""
    json: bool = False
    """one JSON document instead of tables"""

    def run(self) -> int:
        """Measure, then print."""
        import torch

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: no CUDA device is available; use --device cpu")
        if min(1, *self.batch, *self.hidden, *self.depth, self.steps, self.repeats) < 1:
            raise UserError("--batch, --hidden, --depth, --steps and --repeats must be at least 1")
        report = self.measure(device)
        if self.json:
            print(json.dumps(report, indent=2))
        else:
            show(report)
        return 1 if any(row["failed"] and row["peer"] == "ours" for row in report["rows"]) else 0

    def measure(self, device: str) -> dict[str, Any]:
        """Everything the command prints, as plain data."""
        from deeprnn.bench import measure, peers
        from deeprnn.bench.peers import Work

        known = peers.peers_for(device, compiled=True)
        unknown = [name for name in self.peers if name not in known]
        if unknown:
            raise UserError(f"--peers: unknown {unknown[0]!r}; known are {', '.join(known)}")
        names = self.peers or peers.peers_for(device, self.compile)
        rows = []
        batches = self.batch or ((1, 16, 64) if device == "cpu" else (1, 16, 64, 256))
        for hidden in self.hidden:
            for depth in self.depth:
                for batch in batches:
                    work = Work(self.steps, batch, hidden, depth, device=device)
                    print(
                        f"T={self.steps} B={batch} H={hidden} depth {depth} ...", file=sys.stderr, flush=True
                    )
                    rows += with_ratios(measure.measure(work, names, self.repeats))
        settings = {"device": device, "unit": "microseconds per step", "repeats": self.repeats}
        report = {"format": 1, **measure.surroundings(device), "settings": settings, "rows": rows}
        if self.first_call == "yes" or (self.first_call == "auto" and device == "cuda"):
            from deeprnn.bench.first_call import first_calls

            print("first calls in fresh processes ...", file=sys.stderr, flush=True)
            work = Work(self.steps, batches[0], self.hidden[0], self.depth[0], device=device)
            report["first_call"] = first_calls(work)
        return report


def with_ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain data, each with its time as a multiple of ours."""
    ours = next((row for row in rows if row.peer == "ours" and row.failed is None), None)
    return [row.to_dict(ours) for row in rows]


def show(report: dict[str, Any]) -> None:
    """One table per shape."""
    from rich.table import Table

    machine = report["machine"]
    out = console()
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    out.print(f"{where}; torch {report['versions']['torch']}; microseconds per step")
    out.print("train: forward and backward with all gradients, its median and its best; x ours: by train")
    shapes = dict.fromkeys((r["hidden"], r["depth"], r["batch"]) for r in report["rows"])
    for hidden, depth, batch in shapes:
        table = Table(title=f"H={hidden} depth {depth} B={batch}", title_justify="left")
        for name in ("", "forward", "train", "best", "x ours", "peak MB", "first s", "error"):
            table.add_column(name, justify="right" if name else "left", no_wrap=not name)
        for row in report["rows"]:
            if (row["hidden"], row["depth"], row["batch"]) == (hidden, depth, batch):
                table.add_row(*_cells(row))
        out.print(table)
    for row in report["rows"]:
        if row["failed"]:
            out.print(
                f"{row['peer']}, H={row['hidden']} depth {row['depth']} B={row['batch']}: {row['failed']}"
            )
    for note in dict.fromkeys(row["note"] for row in report["rows"] if row["peer"] == "ours" and row["note"]):
        out.print(f"ours: {note}")

    if (first := report.get("first_call")) is not None:
        out.print(_first_call_text(first))


def _first_call_text(first: dict[str, Any]) -> str:
    if "failed" in first:
        return f"first call: {first['failed']}"
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in first.get("parts_s", {}).items())
    return (
        f"first call of a process, H={first['hidden']} B={first['batch']}: {first['cold_s']:.2f} s with kernels "
        f"compiled, {first['cached_s']:.2f} s with kernels on disk; a second call {first['cached_again_s']:.4f} s"
        + (f"\nits parts, s: {parts}" if parts else "")
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if row["failed"]:
        return [row["peer"], *["-"] * 7]
    times = [f"{row[name]:.1f}" for name in ("forward_us", "train_us", "train_us_min")]
    ratio = "" if row["train_ratio"] is None else f"{row['train_ratio']:.2f}"
    peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
    return [row["peer"], *times, ratio, peak, f"{row['first_call_s']:.2f}", f"{row['error']:.0e}"]
