"""`deeprnn bench`: the backends beside their peers, each shown to be right before it is timed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from deeprnn.console import console, show_rows
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.bench.measure import Row


MOST = {"--depth": 64, "--repeats": 10_000}
"""beyond these a measurement would not end"""


@dataclass(frozen=True)
class Bench:
    """Measure one unrolled ⊕, DT(S) with sigmoid units, against other ways to compute it; or gated cells.

    Every peer's outputs and gradients are compared with the reference in float64 first; one that is off is
    named and not timed. Microseconds per time step, medians over rounds in which all peers take turns.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to run (the GPU where there is one)"""
    cells: bool = False
    """GRU, LSTM, a normalised LSTM, a highway and a user's step, beside nn.GRU, nn.LSTM and the loop written out"""
    batch: tuple[int, ...] = ()
    """batch sizes (1 16 64, on a GPU also 256)"""
    hidden: tuple[int, ...] = ()
    """units of the state and of the intermediate layers (400; cells on a GPU: 512 and 128)"""
    depth: tuple[int, ...] = ()
    """layers of the transition (2; 1 is the plain RNN), or of the highway (5)"""
    steps: int | None = None
    """length of the sequence (200; cells: 128)"""
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
        bench = self.with_defaults(device)
        bench.check(device)
        report = bench.measure_cells(device) if self.cells else bench.measure(device)
        if self.json:
            print(json.dumps(report, indent=2))
        else:
            (show_cells if self.cells else show)(report)
        return 1 if any(row["failed"] and row["peer"] == "ours" for row in report["rows"]) else 0

    def with_defaults(self, device: str) -> Bench:
        """The command with defaults for the sizes that were left out."""
        usual = (512, 128) if self.cells and device == "cuda" else (400,)
        return replace(
            self,
            batch=self.batch or ((1, 16, 64) if device == "cpu" else (1, 16, 64, 256)),
            hidden=self.hidden or usual,
            depth=self.depth or ((5,) if self.cells else (2,)),
            steps=(128 if self.cells else 200) if self.steps is None else self.steps,
        )

    def check(self, device: str) -> None:
        """Refuse sizes that cannot be, or that no memory holds."""
        import torch

        from deeprnn.training.memory import at_hand

        steps = self.steps or 0
        sizes = {"--batch": self.batch, "--hidden": self.hidden, "--depth": self.depth,
                 "--steps": (steps,), "--repeats": (self.repeats,)}  # fmt: skip
        for name, values in sizes.items():
            if not all(1 <= value <= MOST.get(name, 2**62) for value in values):
                most = f" and at most {MOST[name]:,}" if name in MOST else ""
                raise UserError(f"{name} must be at least 1{most}, got {', '.join(map(str, values))}")
        deepest, widest = max(self.depth), max(self.hidden)
        states = steps * max((1, *self.batch)) * widest * deepest
        free, needed = at_hand(torch.device(device)), 8 * (states + 2 * deepest * widest**2)
        if free is not None and needed > free:
            raise UserError(
                f"the largest of these shapes would take at least {needed / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free: choose smaller ones"
            )

    def measure(self, device: str) -> dict[str, Any]:
        """Everything the command prints, as plain data."""
        self = self.with_defaults(device)
        from deeprnn.bench import measure, peers
        from deeprnn.bench.peers import Work

        known = peers.peers_for(device, compiled=True)
        unknown = [name for name in self.peers if name not in known]
        if unknown:
            raise UserError(f"--peers: unknown {unknown[0]!r}; known are {', '.join(known)}")
        names = self.peers or peers.peers_for(device, self.compile)
        rows = []
        steps, sizes, depths = self.steps or 1, self.hidden, self.depth
        for hidden in sizes:
            for depth in depths:
                for batch in self.batch:
                    work = Work(steps, batch, hidden, depth, device=device)
                    print(f"T={steps} B={batch} H={hidden} depth {depth} ...", file=sys.stderr, flush=True)
                    rows += with_ratios(measure.measure(work, names, self.repeats))
        settings = {"device": device, "unit": "microseconds per step", "repeats": self.repeats}
        report = {"format": 1, **measure.surroundings(device), "settings": settings, "rows": rows}
        if self.first_call == "yes" or (self.first_call == "auto" and device == "cuda"):
            from deeprnn.bench.first_call import first_calls

            print("first calls in fresh processes ...", file=sys.stderr, flush=True)
            work = Work(steps, self.batch[0], sizes[0], depths[0], device=device)
            report["first_call"] = first_calls(work)
        return report

    def measure_cells(self, device: str) -> dict[str, Any]:
        """Cells beside their peers, as plain data."""
        self = self.with_defaults(device)
        from deeprnn.bench import cells, measure
        from deeprnn.bench.peers import Work

        unknown = [name for name in self.peers if name not in cells.NAMES]
        if unknown:
            raise UserError(f"--peers: unknown {unknown[0]!r}; known are {', '.join(cells.NAMES)}")
        rows = []
        for hidden in self.hidden:
            for batch in self.batch:
                work = Work(self.steps or 1, batch, hidden, self.depth[0], 128, device)
                print(f"T={work.steps} B={batch} H={hidden} ...", file=sys.stderr, flush=True)
                measured = measure.measure(
                    work, self.peers or cells.NAMES, self.repeats, make=cells.CellBench
                )
                rows += [row.to_dict(None) for row in measured]
        settings = {"device": device, "unit": "microseconds per step", "repeats": self.repeats}
        return {"format": 1, **measure.surroundings(device), "settings": settings, "rows": rows}


