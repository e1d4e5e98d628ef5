"""The persistent kernels without a GPU: their own sources, compiled for the CPU, on the grid.

Few shapes, chosen so that each part of the sources runs: compiling one takes seconds.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deeprnn.backends import autograd, plain
from deeprnn.backends.call import Case as BackendCase
from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence import (
    cluster_plans,
    launch,
    max_abs_scan,
    run,
    tensor_core_plans,
    whole_card_plans,
    whole_card_tensor_core_plans,
)
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.cells.description import CellDescription
from deeprnn.cells.expressions import apply, leaf
from deeprnn.cells.functions import FUNCTIONS, UNITS
from deeprnn.cells.library import LIBRARY
from deeprnn.cells.plans import PlanRequest, plan_of
from tests.backends import grid
from tests.backends.cells_by_hand import by_name
from tests.backends.emulated import emulated_kernel
from tests.backends.grid import Case
from tests.backends.small_emulation import Small

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
H200 = Device()
ROOT = Path(__file__).resolve().parents[2]


def traced(name: str, size: int, *layers: int) -> CellDescription:
    """A shipped cell, perhaps one whose candidate is the end of a deep transition, as its own step is read.

    The device "meta" is read as a GPU is.
    """
    cell = LIBRARY[name](5, size, **({"intermediate_sizes": layers} if layers else {}))
    plan = plan_of(cell, PlanRequest(torch.float32, torch.float32, "meta"))
    assert plan.traced is not None, plan.reason
    return plan.traced.cell


NORMED = ("layer-norm-gru", "layer-norm-lstm")
CELLS = by_name(18) | {"deep-lstm": traced("lstm", 18, 11), "deep-gru": traced("gru", 18, 21)}
CELLS |= {name: traced(name, 18) for name in NORMED}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Kernels are compiled by g++ where they would be loaded, for a machine that is an H200."""

    def scan_kernel(jobs, device, arch):
        return Small("recurrence/max_abs_scan.cu", "max_abs_scan", {"JOBS": jobs})

    monkeypatch.setattr(launch, "load_kernel", emulated_kernel)
    monkeypatch.setattr(max_abs_scan, "load_kernel", scan_kernel)
    for module in (launch, run):
        monkeypatch.setattr(module, "device_of", lambda index: H200)


def examine(case: Case, choose, monkeypatch) -> None:
    """The case by the plan that `choose(schedule, batch, members, bf16)` gives for each direction."""

    def make_plan(schedule, batch, members, bf16, device):
        plan = choose(schedule, batch, members, bf16)
        assert plan is not None, "the shape under test does not fit"
        return plan

    monkeypatch.setattr(launch, "make_plan", make_plan)
    grid.examine(lambda cell, inputs, p: autograd.unroll("cuda", cell.text, p, inputs), case)


def named(name: str, T: int = 5, B: int = 5, **rest) -> Case:
    return Case(name, CELLS[name], T, B, **rest)


# ---- one cluster, products by FFMA

# case, (cluster, threads, lanes that share a sum, numbers a lane takes at once, rows), whether registers hold weights
CLUSTER = [
    (named("dts3", reset=True), (3, 128, 8, 4, 2), True),
    (named("dts", B=2, precision="bf16"), (2, 128, 8, 2, 2), False),
    (named("pooled", population=2), (2, 128, 8, 2, 2), True),
    (named("masked", reset=True), (2, 128, 16, 2, 1), True),
    (named("lstm", reset=True, population=2), (3, 128, 8, 2, 3), True),
    (named("gru", state_gradient_only=True), (2, 128, 32, 1, 1), False),
    (named("peepholes", reset=True), (2, 128, 8, 2, 2), False),
    (named("highway", reset=True), (4, 128, 8, 4, 2), True),
    (named("gru-published", T=1), (2, 128, 8, 2, 2), True),
    (named("leaky"), (2, 128, 8, 2, 2), True),
    (named("deep-lstm", reset=True), (3, 128, 8, 2, 2), True),
    (named("deep-gru", population=2), (2, 128, 8, 2, 2), True),
    (named("layer-norm-gru", reset=True), (2, 128, 8, 2, 2), True),
    (named("layer-norm-lstm", reset=True, population=2), (3, 128, 8, 2, 2), True),
]


@pytest.mark.parametrize(("case", "shape", "registers"), CLUSTER, ids=str)
def test_cluster_kernel(case, shape, registers, monkeypatch):
    if not registers:
        monkeypatch.setattr(cluster_plans, "REGISTERS", dict.fromkeys(cluster_plans.REGISTERS, 0))
    examine(case, lambda *common: cluster_plans.cluster_plan(*common, H200, *shape), monkeypatch)


