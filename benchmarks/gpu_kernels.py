"""Build, check and time the CUDA kernels in one go: `python benchmarks/gpu_kernels.py OUT [stage ...]`.

Each stage runs in its own process with a time limit, so that a kernel that hangs costs one stage. Every
kernel is compared with a float64 reference before it is timed. Results are JSON lines under OUT.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
WHOLE = ((1, 1), (1, 5), (1, 15), (16, 1), (64, 1), (256, 1))  # (batch, members)
LIMITS = {"compile": 90, "check": 60, "sweep": 120}


def dts(h=400, m=None):
    """The transition of the paper's DT(S)-RNN."""
    from deeprnn.backends import TransitionSpec

    return TransitionSpec((m or h, h), ("sigmoid", "sigmoid"), (False, True))


def rnn(h):
    """The transition of a plain RNN."""
    from deeprnn.backends import TransitionSpec

    return TransitionSpec((h,), ("sigmoid",), (False,))


def sweep_plans():
    """(spec, batch, members, ring, plan) to be compared on the DT(S)-400."""
    from deeprnn.backends.cuda import planning as P

    wanted = []
    shapes = ((1, 1), (1, 15), (4, 1), (8, 1), (16, 1), (64, 1), (256, 1))
    if os.environ.get("QUICK"):
        shapes = ((16, 1), (64, 1), (256, 1), (8, 1))
    for (batch, members), backward in itertools.product(shapes, (False, True)):
        ring = P.ring(dts(), backward)
        few = sorted(P.cluster_plans(ring, batch, members, False, P.Device()), key=lambda p: p.cost)
        many = sorted(P.mma_plans(ring, batch, members, False, P.Device()), key=lambda p: p.cost)
        plans = few[: 5 if batch == 1 else 2 if batch < 64 else 0] + (many[:7] if batch > 1 else [])
        wanted += [(dts(), batch, members, ring, p) for p in plans[: 5 if backward else 9]]
    return wanted


def check_cases():
    """Cases of the grid that reach every part of the kernel, few enough to be quick."""
    from tests.backends import grid

    cases = grid.cases(("fp32", "bf16"))
    few = cases[::11]
    return few + grid.large_cases() + grid.large_cases("bf16")[:2]


def compile_one(job):
    """Compile one kernel into the cache; runs without a GPU."""
    from deeprnn.backends.cuda import nvrtc
    from deeprnn.backends.cuda.launch import SOURCES
    from deeprnn.backends.cuda.planning import Device, macros

    plan, ring, reset, mid = job
    started = time.perf_counter()
    try:
        nvrtc.cubin(SOURCES[plan.path], macros(plan, ring, reset, mid), plan.arch(Device()))
    except nvrtc.CompileError as error:
        return str(error)[-1500:], 0.0
    return None, time.perf_counter() - started


def compile_jobs():
    """Every kernel that the stages use, once."""
    from tests.backends import test_cuda

    from deeprnn.backends.cuda import planning as P

    jobs = {(p, ring, False, False) for _, _, _, ring, p in sweep_plans()}

    def add(case, backward, plan):
        mid = backward and case.z_gradient and len(case.sizes) > 1
        jobs.add((plan, P.ring(case.spec, backward), case.reset, mid))

    for backward in (False, True):
        for case in check_cases():
            bf16 = case.precision == "bf16"
            add(
                case,
                backward,
                P.make_plan(case.spec, case.B, max(1, case.population), bf16, backward, P.Device()),
            )
        for shape, case, kept in test_cuda.MMA_TESTS:
            saved = dict(P.REGISTERS)
            if kept != "registers":
                P.REGISTERS.update(dict.fromkeys(saved, 0))
            ring, bf16 = P.ring(case.spec, backward), case.precision == "bf16"
            add(case, backward, P.mma_plan(ring, case.B, max(1, case.population), bf16, P.Device(), *shape))
            P.REGISTERS.update(saved)
        for spec, (batch, members) in itertools.product((dts(), rnn(600), rnn(200)), WHOLE):
            plan = P.make_plan(spec, batch, members, False, backward, P.Device())
            jobs.add((plan, P.ring(spec, backward), False, False))
    return jobs


