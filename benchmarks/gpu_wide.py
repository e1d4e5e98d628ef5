"""Check and time the wide kernel beside its alternatives: `python benchmarks/gpu_wide.py OUT [stage ...]`.

Stages: check (errors against float64, a captured graph, several streams), time, cluster, generic, eager, sweep.
Every kernel is compiled beforehand on all cores. Results are JSON lines in OUT/h200-wide.jsonl, µs per step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from deeprnn.backends import TransitionSpec, reference  # noqa: E402
from deeprnn.backends.cuda import launch, nvrtc, wide  # noqa: E402
from deeprnn.backends.cuda import planning as P  # noqa: E402

STEPS = 200
H200, A100 = P.Device(), P.Device((8, 0), 163 * 1024, 108)  # "a100": the shape an A100 would get, on an H200
STAGES = ("check", "time", "cluster", "generic", "eager", "sweep")


def dts(h: int, m: int | None = None) -> TransitionSpec:
    return TransitionSpec((m or h, h), ("sigmoid",) * 2, (False, True))


def three(h: int) -> TransitionSpec:
    return TransitionSpec((h,) * 3, ("sigmoid", "tanh", "sigmoid"), (False, True, True))


def rnn(h: int) -> TransitionSpec:
    return TransitionSpec((h,), ("sigmoid",), (False,))


@dataclasses.dataclass(frozen=True)
class Work:
    name: str
    spec: TransitionSpec
    batch: int
    members: int = 1
    bf16: bool = False
    reset: bool = False
    device: P.Device = H200


CHECKS = [
    *(Work("dts800", dts(800), b, reset=b == 16) for b in (1, 16, 64)),
    *(Work("dts1100", dts(1100), b, bf16=True, reset=b == 16) for b in (1, 16)),
    *(Work("rnn1500", rnn(1500), b) for b in (1, 16)),
    *(Work("three600", three(600), b, reset=b == 1) for b in (1, 16)),
    Work("odd705/385", dts(385, 705), 7, 3, reset=True), Work("dts800", dts(800), 2, 3, reset=True),
    *(Work("dts400-a100", dts(400), b, reset=b == 64, device=A100) for b in (1, 64, 256)),
    Work("dts63", dts(63, 100), 33, 2, reset=True), Work("dts600", dts(600), 256),
]  # fmt: skip
TIMES = [
    *(Work("dts800", dts(800), b) for b in (1, 16, 64, 256)),
    *(Work("dts1100", dts(1100), b, bf16=True) for b in (1, 16, 64)),
    *(Work(n, s, b) for n, s in (("rnn1500", rnn(1500)), ("three600", three(600))) for b in (1, 16)),
    *(Work("dts400", dts(400), b) for b in (1, 16, 64)),
    *(Work("dts400-a100", dts(400), b, device=A100) for b in (1, 16, 64, 256)),
    *(Work("dts600", dts(600), b) for b in (1, 64, 256)), Work("rnn132", rnn(132), 1),
]  # fmt: skip
CLUSTERS = [
    *(Work("dts600", dts(600), b) for b in (16, 64, 256)),
    *(Work("dts700", dts(700), b) for b in (1, 16)),
]
SWEEP = [
    *(Work("dts800", dts(800), b) for b in (1, 16, 64)), *(Work("dts400", dts(400), b) for b in (16, 64)),
    Work("dts1100", dts(1100), 16, bf16=True), Work("dts600", dts(600), 64),
    Work("three600", three(600), 16), Work("rnn1500", rnn(1500), 16),
]  # fmt: skip
KEEP = {
    "one team": lambda p: p.teams == 1, "three teams": lambda p: p.teams >= 3,
    "256": lambda p: p.threads == 256, "512": lambda p: p.threads == 512,
    "k1": lambda p: p.kgroups == 1, "k2": lambda p: p.kgroups == 2, "k8": lambda p: p.kgroups == 8,
    "m1": lambda p: p.mgroups == 1, "m8": lambda p: p.mgroups == 8,
    "rows8": lambda p: p.rows <= 8, "rows4": lambda p: p.rows <= 4,
}  # fmt: skip


@lru_cache(maxsize=1024)
def plans(work: Work, kind: str = "wide", keep: str = "") -> tuple[P.Plan, ...]:
    """Forward and backward plan of a kind; empty where none fits."""
    found = []
    for backward in (False, True):
        common = P.ring(work.spec, backward), work.batch, work.members, work.bf16, work.device
        if kind == "generic":
            found.append(P.generic_plan(*common))
            continue
        shapes = P.cluster_plans(*common) if kind == "cluster" else wide.wide_plans(*common)
        best = min((p for p in shapes if KEEP.get(keep, bool)(p)), key=lambda p: p.cost, default=None)
        if best is None:
            return ()
        found.append(best)
    return tuple(found)


def runs(stages: list[str]) -> list[tuple[str, Work, str, str]]:
    """(stage, work, kind of plan, which shapes) to be timed, in order."""
    wanted = [("time", w, "wide", "") for w in TIMES]
    wanted += [("cluster", w, kind, "") for w in CLUSTERS for kind in ("cluster", "wide")]
    wanted += [("generic", w, "generic", "") for w in TIMES if w.name in ("dts800", "dts400-a100")]
    wanted += [("sweep", w, "wide", keep) for w, keep in itertools.product(SWEEP, KEEP)]
    return [run for run in wanted if run[0] in stages and plans(*run[1:])]


def compile_one(job: tuple) -> str | None:
    """Compile one kernel into the cache; runs without a GPU."""
    plan, ring, reset, mid = job
    try:
        nvrtc.cubin(launch.SOURCES[plan.path], P.macros(plan, ring, reset, mid), "sm_90")
    except nvrtc.CompileError as error:
        return str(error)[-600:]
    return None


def compile_all(stages: list[str]) -> dict:
    works = [(w, plans(w, kind, keep), False) for _, w, kind, keep in runs(stages)]
    works += [(w, plans(w), True) for w in CHECKS if "check" in stages]
    jobs = {
        (p, P.ring(w.spec, backward), w.reset, mid and backward and w.spec.depth > 1)
        for w, chosen, mid in works
        for backward, p in zip((False, True), chosen, strict=True)
    }
    start = time.time()
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        failures = [text for text in pool.map(compile_one, jobs) if text]
    return {"kernels": len(jobs), "seconds": round(time.time() - start, 1), "failures": failures[:2]}


def draw(work: Work, steps: int) -> tuple:
    """Fresh random inputs, weights and gradients; numbers that bf16 can hold where weights are bf16."""

    def normal(*shape: int, scale: float = 1.0):
        x = torch.randn(work.members, *shape, device="cuda") * scale
        return x.bfloat16().float() if work.bf16 else x

    spec, B = work.spec, work.batch
    H, total = spec.sizes[-1], sum(spec.sizes)
    below = (H, *spec.sizes[:-1])
    W = [normal(m, k, scale=0.7 / k**0.5) for m, k in zip(spec.sizes, below, strict=True)]
    S = [normal(m, H, scale=0.7 / H**0.5) for m, c in zip(spec.sizes, spec.shortcuts, strict=True) if c]
    marks = torch.rand(steps, B, device="cuda") < 0.3 if work.reset else None
    return (
        normal(steps, B, total),
        normal(B, H),
        W,
        S,
        marks,
        normal(steps, B, H),
        normal(steps, B, total - H),
    )


def unroll(work: Work, inputs: tuple, chosen: tuple[P.Plan, ...], mid: bool = True) -> tuple:
    """h, z, dA, dh0 in poisoned memory, and the two launches."""
    A, h0, W, S, marks, dh, dz = inputs
    members, steps, B, total = A.shape
    H = work.spec.sizes[-1]
    shapes = (steps, B, H), (steps, B, total - H), (steps, B, total), (B, H)
    h, z, dA, dh0 = (torch.full((members, *s), float("nan"), device="cuda") for s in shapes)
    back = dz if mid else None

    def forward():
        launch.forward(A, h0, W, S, marks, work.spec, work.bf16, h, z, plan=chosen[0])

    def backward():
        launch.backward(dh, back, h, z, W, S, marks, work.spec, work.bf16, dA, dh0, plan=chosen[1])

    forward()
    backward()
    return (h, z, dA, dh0), forward, backward


def errors(work: Work, inputs: tuple, outputs: tuple) -> dict[str, float]:
    """Largest relative error in norm over the members, against the reference in float64."""
    A, h0, W, S, marks, dh, dz = inputs
    worst: dict[str, float] = {}
    for p in range(work.members):
        a, x = A[p].double().requires_grad_(), h0[p].double().requires_grad_()
        h, z = reference.unroll(
            a, x, [w[p].double() for w in W], [s[p].double() for s in S], work.spec, marks
        )
        truth = (h, z, *torch.autograd.grad((h * dh[p]).sum() + (z * dz[p]).sum(), (a, x)))
        for name, out, known in zip(("h", "z", "dA", "dh0"), outputs, truth, strict=True):
            if known.numel():
                error = float((out[p].double() - known).norm() / known.norm().clamp(min=1e-30))
                worst[name] = max(worst.get(name, 0.0), float(f"{error:.2e}"))
    return worst


def timed(function, repeats: int = 7) -> float:
    """Microseconds of one replay of a captured call, the median."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    return sorted(spans)[repeats // 2]


