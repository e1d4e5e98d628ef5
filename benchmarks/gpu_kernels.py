"""Shapes of the persistent kernels, each checked against float64 and then timed:

    python benchmarks/gpu_kernels.py OUT [KERNEL ...] [--best 7] [--distinct]

For every cell and batch the shapes that the cost model of a kernel ranks first, with --distinct one of each structure
(how many blocks, warps, groups of rows), compiled beforehand on all cores. A kernel is cluster, tensor_core, whole_card
or whole_card_tensor_core; `gates` is the tensor-core kernel backward, which scales gated cells by tiles. A row for
each goes to OUT/sweep.jsonl: what the model expected (`plan.cost`, cycles a step), the largest relative error and
microseconds a step in a CUDA graph. The first row says which code and machine they come from.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from tests.backends.cells_by_hand import by_name, highway  # noqa: E402
from tests.backends.grid import transition  # noqa: E402
from torch import Tensor  # noqa: E402

from deeprnn.backends import plain  # noqa: E402
from deeprnn.backends.call import Case, Inputs  # noqa: E402
from deeprnn.backends.cuda import nvrtc  # noqa: E402
from deeprnn.backends.cuda.device import Device  # noqa: E402
from deeprnn.backends.cuda.driver import LOCAL_BYTES, REGISTERS  # noqa: E402
from deeprnn.backends.cuda.epilogue import EpilogueOptions, epilogue_of  # noqa: E402
from deeprnn.backends.cuda.recurrence import run  # noqa: E402
from deeprnn.backends.cuda.recurrence.cluster_plans import cluster_plans  # noqa: E402
from deeprnn.backends.cuda.recurrence.launch import compile_plan, load_kernel  # noqa: E402
from deeprnn.backends.cuda.recurrence.planning import make_plan  # noqa: E402
from deeprnn.backends.cuda.recurrence.plans import KernelPlan  # noqa: E402
from deeprnn.backends.cuda.recurrence.schedule import schedule  # noqa: E402
from deeprnn.backends.cuda.recurrence.tensor_core_plans import tensor_core_plans  # noqa: E402
from deeprnn.backends.cuda.recurrence.whole_card_plans import whole_card_plans  # noqa: E402
from deeprnn.backends.cuda.recurrence.whole_card_tensor_core_plans import (  # noqa: E402
    whole_card_tensor_core_plans,
)
from deeprnn.bench.measure import relative, seconds_of, surroundings  # noqa: E402
from deeprnn.cells.deep_transition import DeepTransition  # noqa: E402
from deeprnn.cells.description import CellDescription  # noqa: E402
from deeprnn.training.cuda_graph import capture  # noqa: E402

STEPS, CHECKED = 200, 20  # steps that are timed, and those that are compared with float64
KERNELS: dict[str, Callable[..., Any]] = {
    "cluster": cluster_plans,
    "tensor_core": tensor_core_plans,
    "gates": lambda schedule, *rest: tensor_core_plans(schedule, *rest) if schedule.backward else (),
    "whole_card": whole_card_plans,
    "whole_card_tensor_core": lambda schedule, batch, members, bf16, device: whole_card_tensor_core_plans(
        schedule, batch, members, device
    ),
}


def rnn(h: int) -> CellDescription:
    """A plain RNN."""
    return DeepTransition((h,), ("sigmoid",), (False,)).cell


def dts(h: int) -> CellDescription:
    """The paper's DT(S)-RNN."""
    return DeepTransition((h, h), ("sigmoid", "sigmoid"), (False, True)).cell


def three(h: int) -> CellDescription:
    """A transition of three layers."""
    return DeepTransition((h,) * 3, ("sigmoid", "tanh", "sigmoid"), (False, True, True)).cell


