"""What a call costs the host and what the card, beside `nn.RNN`, `nn.GRU` and `nn.LSTM`: python gpu_host.py OUT

Each row is compared with float64 before it is timed. Microseconds a call, medians:

- host_*: the host's clock around a call that nothing waits for; the queue is empty before each.
- python_*: a call in a row of calls without a graph, by the card's events: the larger of both costs.
- graph_*: the card's own time, calls captured in a CUDA graph.

"ours, torch's products" leaves products of few rows to torch, so that its calls are not recorded launches. Rows go
to OUT/host.jsonl as soon as they are known, the most wanted first; none begins after --seconds. Kernels are compiled
before, by all cores. `--dry` goes through all of it on the CPU, with launches that do nothing.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import io
import itertools
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
TOLERANCE = {"ours": 2e-5, "torch": 5e-5}  # cuDNN approximates tanh
OURS, TORCHS_PRODUCTS, TORCH = "ours", "ours, torch's products", "torch.nn"
CALLS = 15  # timed of each kind


@dataclass(frozen=True)
class Shape:
    """What is computed; `dts` is DT(S) with one intermediate layer as wide as the state."""

    kind: str
    hidden: int
    batch: int
    steps: int
    inputs: int = 128


def shapes() -> Iterator[Shape]:
    """The most wanted first."""
    for batch in (1, 16, 64):
        yield Shape("dts", 400, batch, 200, 88)
    for steps, kind in itertools.product((128, 200), ("rnn", "gru", "lstm")):
        for hidden, batch in itertools.product((64, 128, 256, 400), (1, 16, 64)):
            yield Shape(kind, hidden, batch, steps)


def layer_of(shape: Shape, peer: str) -> Any:
    """A layer on the CPU."""
    import torch

    import deeprnn

    torch.manual_seed(0)
    sizes = shape.inputs, shape.hidden
    if shape.kind == "dts":
        return deeprnn.DeepRNN(*sizes, nonlinearity="sigmoid", intermediate_sizes=shape.hidden, shortcut="last",
                               input_to="all")  # fmt: skip
    if peer == TORCH:
        return {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[shape.kind](*sizes)
    return {"rnn": deeprnn.DeepRNN, "gru": deeprnn.GRU, "lstm": deeprnn.LSTM}[shape.kind](*sizes)


def peers_of(shape: Shape) -> list[str]:
    """Who computes a shape."""
    own = [OURS, TORCHS_PRODUCTS] if shape.steps * shape.batch < 2048 else [OURS]
    return own if shape.kind == "dts" else [*own, TORCH]


def use_own_products(own: bool) -> None:
    """Whether products of 128 to 2,048 rows are taken on the tensor cores."""
    from deeprnn.backends import direct
    from deeprnn.backends.cuda import linear

    linear.FEWEST_ROWS = 128 if own else 2048
    linear.on_tensor_cores.cache_clear()
    direct._calls.clear()


# ---- kernels first


def compile_shape(shape: Shape) -> str:
    """Every kernel of a shape into the cache on disk, in a process of its own; why not, where that fails."""
    import torch
    from rehearsal import rehearsal

    torch.set_num_threads(1)
    try:
        with rehearsal(compile=True):
            for peer in peers_of(shape):
                if peer == TORCH:
                    continue
                use_own_products(peer != TORCHS_PRODUCTS)
                layer, x = layer_of(shape, peer), torch.randn(shape.steps, shape.batch, shape.inputs)
                layer(x)[0].sum().backward()
                with torch.no_grad():
                    layer(x)
    except Exception as error:  # noqa: BLE001 - the row that needs this kernel will say so too
        return f"{shape}: {type(error).__name__}: {str(error)[-500:]}"
    return ""


def compile_all(seconds: float) -> dict[str, Any]:
    """By all cores; workers are forked before anything touches the card."""
    started, failures = time.perf_counter(), []
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"))
    try:
        for failure in pool.map(compile_shape, shapes(), timeout=seconds):
            failures += [failure] if failure else []
    except TimeoutError:
        failures.append(f"not all compiled in {seconds:.0f} s")
    pool.shutdown(wait=False, cancel_futures=True)
    return {"compile_s": round(time.perf_counter() - started, 1), "failures": failures[:10]}


# ---- one row


class Calls:
    """One layer on one input: a forward call without gradients, and one with its backward pass."""

    def __init__(self, shape: Shape, peer: str, device: str):
        import torch

        self.layer = layer_of(shape, peer).to(device)
        self.parameters = list(self.layer.parameters())
        generator = torch.Generator().manual_seed(1)
        sizes = shape.steps, shape.batch
        self.x = torch.randn(*sizes, shape.inputs, generator=generator).to(device)
        self.g = torch.randn(*sizes, shape.hidden, generator=generator).to(device)

    def forward(self) -> Any:
        import torch

        with torch.no_grad():
            return self.layer(self.x)[0]

    def train(self) -> Any:
        y = self.layer(self.x)[0]
        y.backward(self.g)
        return y.detach()

    def gradients(self) -> list[Any]:
        """As `train`, outputs first; for a capture, which must not touch `.grad`."""
        import torch

        y = self.layer(self.x)[0]
        return [y.detach(), *torch.autograd.grad(y, self.parameters, self.g)]

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def truth_of(shape: Shape, device: str) -> list[Any]:
    """Outputs and gradients in float64: by torch's own layer, or by the plain loop where it has none."""
    calls = Calls(shape, TORCH, device)
    calls.layer, calls.x, calls.g = copy.deepcopy(calls.layer).double(), calls.x.double(), calls.g.double()
    if shape.kind == "dts":
        calls.layer.backend = "reference"
    calls.parameters = list(calls.layer.parameters())
    return calls.gradients()