def test_every_unit_of_the_table(monkeypatch):
    """A layer each, so that one kernel has them all."""
    units = list(UNITS)
    case = Case("units", grid.transition([9] * len(units), units, "none"), T=4, B=3, reset=True)
    examine(case, lambda *common: cluster_plans.cluster_plan(*common, H200, 2, 128, 8, 2, 2), monkeypatch)


SMOOTH = (
    *("exp", "expm1", "log", "log1p", "sqrt", "square", "softplus"),
    *("sine", "cosine", "sinh", "cosh", "arcsinh", "erf", "erfc"),
)
"""functions of one argument that are no units, and whose slope does not jump"""
OTHERS = ("floor", "round", "arctan2", "hypot", "fmod", "remainder")


@pytest.mark.parametrize("names", [SMOOTH, OTHERS], ids=["smooth", "others"])
def test_other_functions_of_the_table(names, monkeypatch):
    """All in one kernel, of numbers between 0.5 and 1.5."""
    a = leaf("preactivation", 0)
    total = a * 0.1
    for k, name in enumerate(names):
        args = [apply("sigmoid", a * (1.0 + 0.1 * k)) + 0.5, apply("sigmoid", 2.0 * a) + 0.5]
        total = total + apply(name, *args[: FUNCTIONS[name].arity])
    rnn = by_name(18)["leaky"]
    stage = rnn.stages[0]._replace(outputs=(apply("tanh", total * 0.2),))
    case = Case("functions", dataclasses.replace(rnn, stages=(stage,)), T=4, B=3, reset=True)
    examine(case, lambda *common: cluster_plans.cluster_plan(*common, H200, 2, 128, 8, 2, 2), monkeypatch)


# ---- the whole card

# case, (team, teams, rows, threads, warps), whether shared memory is so short that vectors share places
CARD = [
    (named("dts3", B=3, reset=True), (3, 1, 3, 64, (2, 1, 1)), False),
    (named("dts", T=3, population=2, precision="bf16"), (2, 3, 2, 64, (1, 2, 1)), False),
    (named("pooled", B=3), (4, 2, 1, 64, (1, 1, 2)), False),
    (named("lstm", reset=True), (3, 1, 3, 64, (1, 1, 2)), False),
    (named("gru", B=3), (2, 1, 2, 64, (2, 1, 1)), False),
    (named("highway", B=3, reset=True), (2, 1, 2, 64, (2, 1, 1)), True),
    (named("deep-gru", B=3, reset=True), (3, 1, 3, 64, (1, 1, 2)), False),
]


@pytest.mark.parametrize(("case", "shape", "cramped"), CARD, ids=str)
def test_whole_card_kernel(case, shape, cramped, monkeypatch):
    monkeypatch.setattr(whole_card_plans, "TILES", dict.fromkeys((64, 128), (256, 512)))

    def choose(*common):
        plan = whole_card_plans.whole_card_shape(*common, H200, *shape)
        if cramped:
            assert plan is not None
            device = dataclasses.replace(H200, shared_limit=plan.shared - 1)
            plan = whole_card_plans.whole_card_shape(*common, device, *shape)
            assert plan is None or len(set(plan.places)) < len(plan.places)
        return plan

    examine(case, choose, monkeypatch)


# ---- one cluster, products on the tensor cores

WIDE = by_name(33)
# case, (cluster, warps over units, warps over the inner dimension, rows, row groups, through L2), weights in registers
TENSOR_CORES = [
    (Case("dts", WIDE["dts"], 5, 5, reset=True), (2, 1, 4, 3), True),
    (Case("dts3", WIDE["dts3"], 4, 6, population=2), (3, 1, 4, 6, 2), True),
    (Case("rnn", WIDE["rnn"], 5, 5, precision="bf16"), (2, 1, 2, 5, 1, False), True),
    (Case("lstm", WIDE["lstm"], 5, 5, reset=True, population=2), (2, 1, 4, 3), True),
    (Case("gru", WIDE["gru"], 5, 6), (3, 1, 4, 6, 2), False),
    (Case("pooled", WIDE["pooled"], 4, 3), (2, 1, 2, 3), True),
    # What units carry goes from one finishing warp to another where groups of rows do not divide evenly.
    (Case("lstm", WIDE["lstm"], 6, 9, reset=True), (2, 1, 4, 9, 3), True),
    (Case("gru", WIDE["gru"], 6, 15), (3, 1, 4, 15, 5), True),
    (Case("gru-published", WIDE["gru-published"], 5, 6, reset=True, population=2), (2, 1, 4, 6, 2), True),
    (Case("highway", WIDE["highway"], 5, 3, reset=True), (2, 1, 4, 3), True),
    (Case("deep-lstm", traced("lstm", 33, 24), 4, 5, reset=True), (2, 1, 4, 3), True),
]


