"""The planner, also against what was measured on an H200; no GPU needed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from deeprnn.backends.call import Case, Inputs
from deeprnn.backends.cuda import describe_plan
from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence import run
from deeprnn.backends.cuda.recurrence.cluster_plans import ClusterPlan, cluster_plan
from deeprnn.backends.cuda.recurrence.planning import make_plan
from deeprnn.backends.cuda.recurrence.plans import KernelPlan
from deeprnn.backends.cuda.recurrence.schedule import NotScheduled, Schedule, schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan, tensor_core_plan
from deeprnn.backends.cuda.recurrence.whole_card_plans import (
    WholeCardPlan,
    team_size,
    whole_card_plan,
    whole_card_shape,
)
from deeprnn.backends.cuda.recurrence.whole_card_tensor_core_plans import (
    WholeCardTensorCorePlan,
    whole_card_tensor_core_shape,
)
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription, Output
from tests.backends.cells_by_hand import by_name, gru, highway, lstm
from tests.backends.grid import transition

BENCH = Path(__file__).parents[2] / "results" / "bench"
CLOCK = 1980  # cycles per microsecond
H200 = Device()
A100 = Device((8, 0), 163 * 1024, 108)
ADA = Device((8, 9), 99 * 1024, 128)


def rnn(h: int, unit: str = "sigmoid") -> CellDescription:
    return DeepTransition((h,), (unit,), (False,)).cell


def dts(h: int, depth: int = 2) -> CellDescription:
    return DeepTransition((h,) * depth, ("sigmoid",) * depth, (False,) + (True,) * (depth - 1)).cell


def plan_for(cell, batch=1, members=1, bf16=False, backward=False, device=H200) -> KernelPlan:
    plan = make_plan(schedule(cell, backward), batch, members, bf16, device)
    assert plan is not None
    return plan


# ---- against measurements of DT(S) 400

DTS = dts(400)


def case_of(row: dict) -> tuple[int, int, bool]:
    return row["batch"], row["members"], row["backward"]


def plan_of(row: dict) -> KernelPlan:
    """The measured shape as the planner sees it."""
    batch, members, backward = case_of(row)
    common = (schedule(DTS, backward), batch, members, False, H200)
    p = row["plan"]
    if p["path"] == "mma":
        names = ("cluster", "mgroups", "kgroups", "rows", "streams", "through_l2", "finishers")
        plan = tensor_core_plan(*common, *(p[name] for name in names))
    else:
        plan = cluster_plan(*common, p["cluster"], p["threads"], p["klanes"], p["vec"], p["rows"])
    assert plan is not None
    assert (sorted(plan.in_registers), plan.shared) == (sorted(p["kept"]), p["shared"]), (
        "another kernel was measured"
    )
    return plan


ROWS = [json.loads(line) for line in (BENCH / "h200-sweep.jsonl").read_text().splitlines()]
# Left out: small blocks of which two run on a processor, so that twice as many clusters are resident.
ROWS = [row for row in ROWS if row["resident"] <= H200.resident(row["plan"]["cluster"])]
ROWS = sorted((row for row in ROWS if "us_per_step" in row), key=case_of)
CASES = {case: [(plan_of(r), r["us_per_step"]) for r in rows] for case, rows in groupby(ROWS, case_of)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_of_the_measured_shapes_the_planner_takes_the_fastest(case):
    measured = CASES[case]
    _, taken = min(measured, key=lambda pair: pair[0].cost)
    assert taken <= 1.03 * min(us for _, us in measured)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_made_is_expected_to_beat_the_best_measured(case):
    batch, members, backward = case
    plan = plan_for(DTS, batch, members, backward=backward)
    assert plan.cost / CLOCK <= 1.05 * min(us for _, us in CASES[case])


def test_the_cost_model_of_the_tensor_core_kernel_is_close_to_the_measurements():
    pairs = [pair for measured in CASES.values() for pair in measured]
    ratios = [p.cost / CLOCK / us for p, us in pairs if isinstance(p, TensorCorePlan)]
    assert len(ratios) > 60
    assert sum(abs(r - 1) > 0.12 for r in ratios) <= 3
    assert all(abs(r - 1) < 0.19 for r in ratios)


# ---- shapes that fit, waves, cards


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("cell", [DTS, rnn(200, "tanh"), lstm(128)], ids=["DT(S)", "RNN", "LSTM"])
def test_a_smaller_batch_is_never_dearer(cell, backward):
    """A batch that falls into a nearly empty second wave must be cut otherwise."""
    batches = [
        1,
        2,
        5,
        8,
        15,
        16,
        17,
        25,
        32,
        60,
        61,
        64,
        104,
        105,
        112,
        113,
        120,
        121,
        128,
        240,
        241,
        256,
        512,
    ]
    costs = [plan_for(cell, batch, backward=backward).cost for batch in batches]
    for smaller, larger in pairwise(costs):
        assert smaller <= 1.05 * larger


@pytest.mark.parametrize(("batch", "members"), [(16, 1), (64, 1), (120, 1), (256, 1), (1, 15), (3, 5)])
def test_what_can_run_in_one_wave_does(batch, members):
    for backward in (False, True):
        plan = plan_for(DTS, batch, members, backward=backward)
        assert -(-batch // plan.rows) * members <= H200.resident(plan.cluster)


CELLS = {
    "rnn 800": rnn(800),
    "dts 600": dts(600),
    "lstm 512": lstm(512),
    "gru 512": gru(512),
    "rhn": highway(400, 5),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("device", [H200, A100, ADA], ids=["H200", "A100", "Ada"])
def test_a_plan_asks_for_no_more_than_the_card_has(name, batch, device):
    for backward in (False, True):
        plan = make_plan(schedule(CELLS[name], backward), batch, 1, False, device)
        if plan is None:  # the caller takes library products
            assert device is not H200
            continue
        assert plan.shared <= device.shared_limit
        assert plan.cluster <= device.widest_cluster
        if isinstance(plan, WholeCardPlan | WholeCardTensorCorePlan):
            assert plan.team * plan.teams <= device.sm_count
            assert plan.teams * plan.passes * plan.rows >= batch


def test_rnn_1100_stays_on_chip_in_bf16():
    assert plan_for(rnn(1100), bf16=True) is not None


def test_what_fits_no_card_is_read_through_l2_or_has_no_plan_and_the_report_says_what_runs():
    for backward in (False, True):
        assert make_plan(schedule(dts(2000), backward), 1, 1, False, A100) is None
        assert isinstance(
            make_plan(schedule(dts(2000), backward), 1, 1, False, H200), WholeCardTensorCorePlan
        )
    assert "some weights in shared memory" in describe_plan(dts(2000))["forward"]
    assert "cluster of 12" in describe_plan(DTS)["forward"]
    assert "L2" in describe_plan(dts(800))["backward"]


def test_a_population_of_15_runs_at_once():
    for backward in (False, True):
        plan = plan_for(DTS, 1, 15, backward=backward)
        assert H200.resident(plan.cluster) * plan.rows >= 15


def test_row_groups_need_room():
    own = schedule(DTS, False)
    assert tensor_core_plan(own, 256, 1, False, H200, 13, 2, 4, 40, 5) is not None
    assert tensor_core_plan(own, 256, 1, False, H200, 13, 2, 4, 48, 6) is None
    assert tensor_core_plan(own, 64, 1, False, H200, 8, 4, 2, 18, 3) is None


def test_a_smaller_card_holds_fewer_clusters():
    small = Device(sm_count=114)
    assert (small.resident(8), small.resident(16)) == (12, 6)
    plan = plan_for(DTS, 64, device=small)
    assert -(-64 // plan.rows) <= small.resident(plan.cluster)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_only_the_data_centre_parts_are_given_clusters_of_16(capability):
    for batch in (1, 16, 64, 256):
        plan = plan_for(DTS, batch, device=Device(capability))
        assert plan.cluster <= (8 if capability == (12, 0) else 16)


# ---- bf16


@pytest.mark.parametrize("backward", [False, True])
def test_bf16_by_ffma_is_kept_unpacked_where_it_fits(backward):
    def made(size: int, batch: int = 1) -> tuple[type, bool]:
        plan = plan_for(dts(size), batch, bf16=True, backward=backward)
        return type(plan), plan.bf16

    assert made(400) == (ClusterPlan, False)
    assert made(1000) == (WholeCardPlan, False)
    assert made(1800) == (WholeCardPlan, True), "in fp32 the card cannot hold it"
    assert made(400, 64) == (TensorCorePlan, True), "tensor cores take bf16 as it is"


def test_weights_kept_unpacked_are_rounded_all_the_same():
    cell = DeepTransition((40, 40), ("tanh", "tanh"), (False, True)).cell
    inputs = Inputs(None, [torch.zeros(1, 40)], [torch.randn(40, 40) for _ in range(3)], [], [])
    for precision in ("bf16", "fp32"):
        plan = plan_for(cell, bf16=precision == "bf16")
        assert not plan.bf16
        case = Case(cell, torch.device("cpu"), torch.float32, precision)
        given = run.rounded(inputs, case, plan).matrices
        assert [torch.equal(m, m.bfloat16().float()) for m in given] == [precision == "bf16"] * 3


# ---- the whole card


@pytest.mark.parametrize(
    ("cell", "bf16"),
    [(dts(800), False), (dts(1100), True), (dts(600, 3), False)],
    ids=["800", "1100 bf16", "three 600"],
)
@pytest.mark.parametrize("batch", [1, 64])
def test_what_fits_no_cluster_is_spread_over_the_card(cell, bf16, batch):
    for backward in (False, True):
        plan = plan_for(cell, batch, bf16=bf16, backward=backward)
        assert isinstance(plan, WholeCardPlan if batch == 1 else WholeCardPlan | WholeCardTensorCorePlan)


def test_blocks_that_would_get_nothing_are_left_out():
    own = schedule(dts(800), False)
    plan = whole_card_plan(own, 1, 1, False, H200)
    assert plan is not None
    assert plan.team == 115  # seven units each
    assert team_size(own, 100) == 100


def test_members_are_served_side_by_side_where_they_fit():
    plan = whole_card_plan(schedule(dts(400), False), 1, 5, False, A100)
    assert plan is not None
    assert (plan.teams, plan.passes) == (5, 1)


def test_a_batch_that_clusters_take_in_many_waves_is_spread_over_the_card():
    """DT(S) 700/700 at B = 16: 4.4 µs against 6.7 measured; a single row stays with a cluster."""
    assert not isinstance(plan_for(dts(700), 16), ClusterPlan)
    assert isinstance(plan_for(dts(700)), ClusterPlan)


WIDE = {
    "dts400": dts(400), "dts600": dts(600), "dts800": dts(800), "dts1100": dts(1100), "three600": dts(600, 3),
    "rnn1500": rnn(1500),
}  # fmt: skip


def measured_on_the_whole_card() -> dict[tuple, list[tuple[WholeCardPlan, float]]]:
    """The shapes of results/bench/h200-wide.jsonl as the planner sees them, with their times, by case."""
    cases: dict[tuple, list[tuple[WholeCardPlan, float]]] = {}
    for line in (BENCH / "h200-wide.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["stage"] not in ("time", "sweep") or row["name"] not in WIDE:
            continue
        for backward, name, us in ((False, "plan", row["fwd"]), (True, "plan_b", row["bwd"])):
            p, own = row[name], schedule(WIDE[row["name"]], backward)
            warps = p["mgroups"], p["ngroups"], p["kgroups"]
            shape = p["team"], p["teams"], p["rows"], p["threads"], warps
            plan = whole_card_shape(own, row["batch"], 1, row["bf16"], H200, *shape)
            assert plan is not None
            cases.setdefault((row["name"], row["batch"], backward), []).append((plan, us))
    return cases


def test_the_cost_model_of_the_whole_card_is_near_every_measurement():
    for case in measured_on_the_whole_card().values():
        for plan, us in case:
            assert plan.cost / CLOCK == pytest.approx(us, rel=0.25)


def test_of_the_measured_shapes_of_the_whole_card_a_fast_one_is_taken():
    for case in measured_on_the_whole_card().values():
        _, taken = min(case, key=lambda pair: pair[0].cost)
        assert taken <= 1.12 * min(us for _, us in case)


MEASURED = {
    "rnn2048": rnn(2048), "dts1024": dts(1024), "dts2048": dts(2048), "rhn400": highway(400, 5),
    **{f"{name}{h}": by_name(h)[name] for name in ("gru", "lstm") for h in (128, 256, 512, 1024)},
    "rhn256": highway(256, 5), "rhn830": highway(830, 10),
    "deep5-400": transition((400,) * 5, ("sigmoid",) * 5, "last"),
}  # fmt: skip


def rows_of(name: str) -> list[dict]:
    """The measured shapes of a file: its first row says where they come from, and some were refused."""
    rows = [json.loads(line) for line in (BENCH / name).read_text().splitlines()[1:]]
    return [row for row in rows if "us_per_step" in row]


def measured_on_the_tensor_cores_of_the_whole_card() -> dict[
    tuple, list[tuple[WholeCardTensorCorePlan, float]]
]:
    """The shapes of two files as the planner sees them; those of deep cells in the first are of an older kernel."""
    cases: dict[tuple, list[tuple[WholeCardTensorCorePlan, float]]] = {}
    older = [row for row in rows_of("h200-whole-card-tensor-core.jsonl") if row["cell"] != "rhn400"]
    newer = rows_of("h200-gates-and-deep-cells.jsonl")
    for row in (*older, *(row for row in newer if row["plan"]["path"] == "whole_card_tensor_core")):
        own, p = schedule(MEASURED[row["cell"]], row["backward"]), row["plan"]
        plan = whole_card_tensor_core_shape(own, row["batch"], 1, H200, p["rows"], p["groups"])
        assert plan is not None
        assert (plan.shared, list(plan.resident)) == (p["shared"], p["resident"])
        key = row["cell"], row["batch"], row["backward"]
        cases.setdefault(key, []).append((plan, row["us_per_step"]))
    return cases


def test_the_cost_model_of_the_whole_cards_tensor_cores_is_near_every_measurement():
    for case in measured_on_the_tensor_cores_of_the_whole_card().values():
        for plan, us in case:
            assert plan.cost / CLOCK == pytest.approx(us, rel=0.25)


def test_of_the_measured_shapes_on_the_whole_cards_tensor_cores_a_fast_one_is_taken():
    for case in measured_on_the_tensor_cores_of_the_whole_card().values():
        _, taken = min(case, key=lambda pair: pair[0].cost)
        assert taken <= 1.21 * min(us for _, us in case)


def test_of_the_measured_shapes_that_scale_by_tiles_a_fast_one_is_taken():
    cases: dict[tuple, list[tuple[float, float]]] = {}
    for row in rows_of("h200-gates-and-deep-cells.jsonl"):
        p = row["plan"]
        if p["path"] != "gates":
            continue
        shape = (
            p["cluster"],
            p["mgroups"],
            p["kgroups"],
            p["rows"],
            p["streams"],
            p["through_l2"],
            p["finishers"],
        )
        own = schedule(MEASURED[row["cell"]], row["backward"])
        plan = tensor_core_plan(own, row["batch"], 1, False, H200, *shape)
        assert plan is not None
        assert (plan.shared, list(plan.in_registers)) == (p["shared"], p["kept"])
        cases.setdefault((row["cell"], row["batch"]), []).append((plan.cost, row["us_per_step"]))
    assert len(cases) > 20
    for case in cases.values():
        assert min(case)[1] <= 1.13 * min(us for _, us in case)


def test_a_stage_that_waits_for_no_vector_has_no_shape_on_the_whole_cards_tensor_cores():
    """Its block could overwrite a vector that another one still reads."""
    own = schedule(dts(64), False)
    without = tuple(m for m in own.matrices if not (m.stage == 1 and own.is_critical(m)))
    cut = Schedule(own.cell, False, own.stages, without)
    assert whole_card_tensor_core_shape(own, 16, 1, H200, 16, 1) is not None
    assert whole_card_tensor_core_shape(cut, 16, 1, H200, 16, 1) is None


# ---- schedules


@pytest.mark.parametrize("name", by_name())
def test_a_schedule_has_every_weight_once_in_either_direction(name):
    cell = by_name(7)[name]
    whole = [torch.zeros(shape, dtype=torch.int) for shape in cell.matrices]
    for backward in (False, True):
        seen = [x.clone() for x in whole]
        own = schedule(cell, backward)
        for matrix in own.matrices:
            here, there = own.stages[matrix.stage], own.stages[matrix.source]
            rows, columns = (there.size, here.size) if backward else (here.size, there.size)
            for piece in filter(None, matrix.pieces):
                end = piece.rows.start + (rows - 1) * piece.rows.step + 1
                block = (
                    slice(piece.rows.start, end, piece.rows.step),
                    slice(piece.column, piece.column + columns),
                )
                seen[piece.matrix][block] += 1
        assert all((x == 1).all() for x in seen)


def test_what_no_kernel_can_order_is_refused_with_a_reason():
    early = replace(
        by_name(7)["gru-published"], new_states=(Output(0, 0),)
    )  # the second stage still reads the old one
    with pytest.raises(NotScheduled, match="reads state 0"):
        schedule(early, False, strict=False)
