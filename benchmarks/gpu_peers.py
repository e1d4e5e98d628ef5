"""Ours beside its peers on a GPU: `python benchmarks/gpu_peers.py OUT.json [--hidden 400] [--batch 1 16 64 256]`.

Every peer is compared with a float64 reference (outputs and all gradients) before it is timed, and is not timed
where it is off. fp32 means fp32: TF32 is off for all, JAX runs at its highest precision; `--tf32` adds rows in
which the libraries may use it. Microseconds per step, medians by device events; partial results are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch  # noqa: E402

from deeprnn import benchmark_peers  # noqa: E402
from deeprnn.benchmark_peers import Bench, Work, backward  # noqa: E402
from deeprnn.benchmarking import relative, surroundings  # noqa: E402

LIMIT = {"fp32": 1e-5, "tf32": 5e-3}


def on_device_truth(module, run, x, g):
    """float64 on the GPU itself: the CPU would take longer than everything else here."""
    twin = copy.deepcopy(module).double()
    h = run(twin, x.double())
    gradients = torch.autograd.grad(h, list(twin.parameters()), g.double())
    return h.detach().cpu(), [d.cpu() for d in gradients]


def median_us(call, repeats: int, inner: int = 1) -> float:
    """Median microseconds of a call by device events."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(inner):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / inner)
    return sorted(times)[len(times) // 2]


def captured(call):
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peer_row(bench: Bench, name: str, precision: str) -> dict:
    """Check a peer, then time it; "ours" and "CUDA graph" as graphs, the rest as a user would call them."""
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    work = bench.work
    row = {
        "peer": name,
        "precision": precision,
        "hidden": work.hidden,
        "batch": work.batch,
        "steps": work.steps,
    }
    peer = bench.peer("eager loop" if name == "CUDA graph" else name)
    started = time.perf_counter()
    h = peer.run()
    gradients = backward(h, peer.parameters, bench.g)
    torch.cuda.synchronize()
    row["first_call_s"] = time.perf_counter() - started
    truth = peer.truth()
    pairs = [(h, truth[0]), *zip(gradients, truth[1], strict=True)]
    row["error"] = max(relative(a, b) for a, b in pairs)
    del h, gradients, pairs
    if not row["error"] <= LIMIT[precision]:
        return {**row, "failed": f"off by {row['error']:.1e}"}

    def forward():
        with torch.no_grad():
            return peer.run()

    def train():
        return backward(peer.run(), peer.parameters, bench.g)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    row["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    slow = name in ("eager loop",)
    if name == "ours":
        row["called_us"] = median_us(train, 7) / work.steps
    if name in ("ours", "CUDA graph"):
        forward, train = captured(forward), captured(train)
    repeats, inner = (3, 1) if slow else (9, 4 if name == "ours" else 1)
    row["forward_us"] = median_us(forward, repeats, inner) / work.steps
    row["train_us"] = median_us(train, repeats, inner) / work.steps
    return row


def jax_row(bench: Bench, precision: str) -> dict | None:
    """The same function by jax.lax.scan, jitted; None without JAX."""
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    work, model = bench.work, bench.model
    row = {
        "peer": "JAX lax.scan",
        "precision": precision,
        "hidden": work.hidden,
        "batch": work.batch,
        "steps": work.steps,
    }
    as_jax = lambda t: jnp.asarray(t.detach().cpu().numpy())  # noqa: E731
    parameters = {name: as_jax(p) for name, p in model.named_parameters()}
    x, g = as_jax(bench.x), as_jax(bench.g)

    def states(p, x):
        a, b = (x @ p[f"U.{i}.weight"].T + p[f"U.{i}.bias"] for i in (0, 1))

        def step(h, entered):
            z = jax.nn.sigmoid(h @ p["W.0.weight"].T + entered[0])
            h = jax.nn.sigmoid(z @ p["W.1.weight"].T + h @ p["S.0.weight"].T + entered[1])
            return h, h

        return jax.lax.scan(step, jnp.zeros((x.shape[1], work.hidden)), (a, b))[1]

    with jax.default_matmul_precision("highest" if precision == "fp32" else "tensorfloat32"):
        forward = jax.jit(states)
        train = jax.jit(jax.grad(lambda p, x: (states(p, x) * g).sum()))
        started = time.perf_counter()
        gradients = jax.block_until_ready(train(parameters, x))
        row["first_call_s"] = time.perf_counter() - started
        out = jax.block_until_ready(forward(parameters, x))
        known = dict(zip((n for n, _ in model.named_parameters()), bench.truth()[1], strict=True))
        import numpy as np

        errors = [relative(torch.from_numpy(np.array(out)), bench.truth()[0])]
        errors += [relative(torch.from_numpy(np.array(gradients[n])), known[n]) for n in known]
        row["error"] = max(errors)
        if not row["error"] <= LIMIT[precision]:
            return {**row, "failed": f"off by {row['error']:.1e}"}
        for name, call in (("forward_us", forward), ("train_us", train)):
            times = []
            for _ in range(9):
                started = time.perf_counter()
                jax.block_until_ready(call(parameters, x))
                times.append(time.perf_counter() - started)
            row[name] = sorted(times)[4] * 1e6 / work.steps
    return row


def population_rows(hidden: int, batch: int, members: tuple[int, ...], steps: int) -> list[dict]:
    """Time of a whole population, forward and backward, as a graph."""
    from deeprnn.backends import cuda

    rows = []
    spec = Work(steps, batch, hidden).spec
    for P in members:
        A = torch.randn(P, steps, batch, spec.total, device="cuda", requires_grad=True)
        h0 = torch.zeros(P, batch, hidden, device="cuda")
        W = [(torch.randn(P, hidden, hidden, device="cuda") * 0.03).requires_grad_() for _ in range(3)]
        g = torch.randn(P, steps, batch, hidden, device="cuda")

        def train(A=A, h0=h0, W=W, g=g, spec=spec):
            h, _ = torch.func.vmap(lambda a, h, u, v, s: cuda.unroll(a, h, [u, v], [s], spec))(A, h0, *W)
            return torch.autograd.grad(h, [A, *W], g)

        us = median_us(captured(train), 9, 4) / steps
        rows.append({"members": P, "hidden": hidden, "batch": batch, "train_us": us})
    return rows


def first_calls(hidden: int) -> dict:
    """Seconds to the first result: kernels compiled anew, and read from the disk (in fresh processes)."""
    import subprocess

    code = (
        "import sys,time,torch;sys.path.insert(0,sys.argv[1]);torch.zeros(1,device='cuda');from deeprnn."
        "benchmark_peers import Bench,Work,backward;b=Bench(Work(200,1,int(sys.argv[2]),device='cuda'));"
        "p=b.peer('ours');torch.cuda.synchronize();t=time.perf_counter();backward(p.run(),p.parameters,b.g);torch.cuda.synchronize();"
        "print(time.perf_counter()-t)"
    )
    folder = tempfile.mkdtemp()
    found = {}
    for name in ("cold_s", "cached_s"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(ROOT / "src"), str(hidden)],
            env={**os.environ, "DEEPRNN_CACHE": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found[name] = float(done.stdout.split()[-1]) if done.returncode == 0 else done.stderr[-300:]
    shutil.rmtree(folder)
    return found


def main() -> None:
    """Measure and write after every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, nargs="+", default=[400, 384, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--peers", nargs="+", default=["ours", "eager loop", "CUDA graph", "JAX lax.scan", "nn.RNN",
                                                       "nn.RNN x2", "nn.LSTM"])  # fmt: skip
    parser.add_argument(
        "--compile", action="store_true", help="also torch.compile of the step (slow to compile)"
    )
    parser.add_argument("--tf32", action="store_true", help="also with TF32 allowed, where a library has it")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting rows after this long")
    args = parser.parse_args()
    benchmark_peers._in_double = on_device_truth
    started = time.perf_counter()
    report = {**surroundings("cuda"), "rows": [], "population": [], "first_call": {}}

    def keep(row) -> None:
        if row is not None:
            report["rows"].append(row)
            cells = [
                f"{row[k]:9.2f}" if k in row else "        -" for k in ("forward_us", "train_us", "peak_mb")
            ]
            print(f"H {row['hidden']} B {row['batch']:3d} {row['peer']:14s} {row['precision']}", *cells,
                  f"error {row['error']:.1e}", row.get("failed", ""), flush=True)  # fmt: skip
        args.out.write_text(json.dumps(report, indent=1))

    report["population"] = population_rows(400, 1, (1, 5, 15), args.steps)
    print("population", [(r["members"], round(r["train_us"], 2)) for r in report["population"]], flush=True)
    report["first_call"] = first_calls(400)
    print("first call", report["first_call"], flush=True)
    names = [*args.peers, *(["torch.compile"] if args.compile else [])]
    for hidden in args.hidden:
        for batch in args.batch:
            bench = Bench(Work(args.steps, batch, hidden, device="cuda"))
            for name in names:
                for precision in (
                    ("fp32", "tf32") if args.tf32 and name not in ("ours", "eager loop") else ("fp32",)
                ):
                    if time.perf_counter() - started < args.seconds:
                        keep(
                            jax_row(bench, precision)
                            if name.startswith("JAX")
                            else peer_row(bench, name, precision)
                        )
    keep(None)


if __name__ == "__main__":
    main()
