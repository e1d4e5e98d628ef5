"""The planner against what was measured: results/bench/h200-sweep.jsonl; no GPU needed."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from deeprnn.backends import TransitionSpec
from deeprnn.backends.cuda import launch, planning
from deeprnn.backends.cuda.planning import Device, Plan

SWEEP = Path(__file__).parents[2] / "results" / "bench" / "h200-sweep.jsonl"
H200 = Device()
CLOCK = 1980  # cycles per microsecond
DTS = TransitionSpec((400, 400), ("sigmoid", "sigmoid"), (False, True))  # what the sweep measured


def case_of(row: dict) -> tuple[int, int, bool]:
    return row["batch"], row["members"], row["backward"]


def plan_of(row: dict) -> Plan:
    """The measured shape as today's planner sees it."""
    batch, members, backward = case_of(row)
    common = (planning.ring(DTS, backward), batch, members, False, H200)
    p = row["plan"]
    if p["path"] == "mma":
        shape = [
            p[name]
            for name in ("cluster", "mgroups", "kgroups", "rows", "streams", "through_l2", "finishers")
        ]
        plan = planning.mma_plan(*common, *shape)
    else:
        plan = planning.cluster_plan(*common, p["cluster"], p["threads"], p["klanes"], p["vec"], p["rows"])
    assert plan is not None
    assert (plan.kept, plan.shared) == (tuple(p["kept"]), p["shared"]), "the kernel measured was another"
    return plan


ROWS = [json.loads(line) for line in SWEEP.read_text().splitlines()]
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
    plan = planning.make_plan(DTS, batch, members, False, backward, H200)
    assert plan.cost / CLOCK <= 1.05 * min(us for _, us in CASES[case])


def test_the_cost_model_of_the_tensor_core_kernel_is_close_to_the_measurements():
    ratios = [p.cost / CLOCK / us for measured in CASES.values() for p, us in measured if p.path == "mma"]
    assert len(ratios) > 60
    assert sum(abs(r - 1) > 0.12 for r in ratios) <= 3
    assert all(abs(r - 1) < 0.19 for r in ratios)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("spec", [DTS, TransitionSpec((200,), ("tanh",), (False,))], ids=["DT(S)", "RNN"])
def test_a_smaller_batch_is_never_dearer(spec, backward):
    """A batch that falls into a nearly empty second wave must be cut otherwise."""
    batches = [*range(1, 26), 32, 60, 61, 64, 104, 105, 112, 113, 120, 121, 128, 240, 241, 256, 512]
    costs = [planning.make_plan(spec, batch, 1, False, backward, H200).cost for batch in batches]
    for smaller, larger in pairwise(costs):
        assert smaller <= 1.02 * larger