def error_of(calls: Calls, truth: list[Any]) -> float:
    """The largest relative error of outputs and gradients."""
    found = calls.gradients()
    pairs = zip(found, truth, strict=True)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


class Clock:
    """The card's clock, or in a dry run the host's in its place."""

    def __init__(self, dry: bool):
        self.dry = dry

    def synchronize(self) -> None:
        import torch

        if not self.dry:
            torch.cuda.synchronize()

    def host(self, call: Callable[[], Any], after: Callable[[], None]) -> float:
        """µs of the host's for one call, with nothing in the queue before it."""
        times = []
        for _ in range(CALLS):
            after()
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        self.synchronize()
        return round(1e6 * statistics.median(times), 1)

    def device(self, call: Callable[[], Any], after: Callable[[], None], calls: int = 5) -> float:
        """µs by events for one of several calls in a row."""
        import torch

        times = []
        for _ in range(5):
            after()
            self.synchronize()
            if self.dry:
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                times.append(1e6 * (time.perf_counter() - start) / calls)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / calls)
        return round(statistics.median(times), 1)

    def graph(self, call: Callable[[], Any]) -> Callable[[], None]:
        """The call, captured."""
        import torch

        if self.dry:
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def measure(shape: Shape, peer: str, truth: list[Any], device: str, clock: Clock) -> dict[str, Any]:
    """A row: verified, then timed."""
    use_own_products(peer != TORCHS_PRODUCTS)
    calls, row = Calls(shape, peer, device), {"peer": peer, **asdict(shape)}
    error = error_of(calls, truth)
    if clock.dry:  # kernels that compute nothing
        row["error"] = None
    elif error <= TOLERANCE["torch" if peer == TORCH else "ours"]:  # a NaN is refused too
        row["error"] = error
    else:
        return {**row, "failed": f"off by {error:.1e}: not timed"}
    for name, call in (("forward", calls.forward), ("train", calls.train)):
        for _ in range(3):
            call()
            calls.clear()
        row[f"host_{name}_us"] = clock.host(call, calls.clear)
        row[f"python_{name}_us"] = clock.device(call, calls.clear)
    calls.clear()
    for name, captured in (("forward", calls.forward), ("train", calls.gradients)):
        row[f"graph_{name}_us"] = clock.device(clock.graph(captured), calls.clear)
    return row


def profile(shape: Shape, device: str, clock: Clock, count: int = 100) -> dict[str, Any]:
    """The thirty functions that take most of the host's time; backward passes run in this thread for it."""
    import torch

    calls, text = Calls(shape, OURS, device), io.StringIO()
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for i in range(count + 3):
            calls.clear()
            clock.synchronize()
            profiler.enable() if i >= 3 else None
            calls.train()
            profiler.disable()
    statistics_of = pstats.Stats(profiler, stream=text)
    statistics_of.sort_stats("tottime").print_stats(30)
    made: int = statistics_of.total_calls  # type: ignore[attr-defined]
    return {"profile": asdict(shape), "calls": count, "python_calls": made, "text": text.getvalue()}


def rows(device: str, clock: Clock, deadline: float, wanted: list[Shape]) -> Iterator[dict[str, Any]]:
    """Everything in turn until the deadline."""
    for i, shape in enumerate(wanted):
        if time.perf_counter() > deadline:
            yield {"stopped": f"{len(wanted) - i} of {len(wanted)} shapes not begun"}
            return
        truth = truth_of(shape, device)
        for peer in peers_of(shape):
            try:
                yield measure(shape, peer, truth, device, clock)
            except Exception as error:  # noqa: BLE001 - the other rows are wanted all the same
                text = f"{type(error).__name__}: {str(error)[-300:]}"
                yield {"peer": peer, **asdict(shape), "failed": text}
        use_own_products(True)
        if i in (0, 3, 4):
            yield profile(shape, device, clock, 10 if clock.dry else 100)


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=55.0, help="no row begins after these")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with launches that do nothing")
    given = parser.parse_args()
    deadline = time.perf_counter() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)

    def put(row: dict[str, Any]) -> None:
        with open(given.out / "host.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        short = {k: v for k, v in row.items() if k != "text"}
        print(json.dumps(short), flush=True)

    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 beside fp32
    if not given.dry:
        put(compile_all(given.seconds / 2))
    from deeprnn.bench.measure import surroundings

    device, wanted = "cpu" if given.dry else "cuda", list(shapes())
    if given.dry:
        import torch
        from rehearsal import rehearsal

        torch.set_num_threads(1)
        inside: Any = rehearsal()
        wanted = [Shape(s.kind, s.hidden, s.batch, 4, s.inputs) for s in (wanted[0], *wanted[3:40:12])]
        wanted.append(Shape("rnn", 64, 16, 128))
    else:
        inside = nullcontext()
    put({"about": surroundings(device)})
    with inside:
        for row in rows(device, Clock(given.dry), deadline, wanted):
            put(row)


if __name__ == "__main__":
    main()
