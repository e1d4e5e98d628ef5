"""The wide kernel: its planner, its source run on the CPU by fibres, and on a GPU (`make test-gpu`)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from deeprnn.backends import TransitionSpec
from deeprnn.backends import cuda as backend
from deeprnn.backends.cuda import launch, planning, wide
from tests.backends import grid as examination
from tests.backends import test_emulated
from tests.backends.grid import Case, fresh_seed

MEASURED = Path(__file__).parents[2] / "results" / "bench" / "h200-wide.jsonl"
CLOCK = 1980  # cycles per microsecond
H200 = planning.Device()
A100 = planning.Device((8, 0), 163 * 1024, 108)
ADA = planning.Device((8, 9), 99 * 1024, 128)


def dts(h: int) -> TransitionSpec:
    return TransitionSpec((h, h), ("sigmoid", "sigmoid"), (False, True))


def three(h: int) -> TransitionSpec:
    return TransitionSpec((h,) * 3, ("sigmoid",) * 3, (False, True, True))


# ---- the planner


@pytest.mark.parametrize(
    ("spec", "bf16"),
    [(dts(800), False), (dts(1100), True), (three(600), False), (dts(705), False)],
    ids=["800", "1100 bf16", "three 600", "705"],
)
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_what_fits_no_cluster_is_spread_over_the_card(spec, bf16, batch, backward):
    plan = planning.make_plan(spec, batch, 1, bf16, backward, H200)
    assert isinstance(plan, wide.WidePlan)
    assert plan.team * plan.teams <= H200.processors
    assert plan.shared <= H200.shared_limit
    assert plan.teams * plan.passes * plan.rows >= batch
    assert "L2" in plan.describe()


@pytest.mark.parametrize("device", [A100, ADA], ids=["A100", "Ada"])
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_gpus_without_clusters_keep_weights_on_chip_too(device, batch):
    for backward in (False, True):
        plan = planning.make_plan(dts(400), batch, 1, False, backward, device)
        assert plan.path == "wide"
        assert plan.shared <= device.shared_limit


def test_blocks_that_would_get_nothing_are_left_out():
    ring = planning.ring(dts(800), False)
    plan = wide.wide_plan(ring, 1, 1, False, H200)
    assert plan is not None
    assert plan.team == 115  # seven outputs each
    assert wide.team_of(ring, 100) == 100


def test_members_are_served_side_by_side_where_they_fit():
    plan = wide.wide_plan(planning.ring(dts(400), False), 1, 5, False, A100)
    assert plan is not None
    assert (plan.teams, plan.passes) == (5, 1)


def test_what_the_whole_card_cannot_hold_is_left_to_the_generic_kernel():
    assert planning.make_plan(dts(2000), 1, 1, False, False, H200).path == "generic"


def test_rows_enough_to_fill_the_card_are_left_to_the_generic_kernel():
    """A population of 15 with 256 rows each: blocks of eight rows read the weights less often than teams pass."""
    for batch, members, path in ((256, 15, "generic"), (256, 1, "wide"), (1, 15, "wide")):
        assert planning.make_plan(dts(400), batch, members, False, False, A100).path == path


def test_the_report_names_the_path():
    described = backend.plan(dts(800), 1)
    assert described["forward"]["path"] == described["backward"]["path"] == "wide"
    assert described["forward"]["text"].startswith("wide: 115 blocks")


SPECS = {
    "dts400": dts(400), "dts600": dts(600), "dts800": dts(800), "dts1100": dts(1100), "three600": three(600),
    "rnn1500": TransitionSpec((1500,), ("sigmoid",), (False,)),
}  # fmt: skip


def measured() -> dict[tuple, list[tuple[wide.WidePlan, float]]]:
    """The shapes of results/bench/h200-wide.jsonl as today's planner sees them, with their times, by case."""
    cases: dict[tuple, list[tuple[wide.WidePlan, float]]] = {}
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        if row["stage"] not in ("time", "sweep") or row["name"] not in SPECS:
            continue
        for backward, name, us in ((False, "plan", row["fwd"]), (True, "plan_b", row["bwd"])):
            p, ring = row[name], planning.ring(SPECS[row["name"]], backward)
            warps = p["mgroups"], p["ngroups"], p["kgroups"]
            shape = p["team"], p["teams"], p["rows"], p["threads"], warps
            plan = wide.wide_shape(ring, row["batch"], 1, row["bf16"], H200, *shape)
            assert plan is not None
            cases.setdefault((row["name"], row["batch"], backward), []).append((plan, us))
    return cases


def test_the_cost_model_is_near_every_measurement():
    for case in measured().values():
        for plan, us in case:
            assert plan.cost / CLOCK == pytest.approx(us, rel=0.25)


def test_of_the_measured_shapes_the_planner_takes_a_fast_one():
    for case in measured().values():
        _, taken = min(case, key=lambda pair: pair[0].cost)
        assert taken <= 1.12 * min(us for _, us in case)


def test_a_batch_that_clusters_take_in_many_waves_is_spread_over_the_card():
    """DT(S) 700/700 at B = 16: 4.4 µs against 6.7 measured; a single row stays with a cluster."""
    assert planning.make_plan(dts(700), 16, 1, False, False, H200).path != "cluster"
    assert planning.make_plan(dts(700), 1, 1, False, False, H200).path == "cluster"


# ---- the source, emulated