def time_eager(work: Work) -> tuple[float, float]:
    """The plain loop in a CUDA graph: forward, and forward + backward with weight gradients."""
    A, h0, W, S, _, dh, _ = draw(work, STEPS)
    leaves = [x[0].requires_grad_() for x in (A, *W, *S)]
    W, S = leaves[1 : 1 + len(W)], leaves[1 + len(W) :]

    def forward():
        with torch.no_grad():
            reference.unroll(leaves[0], h0[0], W, S, work.spec, None)

    def both():
        torch.autograd.grad(reference.unroll(leaves[0], h0[0], W, S, work.spec, None)[0], leaves, dh[0])

    return timed(forward, 3) / STEPS, timed(both, 3) / STEPS


def describe(work: Work, chosen: tuple[P.Plan, ...] = ()) -> dict:
    fields = (
        "path",
        "cluster",
        "team",
        "teams",
        "rows",
        "passes",
        "threads",
        "mgroups",
        "ngroups",
        "kgroups",
    )
    shapes = [{k: getattr(p, k) for k in (*fields, "shared") if hasattr(p, k)} for p in chosen]
    return {"name": work.name, "batch": work.batch, "members": work.members, "bf16": work.bf16} | dict(
        zip(("plan", "plan_b"), shapes, strict=False)
    )


