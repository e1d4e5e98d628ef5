"""The stages of `gpu_measure.py`: each yields (section, row), the most telling rows first.

They also run on the CPU (`--device cpu --tiny`), where nothing is captured and every number is small: that
is how the script is tried before it costs time on a GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from deeprnn.backends import plain, unroll  # noqa: E402
from deeprnn.backends.cuda.device import device_of  # noqa: E402
from deeprnn.backends.cuda.recurrence.planning import make_plan  # noqa: E402
from deeprnn.backends.cuda.recurrence.schedule import schedule  # noqa: E402
from deeprnn.backends.protocol import Inputs  # noqa: E402
from deeprnn.bench import measure  # noqa: E402
from deeprnn.bench.measure import relative  # noqa: E402
from deeprnn.bench.peers import GRAPH, JAX, LIBRARY, Captured, Peer, Work  # noqa: E402
from deeprnn.cells.description import CellDescription  # noqa: E402

Rows = Iterator[tuple[str, dict[str, Any]]]
BATCHES = (1, 16, 64, 256)
STEPS = 200
PEERS = ("ours", "ours, called", "CUDA graph", *LIBRARY, "eager loop")
COMPILED = ("torch.compile", "torch.compile" + GRAPH)
FEW_STEPS, MANY_ROWS = (
    8,
    1024,
)  # checked against float64; weight gradients over many rows are computed otherwise


@dataclass(frozen=True)
class Point:
    """One point of the curves: DT(S) with shortcuts to all upper layers, every layer of one width."""

    hidden: int = 400
    depth: int = 2
    steps: int = STEPS
    batch: int = 1
    members: int = 1
    precision: str = "fp32"

    @property
    def cell(self) -> CellDescription:
        """What is unrolled."""
        return Work(self.steps, self.batch, self.hidden, self.depth).cell


def points(tiny: bool = False) -> list[Point]:
    """All curves, fp32 first; a point that lies on two curves is measured once."""
    if tiny:
        found = [Point(8, steps=6), Point(8, 3, 6, 2), Point(8, steps=6, members=2), Point(9, 1, 12, 3)]
        return [*found, Point(8, steps=6, precision="bf16")]
    widths, batches = (64, 100, 200, 300, 400, 512, 600, 700, 800, 1000), [2**i for i in range(10)]
    found = [Point(batch=b) for b in batches]
    found += [Point(members=p) for p in (1, 2, 5, 8, 10, 15, 30)]
    found += [Point(h) for h in widths]
    found += [Point(steps=t) for t in (25, 50, 100, 200, 400, 800, 1600)]
    found += [Point(h, d) for h in (400, 300) for d in (1, 2, 3, 4)]
    found += [Point(h, batch=16) for h in widths]
    found += [Point(batch=b, precision="bf16") for b in batches]
    found += [Point(h, precision="bf16") for h in widths]
    found += [Point(steps=t, batch=16) for t in (25, 50, 100, 200, 400, 800, 1600)]
    found += [Point(h, d, batch=16) for h in (400, 300) for d in (1, 2, 3, 4)]
    found += [Point(h, batch=16, precision="bf16") for h in widths]
    return list(dict.fromkeys(found))


# ---- peers


def peers(device: str, tiny: bool, hidden: tuple[int, ...], names: tuple[str, ...]) -> Rows:
    """Everything that is timed at one shape takes turns; a row per peer."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for H in (9,) if tiny else hidden:
        for batch in (1, 3) if tiny else BATCHES:
            work = Work(5 if tiny else STEPS, batch, H, device=device)
            rows = [row.to_dict(None) for row in measure.measure(work, names, 2 if tiny else 5)]
            called = {r["peer"]: r["train_us"] for r in rows}.get("ours, called")
            for row in rows:
                row |= {"called_us": called} if row["peer"] == "ours" and called else {}
                yield "rows", {k: v for k, v in row.items() if v is not None}


# ---- curves


def draw(point: Point, device: str, steps: int) -> tuple[list[Tensor], Tensor]:
    """A, the first state and the matrices as leaves, with a member dimension for a population; a gradient."""
    cell, lead = point.cell, (point.members,) if point.members > 1 else ()
    leaves = [torch.randn(*lead, steps, point.batch, cell.entry_width, device=device)]
    leaves += [torch.randn(*lead, point.batch, point.hidden, device=device)]
    leaves += [torch.randn(*lead, *shape, device=device) * 0.7 / shape[1] ** 0.5 for shape in cell.matrices]
    gradient = torch.randn(*lead, steps, point.batch, point.hidden, device=device)
    return [x.requires_grad_() for x in leaves], gradient


def inputs_of(leaves: list[Tensor]) -> Inputs:
    """What `draw` drew, as a backend takes it."""
    return Inputs(leaves[0], [leaves[1]], leaves[2:], [], [])


def our_peer(point: Point, device: str, leaves: list[Tensor]) -> Peer:
    """The operator itself, with the gradients of everything."""
    precision = point.precision if device == "cuda" else "fp32"

    def run() -> Tensor:
        return unroll(point.cell, inputs_of(leaves), precision=precision)[-1]

    return Peer("ours", run, leaves, truth=lambda: (leaves[0], []))