class Emulated(test_emulated.Emulated):
    """All blocks run at once, as a cooperative launch promises."""

    def launch(self, grid: int, threads: int, arguments: list, device: torch.device) -> None:
        seed = fresh_seed()
        error = self.run(arguments[0], 1, grid, threads, self.plan.shared, seed)
        assert error is None, f"{error.decode()} (order of threads by seed {seed})"


ODD = Case((5, 7, 3), ("sigmoid", "tanh", "identity"), (False, True, True), 5, 3, reset=True)
TWO = Case((37, 130), ("tanh", "sigmoid"), (False, True), 4, 5, reset=True)
ONE = Case((45,), ("sigmoid",), (False,), 5, 4)
BARE = Case((40, 35), ("relu", "tanh"), (False, False), 4, 9, z_gradient=False)
PLAIN = Case((20, 33, 18), ("tanh", "relu", "tanh"), (False, True, False), 5, 3)
# case, (team, teams, rows, threads, warps), whether shared memory is short; few threads keep the emulation quick
EMULATED = [
    (ODD, (3, 1, 3, 64, (2, 1, 1)), False),
    (ODD, (4, 2, 1, 64, (1, 1, 2)), True),
    (dataclasses.replace(ODD, population=2), (2, 3, 2, 64, (1, 2, 1)), False),
    (TWO, (4, 1, 2, 128, (2, 1, 2)), True),
    (dataclasses.replace(TWO, T=1), (3, 1, 2, 64, (1, 2, 1)), False),
    (ONE, (5, 1, 1, 64, (2, 1, 1)), False),
    (dataclasses.replace(ONE, T=2, population=3), (3, 2, 3, 64, (1, 1, 2)), False),
    (dataclasses.replace(BARE, precision="bf16"), (3, 1, 5, 64, (1, 1, 2)), True),
    (dataclasses.replace(TWO, precision="bf16"), (3, 1, 5, 64, (2, 1, 1)), False),
    (PLAIN, (2, 1, 2, 64, (2, 1, 1)), True),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")
@pytest.mark.parametrize(("case", "shape", "cramped"), EMULATED, ids=str)
def test_the_kernel_emulated(case, shape, cramped, tmp_path, monkeypatch):
    monkeypatch.setattr(test_emulated, "Emulated", Emulated)
    monkeypatch.setattr(wide, "TILES", dict.fromkeys((64, 128), (256, 512)))

    def choose(ring):
        common = ring, case.B, max(1, case.population), case.precision == "bf16"
        plan = wide.wide_shape(*common, H200, *shape)
        if cramped:  # so that vectors must share places
            assert plan is not None
            device = dataclasses.replace(H200, shared_limit=plan.shared - 1)
            plan = wide.wide_shape(*common, device, *shape)
            assert plan is not None
            assert len(set(plan.places)) < len(plan.places)
        return plan

    test_emulated.emulate(case, choose, tmp_path, monkeypatch)


# ---- on a GPU


@pytest.fixture
def forced(monkeypatch):
    """Every plan made is the wide kernel's, in the cheapest of the shapes that `keep` allows."""

    def force(keep=lambda plan: True):
        def chosen(spec, batch, members, bf16, backward, device):
            ring = planning.ring(spec, backward)
            plans = [p for p in wide.wide_plans(ring, batch, members, bf16, device) if keep(p)]
            return min(plans, key=lambda plan: plan.cost)

        monkeypatch.setattr(launch, "make_plan", chosen)

    return force


GPU_CASES = [
    Case((100, 63), ("tanh", "sigmoid"), (False, True), 9, 5, reset=True),
    Case((63, 1), ("relu", "tanh"), (False, True), 6, 3, population=2),
    Case((385, 63, 100), ("tanh", "relu", "sigmoid"), (False, True, True), 11, 17, reset=True, population=3),
    Case((705, 385), ("sigmoid", "tanh"), (False, True), 12, 7, reset=True),
    Case((200,), ("sigmoid",), (False,), 1, 30),
    Case((400, 400), ("sigmoid", "sigmoid"), (False, True), 9, 64),
    Case((400, 385), ("sigmoid", "sigmoid"), (False, True), 9, 33, precision="bf16"),
]
KEEPS = {
    "cheapest": lambda plan: True,
    "one team": lambda plan: plan.teams == 1,
    "many passes": lambda plan: plan.rows <= 2,
    "512 threads": lambda plan: plan.threads == 512,
}


GPU_TESTS = [(case, "cheapest") for case in GPU_CASES]
GPU_TESTS += [(GPU_CASES[i], keep) for i, keep in ((0, "one team"), (2, "many passes"), (3, "512 threads"))]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "keep"), GPU_TESTS, ids=str)
def test_the_kernel_on_a_gpu(case, keep, forced):
    forced(KEEPS[keep])
    examination.examine(backend.unroll, case, "cuda")


@pytest.mark.gpu
def test_two_streams_do_not_block_each_other():
    """Blocks wait for blocks, so kernels that each got half of the card would wait for ever."""
    case = Case((800, 800), ("sigmoid", "sigmoid"), (False, True), 30, 2)
    tensors = {n: x.float().cuda() for n, x in examination.draw(case, fresh_seed()).items()}
    W, S = examination._weights(tensors)
    alone, _ = backend.unroll(tensors["A"], tensors["h0"], W, S, case.spec)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(backend.unroll(tensors["A"], tensors["h0"], W, S, case.spec)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(h, alone) for h in results)