@pytest.mark.parametrize(("case", "shape", "registers"), TENSOR_CORES, ids=str)
def test_tensor_core_kernel(case, shape, registers, monkeypatch):
    if not registers:
        monkeypatch.setattr(tensor_core_plans, "REGISTERS", dict.fromkeys(cluster_plans.REGISTERS, 0))
    examine(case, lambda *common: tensor_core_plans.tensor_core_plan(*common, H200, *shape), monkeypatch)


def test_no_weight_is_read_beyond_its_matrix():
    """Nor is one that nobody multiplies: a matrix may end where memory does."""
    run_there = subprocess.run([sys.executable, "-m", "tests.backends.guarded_memory"], cwd=ROOT, check=False)
    assert run_there.returncode == 0


def by_row(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error of a batch row at a step: small rows count as much as large ones."""
    both = [x.double().flatten(0, -2) for x in (found, truth)]
    whole = torch.isfinite(both[1]).all(-1)
    assert torch.equal(whole, torch.isfinite(both[0]).all(-1))
    difference = (both[0] - both[1])[whole].norm(dim=-1)
    return float((difference / both[1][whole].norm(dim=-1).clamp_min(1e-42)).max())


def large_start(tensors):
    tensors["state0"] *= 3e4
    tensors["matrix0"] *= 1e-4  # or every unit would be saturated
    tensors["matrix2"] *= 1e-4


def last_step_alone(tensors):  # nothing but the last step is scored, and gradients vanish on the way back
    tensors["gradient1"][:-1] = 0
    tensors["gradient0"][:] = 0
    for name in tensors:
        if name.startswith("matrix"):
            tensors[name] *= 1e-4


def huge_gradients(tensors):
    for name in ("gradient0", "gradient1"):
        tensors[name] *= 1e25


def tiny_gradients(tensors):  # of some rows
    for name in ("gradient0", "gradient1"):
        tensors[name][:, ::2] *= 1e-28


def one_large_weight(tensors):
    tensors["matrix0"][0, 0] = 300.0


def grown_before_a_start(tensors):  # 1e25 in one sequence, 1 in the next; backward the other way round
    tensors["reset"][:] = False
    tensors["reset"][2] = True
    tensors["A"][:2] *= 1e25
    for name in ("gradient0", "gradient1"):
        tensors[name][3:] *= 1e25


def lost_before_a_start(tensors):  # other rows know nothing of it
    tensors["reset"][:] = False
    tensors["reset"][2] = True
    tensors["A"][0, 0, :5] = float("nan")
    tensors["A"][0, 1, 3] = float("inf")
    tensors["gradient1"][4, 3, 2] = float("nan")


def lost_at_the_start(tensors):  # in the first state of some rows, whose first sequence does not begin there
    tensors["reset"][:] = False
    tensors["reset"][0, :4] = True
    tensors["state0"][0, 3] = float("inf")
    tensors["state0"][1, :] = float("nan")
    tensors["state0"][4, 5] = float("nan")


RANGES = [large_start, last_step_alone, huge_gradients, tiny_gradients, one_large_weight]
RANGES += [grown_before_a_start, lost_before_a_start, lost_at_the_start]
BOUNDED = grid.transition((40, 40), ("sigmoid", "tanh"))
UNBOUNDED = grid.transition((40, 40), ("relu", "identity"))


@pytest.mark.parametrize("known", [True, False], ids=["row-scales", "tile-scales"])
@pytest.mark.parametrize("cell", [BOUNDED, UNBOUNDED], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("change", RANGES, ids=lambda f: f.__name__)
def test_numbers_of_any_size_keep_their_precision(cell, change, known, monkeypatch):
    """Although the kernel multiplies in fp16 parts."""
    if not known:
        monkeypatch.setattr(tensor_core_plans, "known_ranges", lambda schedule: None)
    case = Case("range", cell, 5, 6, reset=True)
    tensors = grid.draw(case, grid.fresh_seed())
    if change is not grown_before_a_start and change not in RANGES[-2:]:
        tensors["reset"][:] = False
    change(tensors)
    for found, truth in on_tensor_cores(case, tensors, (2, 1, 4, 6, 2)):
        assert by_row(found, truth) < 2e-5


@pytest.mark.parametrize("known", [True, False], ids=["row-scales", "tile-scales"])
def test_gradients_that_shrink_in_every_layer_keep_their_precision_in_each(known, monkeypatch):
    """Further in all than one scale reaches."""
    if not known:
        monkeypatch.setattr(tensor_core_plans, "known_ranges", lambda schedule: None)
    cell = grid.transition((17,) * 10, ("sigmoid",) * 10, "last")
    case = Case("shrinking", cell, 3, 4)
    tensors = grid.draw(case, grid.fresh_seed())
    for name in tensors:
        if name.startswith("matrix"):
            tensors[name] *= 0.2
    tensors["gradient9"][:-1] = 0
    for layer in range(9):
        tensors[f"gradient{layer}"][:] = 0
    *_, (found, truth) = on_tensor_cores(case, tensors, (2, 1, 4, 4, 1))
    layers = zip(found[-1:].split(17, -1), truth[-1:].split(17, -1), strict=True)
    assert max(by_row(*layer) for layer in layers) < 2e-5


def on_tensor_cores(case: Case, tensors, shape) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is found, and in float64: every output, and last the gradients of pre-activations."""
    cell = case.cell
    plans = [
        tensor_core_plans.tensor_core_plan(schedule(cell, b), case.B, 1, False, H200, *shape)
        for b in (False, True)
    ]
    double = grid.inputs_of(cell, tensors)
    single = grid.inputs_of(cell, {n: x.float() if x.is_floating_point() else x for n, x in tensors.items()})
    backend_case = BackendCase(cell, torch.device("cpu"), torch.float32)
    gradients = [tensors[f"gradient{k}"] for k in range(len(cell.outputs))]
    with torch.no_grad():
        truth = plain.forward(cell, double, keep=True)
        delta = plain.backward(cell, gradients, truth, double).delta
    found = run.forward(backend_case, single, True, plans[0])
    single_gradients, stored = [g.float() for g in gradients], [x.float() for x in truth]
    back = run.backward(backend_case, single_gradients, stored, single._replace(A=None), plans[1]).delta
    return [*zip(found, truth, strict=True), (back, delta)]


@pytest.mark.parametrize("name", ["gru-published", "gru", "peepholes"])
def test_what_nobody_wrote_is_no_magnitude(name, monkeypatch):
    """Matrices of unlike numbers of gates leave places of the scan's buffer alone. NaN there would not be noticed."""

    empty = torch.Tensor.new_empty

    def large(like, *sizes, **rest):
        memory = empty(like, *sizes, **rest)
        return memory.fill_(1e30) if memory.is_floating_point() else memory

    case = Case(name, WIDE[name], 3, 4)
    tensors = grid.draw(case, grid.fresh_seed())
    monkeypatch.setattr(torch.Tensor, "new_empty", large)
    for found, truth in on_tensor_cores(case, tensors, (2, 1, 4, 4, 1)):
        assert by_row(found, truth) < 1e-5


# ---- the whole card, products on the tensor cores

# case, (batch rows of a team, groups of units of a block), whether weights stay in shared memory
CARD_TENSOR_CORES = [
    (Case("dts3", WIDE["dts3"], 4, 5, reset=True), (16, 1), True),
    (Case("dts", WIDE["dts"], 4, 20), (32, 2), False),
    (Case("lstm", WIDE["lstm"], 4, 19, reset=True, population=2), (16, 1), True),
    (Case("gru", WIDE["gru"], 3, 40, reset=True), (64, 1), False),
    (Case("highway", WIDE["highway"], 3, 18), (16, 3), True),
    (Case("pooled", WIDE["pooled"], 3, 17), (16, 1), True),
    (Case("deep-lstm", traced("lstm", 33, 40), 3, 18, reset=True), (16, 1), True),
    (Case("layer-norm-lstm", traced("layer-norm-lstm", 33), 3, 18, reset=True), (16, 1), True),
    (Case("peepholes", WIDE["peepholes"], 1, 5, reset=True), (16, 1), False),
]


@pytest.mark.parametrize(("case", "shape", "resident"), CARD_TENSOR_CORES, ids=str)
def test_whole_card_tensor_core_kernel(case, shape, resident, monkeypatch):
    plans = whole_card_tensor_core_plans
    if not resident:  # every second matrix comes through the ring
        monkeypatch.setattr(plans, "_fitting", lambda sizes, room: [i % 2 == 1 for i in range(len(sizes))])

    def choose(schedule, batch, members, bf16):
        plan = plans.whole_card_tensor_core_shape(schedule, batch, members, H200, *shape)
        assert plan is None or all(plan.resident) == resident
        return plan

    examine(case, choose, monkeypatch)