def check_streams() -> dict:
    """A captured graph and three streams at once give the bits of a single call."""
    work = Work("dts800", dts(800), 4)
    inputs, chosen = draw(work, 50), plans(work)
    first = unroll(work, inputs, chosen)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = unroll(work, inputs, chosen)[0]
    graph.replay()
    torch.cuda.synchronize()
    many, streams = [], [torch.cuda.Stream() for _ in range(3)]
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            many.append(unroll(work, inputs, chosen)[0])
    torch.cuda.synchronize()
    same = all(torch.equal(x, y) for x, y in zip(first, captured, strict=True))
    return {
        "graph": same,
        "streams": all(torch.equal(x, y) for o in many for x, y in zip(first, o, strict=True)),
    }


def main() -> None:
    folder, stages = Path(sys.argv[1]), sys.argv[2:] or list(STAGES)
    with open(folder / "h200-wide.jsonl", "a") as file:

        def say(**row) -> None:
            print(json.dumps(row), file=file, flush=True)
            print(json.dumps(row), flush=True)

        say(stage="compile", **compile_all(stages))
        if "check" in stages:
            for work in CHECKS:
                inputs, chosen = draw(work, 20), plans(work)
                found = errors(work, inputs, unroll(work, inputs, chosen)[0])
                say(stage="check", reset=work.reset, errors=found, **describe(work, chosen))
            say(stage="check", **check_streams())
        for stage, work, kind, keep in runs(stages):
            chosen = plans(work, kind, keep)
            _, forward, backward = unroll(work, draw(work, STEPS), chosen, mid=False)
            spans = {"fwd": timed(forward) / STEPS, "bwd": timed(backward) / STEPS}
            say(
                stage=stage, **{k: round(v, 3) for k, v in spans.items()}, keep=keep, **describe(work, chosen)
            )
        for work in TIMES if "eager" in stages else []:
            if not work.bf16 and work.device == H200:
                forward, both = time_eager(work)
                say(stage="eager", fwd=round(forward, 2), both=round(both, 2), **describe(work))


if __name__ == "__main__":
    main()