def show_cells(report: dict[str, Any]) -> None:
    """One table per size of the state: forward and backward, a column for each batch."""
    from rich.table import Table

    from deeprnn.bench.cells import PEERS

    out, rows = console(), {(r["hidden"], r["batch"], r["peer"]): r for r in report["rows"]}
    machine = report["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    graphs = ", all as CUDA graphs" if machine.get("gpu") else ""
    out.print(
        f"{where}; torch {report['versions']['torch']}; microseconds per step, forward and backward{graphs}"
    )
    depth, steps, inputs = (report["rows"][0][n] for n in ("depth", "steps", "inputs"))
    for hidden in dict.fromkeys(r["hidden"] for r in report["rows"]):
        batches = list(dict.fromkeys(r["batch"] for r in report["rows"]))
        title = f"H={hidden}, T={steps}, I={inputs}; the highway has depth {depth}"
        table = Table("", *(f"B={b}" for b in batches), title=title, title_justify="left")
        for name in dict.fromkeys(r["peer"] for r in report["rows"]):
            ours = next((cell for cell, peer in PEERS.items() if peer == name), None)
            table.add_row(name, *(_against(rows, hidden, b, name, ours) for b in batches))
        out.print(table)
    for row in report["rows"]:
        if row["failed"]:
            out.print(f"{row['peer']}, H={row['hidden']} B={row['batch']}: {row['failed']}")


def _against(rows: dict[Any, dict[str, Any]], hidden: int, batch: int, name: str, ours: str | None) -> str:
    """A time, and for a peer how many times ours it is."""
    time = rows[hidden, batch, name]["train_us"]
    if time is None:
        return "-"
    our_time = rows.get((hidden, batch, ours), {}).get("train_us")
    return f"{time:.1f}" + (f" ({time / our_time:.1f}x)" if our_time else "")


def with_ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain data, each with its time as a multiple of ours, like with like: a graph's of a graph's."""
    from deeprnn.bench.peers import in_graph

    timed = {row.peer: row for row in rows if row.failed is None}
    called = timed.get("ours, called", timed.get("ours"))
    return [row.to_dict(timed.get("ours") if in_graph(row.peer) else called) for row in rows]


def show(report: dict[str, Any]) -> None:
    """One table per shape."""
    machine = report["machine"]
    out = console()
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    out.print(f"{where}; torch {report['versions']['torch']}; microseconds per step")
    out.print("train: forward and backward with all gradients, its median and its best; x ours: by train")
    if machine.get("gpu"):
        out.print(
            "x ours: of what runs in a CUDA graph beside ours there, of what is called beside ours, called"
        )
        out.print("host: what train costs the host, by its own clock; the other times are the GPU's")
    else:
        out.print("host: not applicable on a CPU, where the host computes")
    shapes = dict.fromkeys((r["hidden"], r["depth"], r["batch"]) for r in report["rows"])
    for hidden, depth, batch in shapes:
        out.print(f"\nH={hidden} depth {depth} B={batch}", style="bold")
        of_shape = [
            r for r in report["rows"] if (r["hidden"], r["depth"], r["batch"]) == (hidden, depth, batch)
        ]
        names = ("peer", "forward", "train", "best", "host", "x ours", "peak MB", "first s", "error")
        show_rows(
            names, [_cells(row) for row in of_shape], right=names[1:], spare=("first s", "peak MB", "best")
        )
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
        return [row["peer"], *["-"] * 8]
    times = [f"{row[name]:.1f}" for name in ("forward_us", "train_us", "train_us_min")]
    ratio = "" if row["train_ratio"] is None else f"{row['train_ratio']:.2f}"
    peak = "" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}"
    host = "n/a" if row["host_us"] is None else f"{row['host_us']:.1f}"
    return [row["peer"], *times, host, ratio, peak, f"{row['first_call_s']:.2f}", f"{row['error']:.0e}"]