CELLS = {
    "dts400": dts(400),
    "dts600": dts(600),
    "dts800": dts(800),
    "dts1100": dts(1100),
    "rnn200": rnn(200),
    "rnn1500": rnn(1500),
    "three600": three(600),
    "rnn512": rnn(512),
    "rnn2048": rnn(2048),
    "dts1024": dts(1024),
    "dts2048": dts(2048),
    **{f"{name}{h}": by_name(h)[name] for name in ("gru", "lstm") for h in (128, 256, 512, 1024)},
    "gru-published256": by_name(256)["gru-published"],
    "rhn256": highway(256, 5),
    "rhn400": highway(400, 5),
    "rhn830": highway(830, 10),
    **{f"deep{depth}": transition((256,) * depth, ("sigmoid",) * depth, "last") for depth in (5, 7, 10)},
    "deep5-400": transition((400,) * 5, ("sigmoid",) * 5, "last"),
}
WORK = {  # kernel -> (cell, batch, members, bf16)
    "cluster": [
        *(("dts400", b, p, False) for b, p in ((1, 1), (1, 15), (4, 1), (8, 1), (16, 1))),
        *(("rnn200", b, 1, False) for b in (1, 16)),
        *(("dts600", b, 1, False) for b in (1, 16)),
    ],
    "tensor_core": [("dts400", b, 1, False) for b in (8, 16, 64, 256)] + [("dts600", 64, 1, False)],
    "gates": [
        *(
            (f"{n}{h}", b, 1, False)
            for h in (256, 512, 128)
            for b in (64, 256, 1024, 16)
            for n in ("gru", "lstm")
        ),
        *((name, b, 1, False) for name in ("gru-published256", "rhn256") for b in (16, 64, 256)),
    ],
    "whole_card": [
        *(("dts800", b, 1, False) for b in (1, 16, 64, 256)),
        *(("dts400", b, 1, False) for b in (16, 64)),
        *(("dts1100", b, 1, True) for b in (1, 16)),
        *((name, b, 1, False) for name in ("rnn1500", "three600") for b in (1, 16)),
        *(("rhn400", b, 1, False) for b in (1, 16)),
    ],
    "whole_card_tensor_core": [
        *(("gru512", b, 1, False) for b in (64, 256, 1024)),
        *((name, b, 1, False) for name in ("lstm512", "rhn400", "lstm1024") for b in (64, 256)),
        *((name, b, 1, False) for name in ("dts1024", "gru1024") for b in (16, 64, 256)),
        *(("dts2048", b, 1, False) for b in (1, 16, 64)),
        *(("rnn2048", b, 1, False) for b in (16, 64)),
        *(("deep5-400", b, 1, False) for b in (16, 64)),
        ("rhn830", 20, 1, False),
    ],
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One row of the sweep."""

    kernel: str
    name: str
    batch: int
    members: int
    backward: bool
    plan: KernelPlan

    @property
    def case(self) -> Case:
        """What the plan is for."""
        precision = "bf16" if self.plan.bf16 else "fp32"
        return Case(CELLS[self.name], torch.device("cuda"), torch.float32, precision)

    @property
    def options(self) -> EpilogueOptions:
        """Forward everything is kept; backward the last output has a gradient."""
        cell = CELLS[self.name]
        last = tuple(output in cell.new_states for output in cell.outputs)
        return EpilogueOptions(gradients=last) if self.backward else EpilogueOptions()


def first_ones(plans: list[KernelPlan], best: int, distinct: bool) -> list[KernelPlan]:
    """Those that the cost model ranks first; `distinct`: of each structure only one."""
    found: dict[Any, KernelPlan] = {}
    for i, plan in enumerate(sorted(plans, key=lambda p: p.cost)):
        names = ("cluster", "threads", "through_l2", "row_groups", "finishers", "team", "teams")
        found.setdefault(tuple(getattr(plan, n, None) for n in names) if distinct else i, plan)
    return list(found.values())[:best]


def shapes(kernels: list[str], best: int, distinct: bool = False) -> Iterator[Shape]:
    """The shapes that are examined."""
    for kernel in kernels:
        for (name, batch, members, bf16), backward in itertools.product(WORK[kernel], (False, True)):
            plans = KERNELS[kernel](schedule(CELLS[name], backward), batch, members, bf16, Device())
            for plan in first_ones(list(plans), best, distinct):
                yield Shape(kernel, name, batch, members, backward, plan)


def compile_one(shape: Shape) -> str | None:
    """Compile one kernel into the cache; runs without a GPU."""
    epilogue = epilogue_of(schedule(CELLS[shape.name], shape.backward), shape.options)
    try:
        compile_plan(shape.plan, epilogue, Device())
    except nvrtc.CompileError as error:
        return f"{shape}: {str(error)[-600:]}"
    return None


def draw(shape: Shape, steps: int) -> tuple[Inputs, Tensor]:
    """Random inputs with a member dimension, numbers that bf16 can hold where weights are bf16; a gradient."""
    cell, generator = CELLS[shape.name], torch.Generator("cuda").manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape.members, *size, device="cuda", generator=generator) * scale
        return x.bfloat16().float() if shape.plan.bf16 else x

    matrices = [normal(*size, scale=0.7 / size[1] ** 0.5) for size in cell.matrices]
    A, states = normal(steps, shape.batch, cell.entry_width), [normal(shape.batch, n) for n in cell.states]
    vectors = [normal(n) for n in cell.vectors]
    return Inputs(A, states, matrices, vectors, []), normal(steps, shape.batch, cell.states[0])


def in_double(inputs: Inputs) -> Inputs:
    """The same numbers in float64."""
    assert inputs.A is not None
    groups = inputs.states, inputs.matrices, inputs.vectors
    states, matrices, vectors = ([x.double() for x in group] for group in groups)
    return Inputs(inputs.A.double(), states, matrices, vectors, [])


def call_of(
    shape: Shape, inputs: Inputs, gradient: Tensor, stored: list[Tensor]
) -> Callable[[], list[Tensor]]:
    """The launch that is examined; the backward pass starts from what the truth stored."""
    if not shape.backward:
        return lambda: run.forward(shape.case, inputs, True, plan=shape.plan)
    gradients = [gradient if has else None for has in shape.options.gradients]
    without_A = inputs._replace(A=None)

    def call() -> list[Tensor]:
        found = run.backward(shape.case, gradients, stored, without_A, plan=shape.plan)
        return [found.delta, *found.states]

    return call


def error_of(shape: Shape) -> float:
    """The largest relative error of anything a launch computes."""
    inputs, gradient = draw(shape, CHECKED)
    truth = plain.forward(CELLS[shape.name], in_double(inputs), keep=True)
    call = call_of(shape, inputs, gradient, [x.float() for x in truth])
    if shape.backward:
        gradients = [gradient.double() if has else None for has in shape.options.gradients]
        found = plain.backward(CELLS[shape.name], gradients, truth, in_double(inputs)._replace(A=None))
        truth = [found.delta, *found.states]
    return max(relative(x, known.cpu()) for x, known in zip(call(), truth, strict=True))


def microseconds(call: Callable[[], Any], repeats: int = 9) -> float:
    """The median of replays of a CUDA graph, in which the host has no part."""
    graph, _ = capture(call)
    graph.replay()
    return statistics.median(seconds_of(graph.replay, "cuda") for _ in range(repeats)) * 1e6


def examine(shape: Shape) -> dict[str, Any]:
    """Check a shape, then time it."""
    plan = {"path": shape.kernel, **dataclasses.asdict(shape.plan)}
    row = {"cell": shape.name, "batch": shape.batch, "members": shape.members, "backward": shape.backward}
    row |= {"plan": plan, "error": error_of(shape)}
    if not row["error"] < 1e-5:
        return row | {"failed": f"off by {row['error']:.1e}"}
    epilogue = epilogue_of(schedule(CELLS[shape.name], shape.backward), shape.options)
    kernel = load_kernel(shape.plan, epilogue, 0)
    row |= {"registers": kernel.attribute(REGISTERS), "local": kernel.attribute(LOCAL_BYTES)}
    inputs, gradient = draw(shape, STEPS)
    forward = make_plan(
        schedule(CELLS[shape.name], False), shape.batch, shape.members, shape.plan.bf16, Device()
    )
    stored = run.forward(shape.case, inputs, True, plan=forward) if shape.backward else []
    return row | {"us_per_step": microseconds(call_of(shape, inputs, gradient, stored)) / STEPS}


def main() -> None:
    """Compile everything, then examine shape by shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(KERNELS)}; all when empty"
    )
    parser.add_argument(
        "--best", type=int, default=7, help="shapes of each kernel, cell, batch and direction"
    )
    parser.add_argument("--distinct", action="store_true", help="one shape of each structure")
    parser.add_argument("--seconds", type=float, default=1e9, help="no shape begins after these")
    args = parser.parse_args()
    if unknown := [name for name in args.kernels if name not in KERNELS]:
        parser.error(f"no kernel {unknown[0]!r}: there are {', '.join(KERNELS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + args.seconds
    wanted = list(shapes(args.kernels or list(KERNELS), args.best, args.distinct))
    with ProcessPoolExecutor(
        mp_context=get_context("fork")
    ) as pool:  # forked before anything touches the GPU
        failures = [text for text in pool.map(compile_one, wanted, chunksize=4) if text]
    print(f"{len(wanted)} kernels compiled, {len(failures)} failures", *failures[:3], sep="\n", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    with open(args.out / "sweep.jsonl", "w", encoding="utf-8") as file:
        say = partial(print, file=file, flush=True)
        about = surroundings("cuda")
        say(json.dumps(about))
        for shape in wanted:
            if time.perf_counter() > deadline:
                break
            try:
                row = examine(shape)
            except RuntimeError as error:  # a launch that is refused: the others still have something to tell
                row = {"cell": shape.name, "plan": dataclasses.asdict(shape.plan), "failed": str(error)[:300]}
            say(json.dumps(row))
            print({k: v for k, v in row.items() if k != "plan"}, shape.plan.describe(), flush=True)


if __name__ == "__main__":
    main()
