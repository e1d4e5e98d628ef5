"""Layers beside PyTorch's own at every size people use, like with like: python benchmarks/gpu_layers.py OUT

For each shape: ours, `torch.nn`'s layer of the same weights, and the eager loop (inputs by `unbind`), each compared
with float64 before it is timed, TF32 off. `graph_*` are captured in a CUDA graph, `python_*` called from Python,
`host_*` is what a call costs the host; µs a call (`gpu_host.py`). torch.nn has no DT(S) and no highway; beside them
stands `nn.RNN` with as many layers as the transition has, another function of about the same cost.

Groups (`--groups`, in the order given): gates, wide, batches, resets, fair, growth. Rows go to OUT/layers.jsonl as
soon as they are known; none begins after --seconds. Kernels are compiled before, by all cores.
`--table layers.jsonl` prints what a file holds, as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import gpu_host  # noqa: E402
from gpu_host import Calls, Clock  # noqa: E402

OURS, TORCH, LOOP = "ours", "torch.nn", "eager loop"
LONGEST_LOOP = 200  # steps of an eager loop that is captured: a node of a graph each operation
LARGEST_TRUTH = (
    3e11  # multiplications of a float64 loop worth waiting for; larger ones are compared over fewer steps
)


@dataclass(frozen=True)
class Shape(gpu_host.Shape):
    """`depth`: of a transition (`dts`) or highway (`rhn`); `reset`: the share of steps where sequences begin anew."""

    depth: int = 1
    reset: float = 0.0


def gates() -> Iterator[Shape]:
    """Gated cells, highways and a user's own step."""
    for hidden, batch, kind in itertools.product((512, 128), (1, 16, 64, 256), ("gru", "lstm")):
        yield Shape(kind, hidden, batch, 128)
    for batch in (1, 16, 64, 256):
        yield Shape("rhn", 400, batch, 128, depth=5)
        yield Shape("paced", 512, batch, 128)
    yield Shape("rhn", 830, 20, 35, depth=10)


def wide() -> Iterator[Shape]:
    """Weights of up to fifty megabytes."""
    for batch in (1, 16, 64, 256):
        yield Shape("dts", 1024, batch, 100, depth=2)
    for hidden_kind, batch in itertools.product((("dts", 2), ("rnn", 1)), (1, 16, 64)):
        yield Shape(hidden_kind[0], 2048, batch, 100, depth=hidden_kind[1])
    for kind, batch in itertools.product(("gru", "lstm"), (1, 16, 64, 256)):
        yield Shape(kind, 1024, batch, 100)


def batches() -> Iterator[Shape]:
    """Large batches, as in reinforcement learning."""
    for batch, hidden, kind in itertools.product((1024, 4096), (512, 256, 128), ("rnn", "gru", "lstm")):
        yield Shape(kind, hidden, batch, 64)
    yield Shape("dts", 512, 1024, 64, depth=2)


def resets() -> Iterator[Shape]:
    """Sequences that begin anew at 3 % of all steps, and the same without."""
    for kind, batch, share in itertools.product(("gru", "lstm"), (64, 1024), (0.0, 0.03)):
        yield Shape(kind, 256, batch, 128, reset=share)


def fair() -> Iterator[Shape]:
    """The table: every kind at four widths."""
    for batch in (1, 16, 64, 256):
        yield Shape("dts", 400, batch, 200, 88, depth=2)
    for hidden, batch, kind in itertools.product((400, 128, 512, 1024), (1, 16, 64), ("rnn", "gru", "lstm")):
        yield Shape(kind, hidden, batch, 128)


def growth() -> Iterator[Shape]:
    """Against width, batch, length and depth."""
    for hidden in (64, 256, 512, 1024, 1536, 2048, 3072, 4096):
        yield Shape("rnn", hidden, 16, 64)
    for batch in (1, 4, 16, 64, 256, 1024, 4096):
        yield Shape("gru", 256, batch, 64)
    for steps in (10, 100, 1000, 10_000, 100_000):
        yield Shape("rnn", 256, 1, steps)
    for depth in (1, 2, 3, 5, 7, 10):
        yield Shape("dts", 256, 16, 64, depth=depth)


GROUPS = {g.__name__: g for g in (gates, wide, batches, resets, fair, growth)}