def compile_stage(out):
    """Fill the disk cache in parallel; workers are forked, so this comes before anything touches the GPU."""
    jobs = compile_jobs()
    with ProcessPoolExecutor(16, mp_context=get_context("fork")) as pool:
        results = list(pool.map(compile_one, jobs, chunksize=4))
    failures = [r[0] for r in results if r[0]]
    times = sorted(r[1] for r in results)
    record = {
        "kernels": len(jobs),
        "failures": failures,
        "median_s": times[len(times) // 2],
        "max_s": times[-1],
    }
    (out / "compile.json").write_text(json.dumps(record, indent=1))
    print(
        "compile:",
        len(jobs),
        "kernels,",
        len(failures),
        "failures, median",
        round(record["median_s"], 2),
        "s",
    )
    for failure in failures[:3]:
        print(failure)


def check_stage(out):
    """The grid's examination through the operators."""
    import torch
    from tests.backends import grid

    from deeprnn.backends import cuda

    torch.backends.cuda.matmul.allow_tf32 = False
    bad, worst = 0, {}
    with open(out / "check.jsonl", "w") as file:
        for case in check_cases():
            print("case", case, flush=True)
            try:
                errors = grid.examine(cuda.unroll, case, "cuda")
                record = {"case": str(case), "errors": errors}
                name = max(errors, key=lambda n: errors[n])
                if errors[name] > worst.get(case.precision, (0,))[0]:
                    worst[case.precision] = (errors[name], name, str(case))
            except (grid.Rejected, RuntimeError) as error:
                bad += 1
                record = {"case": str(case), "failed": str(error)[:600]}
                print("FAILED", str(error)[:300], flush=True)
            file.write(json.dumps(record) + "\n")
            file.flush()
    print("check:", bad, "failures; worst", worst)


def inputs(spec, T, batch, members, device="cuda"):
    """Random float32 tensors with a member dimension, and the gradient fed back."""
    import torch

    def normal(*shape, scale=1.0):
        return torch.randn(members, *shape, device=device) * scale

    H = spec.hidden_size
    below = [H, *spec.sizes[:-1]]
    W = [normal(m, k, scale=0.7 / k**0.5) for m, k in zip(spec.sizes, below, strict=True)]
    S = [normal(m, H, scale=0.7 / H**0.5) for m, s in zip(spec.sizes, spec.shortcuts, strict=True) if s]
    return normal(T, batch, spec.total), normal(batch, H), W, S, normal(T, batch, H)


def truth(spec, A, h0, W, S, dh):
    """h, z, dA, dh0 of the first and the last member in float64."""
    import torch

    from deeprnn.backends import reference

    found = {}
    for p in {0, A.shape[0] - 1}:
        a, h = A[p].double().requires_grad_(), h0[p].double().requires_grad_()
        hs, zs = reference.unroll(a, h, [w[p].double() for w in W], [s[p].double() for s in S], spec)
        dA, dh0 = torch.autograd.grad((hs * dh[p].double()).sum(), (a, h))
        found[p] = (hs.detach(), zs.detach(), dA, dh0)
    return found


def relative(x, y):
    """‖x - y‖ / ‖y‖."""
    return float((x.double() - y).norm() / y.norm())


def device_time(call, repeats=9):
    """Median microseconds by device events; in a CUDA graph, so that the host has no part in it."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    return sorted(times)[len(times) // 2]


def sweep_stage(out):
    """Time every planned shape of the DT(S)-400 kernels; T = 200."""
    import torch

    from deeprnn.backends.cuda import launch
    from deeprnn.backends.cuda.driver import LOCAL_BYTES, REGISTERS

    T, rows, data = 200, [], {}
    with open(out / "sweep.jsonl", "w") as file:
        for spec, batch, members, ring, plan in sweep_plans():
            key = (spec, batch, members)
            if key not in data:
                x = inputs(spec, T, batch, members)
                data[key] = (x, truth(spec, *x))
            (A, h0, W, S, dh), known = data[key]
            shape = (members, T, batch)
            poison = [
                torch.full((*shape, n), float("nan"), device="cuda") for n in (spec.hidden_size, spec.total)
            ]
            h, dA = poison
            z = torch.full((*shape, spec.total - spec.hidden_size), float("nan"), device="cuda")
            dh0 = torch.full_like(h0, float("nan"))
            if ring.backward:
                for p, (hs, zs, _, _) in known.items():
                    h[p], z[p] = hs.float(), zs.float()
                h.nan_to_num_(0.5)
                z.nan_to_num_(0.5)
                args = (dh, None, h, z, W, S, None, spec, False, dA, dh0)
                call = partial(launch.backward, *args, plan=plan)
            else:
                call = partial(launch.forward, A, h0, W, S, None, spec, False, h, z, plan=plan)
            record = {"batch": batch, "members": members, "backward": ring.backward, "plan": plan.__dict__}
            try:
                call()
                torch.cuda.synchronize()
                pairs = ((h, 0), (z, 1)) if not ring.backward else ((dA, 2), (dh0, 3))
                record["error"] = max(relative(x[p], k[i]) for p, k in known.items() for x, i in pairs)
                kernel = launch.kernel_of(plan, ring, False, False, 0)
                record["registers"], record["local"] = (
                    kernel.attribute(REGISTERS),
                    kernel.attribute(LOCAL_BYTES),
                )
                record["resident"] = kernel.resident_clusters(plan.threads)
                record["us_per_step"] = device_time(call) / T
            except RuntimeError as error:
                record["failed"] = str(error)[:300]
            rows.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
    for key in dict.fromkeys((r["batch"], r["members"], r["backward"]) for r in rows):
        these = [r for r in rows if (r["batch"], r["members"], r["backward"]) == key]
        these.sort(key=lambda r: r.get("us_per_step", 1e9))
        print(f"B {key[0]} P {key[1]} {'backward' if key[2] else 'forward'}")
        for r in these:
            p = r["plan"]
            print(
                f"  {p['path']} cl {p['cluster']:2d} thr {p['threads']} ks {p['klanes']:2d} v {p['vec']}"
                f" mk {p['mgroups']}x{p['kgroups']} rows {p['rows']}"
                f" kept {p['kept']} {p['shared'] // 1024:3d}K est {p['cost'] / 1980:.2f}"
                f" -> {r.get('us_per_step', -1):.3f} us"
                f" err {r.get('error', -1):.1e} regs {r.get('registers')} local {r.get('local')}"
                f" res {r.get('resident')}"
                f" {r.get('failed', '')}"
            )


def tests_stage(out):
    """The tests that need a GPU, those of the grid left out."""
    import pytest

    from deeprnn.backends.cuda import planning

    planning.TENSOR_CORES = False  # tests choose for themselves
    files = [str(ROOT / name) for name in ("tests/backends/test_cuda.py", "tests/training/test_fused.py")]
    os.chdir(ROOT)
    options = ["-m", "gpu", "--maxfail=12", "--tb=short", "-p", "no:cacheprovider", "--durations=5"]
    raise SystemExit(int(pytest.main([*options, *files])))


def whole_stage(out):
    """Forward, backward and weight gradients through the operators, replayed as a CUDA graph; T = 200."""
    import torch

    from deeprnn.backends import cuda

    torch.backends.cuda.matmul.allow_tf32 = False
    T, rows = 200, []
    for (name, spec), (batch, members) in itertools.product(
        (("DT(S) 400", dts()), ("RNN 600", rnn(600)), ("RNN 200", rnn(200))),
        WHOLE,
    ):
        if os.environ.get("QUICK") and name != "DT(S) 400":
            continue
        A, h0, W, S, dh = inputs(spec, T, batch, members)
        leaves = [x.requires_grad_() for x in (A, h0, *W, *S)]

        def run(only_forward=False, A=A, h0=h0, W=W, S=S, dh=dh, leaves=leaves, spec=spec):
            units, shortcuts = spec.text
            h, _ = cuda.unroll_cuda(A, h0, W, S, None, units, shortcuts, "fp32")
            return h if only_forward else torch.autograd.grad(h, leaves, dh)

        record = {"model": name, "batch": batch, "members": members}
        for what, only in (("forward", True), ("both", False)):
            record[what] = device_time(partial(run, only)) / T
        rows.append(record)
        print(
            f"{name} B {batch} P {members}: forward {record['forward']:.3f}, both {record['both']:.3f} us a step"
        )
    (out / "whole.json").write_text(json.dumps(rows, indent=1))


def with_tensor_cores(stage):
    """Let the planner choose the tensor-core kernel in this process."""

    def run(out):
        from deeprnn.backends.cuda import planning

        planning.TENSOR_CORES = True
        stage(out)

    return run


STAGES = {
    "compile": compile_stage,
    "check": check_stage,
    "sweep": sweep_stage,
    "tests": tests_stage,
    "whole": whole_stage,
}


def main():
    """Run the stages named (all without names), each in a process of its own."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 4 and sys.argv[2] == "only":
        with_tensor_cores(STAGES[sys.argv[3]])(out)
        return
    if sys.argv[2:3] == ["together"]:  # one process, quicker: nothing guards against a kernel that hangs
        for name in sys.argv[3:] or STAGES:
            started = time.perf_counter()
            try:
                with_tensor_cores(STAGES[name])(out)
            except (Exception, SystemExit):  # noqa: BLE001 - the other stages still have something to tell
                traceback.print_exc()
            print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)
        return
    for name in sys.argv[2:] or STAGES:
        started = time.perf_counter()
        log = out / f"{name}.log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, __file__, str(out), "only", name],
                stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                code = process.wait(LIMITS.get(name, 120))
            except subprocess.TimeoutExpired:
                process.kill()
                code = "time limit"
        lines = log.read_text().splitlines()
        print(f"== {name}: exit {code}, {time.perf_counter() - started:.1f} s")
        print(
            "\n".join(line for line in lines if not line.startswith("case") or code != 0)[-5500:], flush=True
        )


if __name__ == "__main__":
    main()