def error_of(point: Point, device: str) -> float:
    """The largest relative error of states and gradients over a few steps, first and last member."""
    many = point.steps * point.batch >= MANY_ROWS
    leaves, g = draw(point, device, max(FEW_STEPS, -(-MANY_ROWS // point.batch)) if many else FEW_STEPS)
    peer = our_peer(point, device, leaves)
    h = peer.run()
    gradients = torch.autograd.grad(h, leaves, g)
    worst = 0.0
    for p in {0, point.members - 1} if point.members > 1 else (None,):
        own = [(x if p is None else x[p]).detach().double().requires_grad_() for x in leaves]
        truth = plain.forward(point.cell, inputs_of(own))[-1]
        slopes = torch.autograd.grad(truth, own, (g if p is None else g[p]).double())
        pairs = zip((h, *gradients), (truth, *slopes), strict=True)
        for got, want in pairs:
            error = relative(got if p is None else got[p], want.detach().cpu())
            worst = max(worst, error) if error == error else float("inf")
    return worst


def describe(point: Point, device: str) -> dict[str, Any]:
    """Which kernel serves a point, in both directions."""
    if device != "cuda":
        return {"path": device}
    row, paths = {}, []
    for name, backward in (("forward", False), ("backward", True)):
        shape = point.batch, point.members, point.precision == "bf16"
        plan = make_plan(schedule(point.cell, backward), *shape, device_of(0))
        paths.append("stepwise" if plan is None else Path(plan.source).stem)
        row[f"{name}_plan"] = "" if plan is None else plan.describe()
    return {"path": "+".join(dict.fromkeys(paths)), **row}


def median_us(call, device: str, seconds: float = 0.06) -> float:
    """Median microseconds of a call; several calls a sample where they are short."""
    call()
    once = measure.seconds_of(call, device)
    peer = Peer("", call, [], lambda: (torch.empty(0), []), calls=max(1, min(5, int(2e-3 / max(once, 1e-6)))))
    repeats = max(3, min(9, int(seconds / max(once * peer.calls, 1e-6))))
    return statistics.median(measure.seconds_of(call, device, peer) for _ in range(repeats)) * 1e6


def curve_row(point: Point, device: str) -> dict[str, Any]:
    """Check a point, then time it as a CUDA graph."""
    row: dict[str, Any] = {**dataclasses.asdict(point), **describe(point, device)}
    row["error"] = error_of(point, device)
    limit = 1e-2 if point.precision == "bf16" else 1e-5
    if not row["error"] <= limit:
        return {**row, "failed": f"off by {row['error']:.1e}, allowed {limit:.0e}"}
    leaves, g = draw(point, device, point.steps)
    peer = our_peer(point, device, leaves)
    if device == "cuda":
        graphs = Captured(peer, g)
        forward, train = graphs.forward, graphs.train
    else:
        forward, train = measure.without_gradients(peer.run), lambda: peer_train(peer, g)
    row["forward_us"] = round(median_us(forward, device) / point.steps, 4)
    row["train_us"] = round(median_us(train, device) / point.steps, 4)
    return row


def peer_train(peer: Peer, g: Tensor) -> Any:
    """Forward and backward, called."""
    return torch.autograd.grad(peer.run(), peer.parameters, g)


def curves(device: str, tiny: bool) -> Rows:
    """Ours alone, against batch, members, width, length and depth."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for point in points(tiny):
        try:
            yield "curves", curve_row(point, device)
        except RuntimeError as error:
            yield "curves", {**dataclasses.asdict(point), "failed": str(error)[:300]}


# ---- an epoch


def epochs(device: str, tiny: bool) -> Rows:
    """Nottingham, the paper's full update, one seed and fifteen: setting up, then epoch by epoch."""
    from deeprnn.data import load as load_data
    from deeprnn.training.loop import Trainer
    from deeprnn.training.recipe import load_recipe, override

    recipe = load_recipe("paper/nottingham/dts")
    data: Any = load_data(recipe.data.name)
    if tiny:
        data = dataclasses.replace(data, splits={name: part[:2] for name, part in data.splits.items()})
    for seeds, count in ((1, 6), (15, 5)) if not tiny else ((1, 2), (2, 2)):
        changes = {"pretrain.recipe": "", "seeds": list(range(1, seeds + 1)), "stop.epochs": 1000}
        started = time.perf_counter()
        trainer = Trainer(override(recipe, changes), data, device=device)
        setup = time.perf_counter() - started
        for number in range(1, count + 1):
            times = [time.perf_counter()]
            trainer.train_epoch()
            _wait(device)
            times.append(time.perf_counter())
            rows = trainer.end_epoch()
            _wait(device)
            times.append(time.perf_counter())
            frames = sum(len(song) for song in data.splits["train"])
            row = {"seeds": seeds, "epoch": number, "updates": trainer.length, "frames": frames}
            row |= {"updates_s": round(times[1] - times[0], 4), "validation_s": round(times[2] - times[1], 4)}
            row |= {"valid": [round(r["valid"], 4) for r in rows if r is not None][:3]}
            yield "epochs", row | ({"setup_s": round(setup, 4)} if number == 1 else {})


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- first calls


def first(device: str, tiny: bool) -> Rows:
    """The first call of a process, kernels compiled and on disk."""
    from deeprnn.bench.first_call import first_calls

    yield "first_call", first_calls(Work(5 if tiny else STEPS, 1, 9 if tiny else 400, device=device))


def jax_peer(device: str, tiny: bool, hidden: tuple[int, ...]) -> Rows:
    """JAX apart: it compiles for ten seconds and more at each shape."""
    return peers(device, tiny, hidden, (JAX,))