def layer_of(shape: Shape, peer: str) -> Any:
    """A layer on the CPU; ours and the loop have the same weights, so has torch's where it is the same function."""
    import torch

    import deeprnn
    from deeprnn.bench.cells import Paced

    torch.manual_seed(0)
    sizes, how = (shape.inputs, shape.hidden), "reference" if peer == LOOP else "auto"
    if peer == TORCH:
        if shape.kind in ("dts", "rhn"):
            return torch.nn.RNN(*sizes, num_layers=shape.depth)
        return {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[shape.kind](*sizes)
    if shape.kind == "dts":
        return deeprnn.DeepRNN(*sizes, nonlinearity="sigmoid", intermediate_sizes=[shape.hidden] * (shape.depth - 1),
                               shortcut="last" if shape.depth > 1 else "none", input_to="all", backend=how)  # fmt: skip
    if shape.kind == "rhn":
        return deeprnn.RHN(*sizes, depth=shape.depth, backend=how)
    if shape.kind == "paced":
        return deeprnn.Recurrent(Paced(*sizes), backend=how)
    return {"rnn": deeprnn.DeepRNN, "gru": deeprnn.GRU, "lstm": deeprnn.LSTM}[shape.kind](*sizes, backend=how)


def peers_of(shape: Shape) -> list[str]:
    """Who computes a shape, or something of its cost."""
    loop = [LOOP] if shape.steps <= LONGEST_LOOP and not shape.reset else []
    return [OURS, *([] if shape.kind == "paced" or shape.reset else [TORCH]), *loop]


class LayerCalls(Calls):
    """One layer on one input, with marks where sequences begin anew."""

    def __init__(self, shape: Shape, peer: str, device: str) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        sizes = shape.steps, shape.batch
        layer = layer_of(shape, peer).to(device)
        self.x = torch.randn(*sizes, shape.inputs, generator=generator).to(device)
        self.g = torch.randn(*sizes, shape.hidden, generator=generator).to(device)
        marks = torch.rand(*sizes, generator=generator).lt(shape.reset).to(device) if shape.reset else None
        self.parameters, self.inner, self.marks = list(layer.parameters()), layer, marks
        self.layer = layer if marks is None else (lambda x: self.inner(x, reset=self.marks))

    def in_double(self) -> None:
        self.inner = self.inner.double()
        self.layer = self.inner if self.marks is None else self.layer
        self.x, self.g = self.x.double(), self.g.double()
        self.parameters = list(self.inner.parameters())


def truth_of(shape: Shape, peer: str, device: str) -> list[Any]:
    """Outputs and gradients in float64: torch's own layer, or the eager loop."""
    twin = peer == TORCH or (TORCH in peers_of(shape) and shape.kind in ("rnn", "gru", "lstm"))
    calls = LayerCalls(shape, TORCH if twin else LOOP, device)
    calls.in_double()
    return calls.gradients()


def checked(shape: Shape) -> Shape:
    """The shape at which a layer is compared: over fewer steps where float64 would take long."""
    depth = {"gru": 3, "lstm": 4, "dts": 2 * shape.depth - 1, "rhn": 2 * shape.depth}.get(shape.kind, 1)
    cost = shape.batch * shape.hidden * (shape.hidden * depth + shape.inputs)
    return Shape(**{**asdict(shape), "steps": max(4, min(shape.steps, 1000, int(LARGEST_TRUTH / cost)))})


def measure(shape: Shape, peer: str, truth: list[Any], device: str, clock: Clock) -> dict[str, Any]:
    """A row: verified, then timed."""
    row = {"peer": peer, **asdict(shape), "verified_steps": checked(shape).steps}
    error = gpu_host.error_of(LayerCalls(checked(shape), peer, device), truth)
    allowed = gpu_host.TOLERANCE["torch" if peer == TORCH else "ours"]
    if not clock.dry and not error <= allowed:  # a NaN is refused too
        return {**row, "failed": f"off by {error:.1e}: not timed"}
    row["error"] = None if clock.dry else error
    calls = LayerCalls(shape, peer, device)
    if peer != LOOP:
        for name, call in (("forward", calls.forward), ("train", calls.train)):
            for _ in range(3):
                call()
                calls.clear()
            row[f"host_{name}_us"] = clock.host(call, calls.clear)
            row[f"python_{name}_us"] = clock.device(call, calls.clear)
    calls.clear()
    for name, captured in (("forward", calls.forward), ("train", calls.gradients)):
        row[f"graph_{name}_us"] = clock.device(clock.graph(captured), calls.clear)
    return {**row, **peak_memory(calls, clock)}


def peak_memory(calls: Calls, clock: Clock) -> dict[str, Any]:
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


# ---- kernels first


def compile_shape(shape: Shape) -> str:
    """Every kernel of a shape into the cache on disk; why not, where that fails."""
    import torch
    from rehearsal import rehearsal

    torch.set_num_threads(1)
    try:
        with rehearsal(compile=True):
            for steps in dict.fromkeys((min(shape.steps, 512), checked(shape).steps)):
                calls = LayerCalls(Shape(**{**asdict(shape), "steps": steps}), OURS, "cpu")
                calls.train()
                calls.forward()
    except Exception as error:  # noqa: BLE001 - the row that needs this kernel will say so too
        return f"{shape}: {type(error).__name__}: {str(error)[-500:]}"
    return ""


def compile_all(shapes: list[Shape], seconds: float) -> dict[str, Any]:
    """By all cores; workers are forked before anything touches the card."""
    started, failures = time.perf_counter(), []
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"))
    try:
        for failure in pool.map(compile_shape, shapes, timeout=seconds):
            failures += [failure] if failure else []
    except TimeoutError:
        failures.append(f"not all compiled in {seconds:.0f} s")
    pool.shutdown(wait=False, cancel_futures=True)
    return {"compile_s": round(time.perf_counter() - started, 1), "failures": failures[:10]}


def rows(device: str, clock: Clock, deadline: float, shapes: list[Shape]) -> Iterator[dict[str, Any]]:
    """Everything in turn until the deadline."""
    for i, shape in enumerate(shapes):
        if time.perf_counter() > deadline:
            yield {"stopped": f"{len(shapes) - i} of {len(shapes)} shapes not begun"}
            return
        truth: dict[bool, list[Any]] = {}
        for peer in peers_of(shape):
            other = peer == TORCH and shape.kind in ("dts", "rhn")
            try:
                if other not in truth:
                    truth[other] = truth_of(checked(shape), peer if other else OURS, device)
                yield measure(shape, peer, truth[other], device, clock)
            except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                text = f"{type(error).__name__}: {str(error)[-300:]}"
                yield {"peer": peer, **asdict(shape), "failed": text}
        truth.clear()
        if device == "cuda":
            import torch

            torch.cuda.empty_cache()


# ---- what a file holds


def table(path: Path) -> str:
    """Markdown: a line for each shape; µs a step, training."""
    found: dict[Shape, dict[str, dict[str, Any]]] = {}
    names = list(Shape.__dataclass_fields__)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "peer" in row:
            found.setdefault(Shape(**{n: row[n] for n in names}), {})[row["peer"]] = row
    lines = [
        "| | T | B | ours, graph | torch.nn, graph | eager loop, graph | ours, Python | torch.nn, Python |"
    ]
    lines.append("|---" * 8 + "|")
    for shape, peers in found.items():
        label = f"{shape.kind} {shape.hidden}" + (f", depth {shape.depth}" if shape.depth > 1 else "")
        label += f", marks {shape.reset:.0%}" if shape.reset else ""
        asked = ((OURS, "graph"), (TORCH, "graph"), (LOOP, "graph"), (OURS, "python"), (TORCH, "python"))
        times = [peers.get(peer, {}).get(f"{how}_train_us") for peer, how in asked]
        texts = ["-" if t is None else f"{t / shape.steps:.3g}" for t in times]
        lines.append(f"| {label} | {shape.steps} | {shape.batch} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=300.0, help="no row begins after these")
    parser.add_argument("--table", type=Path, help="print what this file holds and do nothing else")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return
    if given.out is None:
        parser.error("where shall the results go? python benchmarks/gpu_layers.py OUT")
    deadline = time.perf_counter() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    shapes = list(dict.fromkeys(shape for name in given.groups for shape in GROUPS[name]()))

    def put(row: dict[str, Any]) -> None:
        with open(given.out / "layers.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 beside fp32
    put(compile_all(shapes, given.seconds / 3))
    from deeprnn.bench.measure import surroundings

    put({"about": surroundings("cuda")})
    for row in rows("cuda", Clock(False), deadline, shapes):
        put(row)
    print(table(given.out / "layers.jsonl"))


if __name__ == "__main__":
    main()