@pytest.mark.parametrize(("batch", "members"), [(16, 1), (64, 1), (120, 1), (256, 1), (1, 15), (3, 5)])
def test_what_can_run_in_one_wave_does(batch, members):
    for backward in (False, True):
        plan = planning.make_plan(DTS, batch, members, False, backward, H200)
        assert -(-batch // plan.rows) * members <= H200.resident(plan.cluster)


def test_clusters_of_any_size_are_weighed():
    """25 tiles of 16 outputs: two for the busiest of 13 blocks as of 16."""
    assert {planning.make_plan(DTS, b, 1, False, False, H200).cluster for b in (1, 16, 64, 256)} == {12, 13}


@pytest.mark.parametrize("backward", [False, True])
def test_what_was_measured_to_be_fastest_is_the_default(backward):
    found = {b: planning.make_plan(DTS, b, 1, False, backward, H200) for b in (16, 32, 64, 128, 256)}
    ways = {b: (p.rows, p.streams, p.through_l2, p.finishers) for b, p in found.items()}
    assert ways == {
        16: (3, 1, False, 4), 32: (5, 1, True, 4), 64: (10, 2, True, 4), 128: (21, 3, True, 4), 256: (40, 5, True, 4),
    }  # fmt: skip


def test_streams_need_room():
    ring = planning.ring(DTS, False)
    assert planning.mma_plan(ring, 256, 1, False, H200, 13, 2, 4, 40, 5) is not None
    assert planning.mma_plan(ring, 256, 1, False, H200, 13, 2, 4, 48, 6) is None
    assert planning.mma_plan(ring, 64, 1, False, H200, 8, 4, 2, 18, 3) is None


def test_finishers_leave_the_multiplying_warps_their_registers():
    """What all threads hold together is what the block was given: 65,536 registers."""
    for warps, finishers, scalers in ((8, 4, 0), (8, 8, 0), (12, 4, 0), (16, 4, 0), (8, 4, 4), (12, 4, 4)):
        held = planning._multiplier_registers(warps, finishers, scalers)
        lent = planning.FINISHER_REGISTERS[8 if scalers else finishers]
        threads = 32 * (warps + finishers + scalers)
        each = 65536 // threads // 8 * 8
        assert each < held
        others = finishers * lent + scalers * planning.SCALER_REGISTERS
        assert 32 * (warps * held + others) <= threads * each


def test_stages_of_different_width_may_have_streams():
    unequal = TransitionSpec((400, 200), ("sigmoid", "sigmoid"), (False, True))
    for backward in (False, True):
        ring = planning.ring(unequal, backward)
        assert planning.mma_plan(ring, 64, 1, False, H200, 13, 2, 4, 10, 2) is not None


def test_a_smaller_card_holds_fewer_clusters():
    small = Device(processors=114)
    assert (small.resident(8), small.resident(16)) == (12, 6)
    plan = planning.make_plan(DTS, 64, 1, False, False, small)
    assert -(-64 // plan.rows) <= small.resident(plan.cluster)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_only_the_data_centre_parts_are_given_clusters_of_16(capability):
    for batch in (1, 16, 64, 256):
        plan = planning.make_plan(DTS, batch, 1, False, False, Device(capability))
        assert plan.cluster <= (8 if capability == (12, 0) else 16)


def test_kernels_in_company_spread_less_widely():
    alone = planning.make_plan(DTS, 1, 5, False, False, H200)
    planning.expect_company(3)
    try:
        together = planning.make_plan(DTS, 1, 5, False, False, H200)
    finally:
        planning.expect_company(1)
    assert H200.resident(alone.cluster) < 15
    assert H200.resident(together.cluster) >= 15


@pytest.mark.parametrize("backward", [False, True])
def test_bf16_by_ffma_is_kept_unpacked_where_it_fits(backward):
    def made(size: int, batch: int = 1) -> Plan:
        spec = TransitionSpec((size, size), ("sigmoid", "sigmoid"), (False, True))
        return planning.make_plan(spec, batch, 1, True, backward, Device())

    assert (made(400).path, made(400).bf16) == ("cluster", False)
    assert (made(1000).path, made(1000).bf16) == ("wide", False)
    assert (made(1800).path, made(1800).bf16) == ("wide", True), "in fp32 the card cannot hold it"
    assert (made(400, 64).path, made(400, 64).bf16) == ("mma", True), "tensor cores take bf16 as it is"


def test_weights_kept_unpacked_are_rounded_all_the_same():
    spec = TransitionSpec((40, 40), ("tanh", "tanh"), (False, True))
    W, S = [torch.randn(1, 40, 40), torch.randn(1, 40, 40)], [torch.randn(1, 40, 40)]
    stages = planning.ring(spec, False)
    for bf16 in (True, False):
        plan = planning.make_plan(spec, 1, 1, bf16, False, Device())
        assert not plan.bf16
        ready = launch.Prepared(plan, stages, None, launch.order_of(stages, spec))  # type: ignore[arg-type]
        given = [m for m, *_ in launch._matrices(ready, W, S, bf16)]
        rounded = [bool(torch.equal(m, m.bfloat16().float())) for m in given]
        assert rounded == [bf16] * 3
