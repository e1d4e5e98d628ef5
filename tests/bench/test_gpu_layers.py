"""The measurement of layers on a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest
import torch
from benchmarks import gpu_layers
from benchmarks.rehearsal import rehearsal
from benchmarks.shapes import FAIR, GPU_GROUPS, JAX, LOOP, OURS, TF32, TORCH, Shape, fair, gpu_peers

from deeprnn.errors import UserError

SHAPE = Shape("gru", 8, 2, 3, 5)


def soon() -> float:
    return time.perf_counter() + 60


def test_every_way_of_calling_is_timed(monkeypatch):
    monkeypatch.setattr(gpu_layers, "FAIR", {SHAPE})
    with rehearsal():
        found = list(
            gpu_layers.rows("cpu", gpu_layers.Clock(dry=True), soon(), {SHAPE: [OURS, TORCH, LOOP, TF32]})
        )
    assert [row["peer"] for row in found] == [OURS, TORCH, LOOP, TF32]
    for row in found:
        assert "failed" not in row, row
        for name in ("host", "python", "graph"):
            assert row[f"{name}_forward_us"] > 0
            assert row[f"{name}_train_us"] > 0
        assert Shape.of(row) == SHAPE
    assert set(found[0]["kernels"]) == {"forward", "backward"}
    json.dumps(found, allow_nan=False)


def test_jax_is_one_call_from_python():
    pytest.importorskip("jax")
    (row,) = gpu_layers.rows("cpu", gpu_layers.Clock(dry=True), soon(), {SHAPE: [JAX]})
    assert row["python_train_us"] > 0
    assert not any(name.startswith(("host", "graph")) for name in row)


def test_a_layer_that_is_off_is_not_timed():
    """Launches that do nothing give the wrong numbers, which must be noticed."""

    class Clock(gpu_layers.Clock):
        def host(self, *given):
            pytest.fail("timed")

    with rehearsal():
        (row,) = gpu_layers.rows("cpu", Clock(dry=False), soon(), {SHAPE: [OURS]})
    assert "off by" in row["failed"]


@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_off_from_a_later_call_on_is_not_timed(monkeypatch, gradients):
    """A shape that is met again is served by recorded launches: those are timed, so those are compared."""
    from benchmarks import cell_peers

    class Calls(cell_peers.Calls):
        def __init__(self, *given):
            super().__init__(*given)
            right, calls = self.run, []

            def run() -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                off = torch.is_grad_enabled() is gradients and calls.count(gradients) > 2
                return right() * (1.01 if off else 1.0)

            self.run = run

    truth = cell_peers.truth_of(SHAPE, OURS, "cpu")
    monkeypatch.setattr(cell_peers, "Calls", Calls)
    row = gpu_layers.measure(SHAPE, OURS, truth, "cpu", gpu_layers.Clock(dry=False))
    assert "off by" in row["failed"]


def test_what_fails_is_a_row_and_not_the_end(monkeypatch):
    from benchmarks import cell_peers

    def broken(*given):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(cell_peers, "torch_layer", broken)
    shape = Shape("paced", 8, 2, 3, 5)
    with rehearsal():
        torchs, ours = gpu_layers.rows("cpu", gpu_layers.Clock(dry=True), soon(), {shape: [TORCH, OURS]})
    assert torchs["failed"] == "RuntimeError: no such thing"
    assert "failed" not in ours


def test_no_row_begins_after_its_time():
    (row,) = gpu_layers.rows("cpu", gpu_layers.Clock(dry=True), 0.0, {SHAPE: [OURS]})
    assert row == {"stopped": "1 of 1 shapes not begun"}


def test_a_slow_call_is_repeated_less_often():
    clock, made = gpu_layers.Clock(dry=True, seconds=0.03), []
    clock.host(lambda: made.append(time.sleep(0.01)), lambda: None)
    assert len(made) < 1 + clock.calls


def test_what_takes_long_to_compile_runs_for_the_fair_table_alone():
    shapes = {shape for group in GPU_GROUPS.values() for shape in group()}
    assert {s for s in shapes if JAX in gpu_peers(s)} == {s for s in FAIR if s.batch <= 64}
    assert all(OURS in gpu_peers(shape) for shape in shapes)
    assert len(list(fair())) == len(FAIR)


def test_the_next_run_measures_what_no_file_has(tmp_path):
    first, second = list(fair())[:2]
    measured = {**asdict(first), "graph_train_us": 1.0, "python_train_us": 1.0}
    rows = [{"about": {"commit": "x"}}, {**measured, "peer": OURS}, {**measured, "peer": JAX},
            {**asdict(second), "peer": OURS, "failed": "off"},
            {**asdict(first), "peer": LOOP, "graph_train_us": 1.0}]  # fmt: skip
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = gpu_layers.still_wanted(["fair"], [OURS, LOOP, JAX], [tmp_path])
    assert wanted[first] == [LOOP], "it was not called from Python yet"
    assert wanted[second] == [OURS, LOOP, JAX], "what failed is tried again"
    assert len(gpu_layers.still_wanted(["fair"], [OURS], [])) == len(FAIR)


def test_kernels_are_added_only_by_the_planner_that_chose_them(tmp_path):
    file = tmp_path / "layers.jsonl"
    row = {"peer": OURS, **asdict(SHAPE)}
    file.write_text(json.dumps({"about": {"commit": "no such commit"}}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match="planner"):
        gpu_layers.add_kernels(file)
    file.write_text(json.dumps(row) + "\n")
    gpu_layers.add_kernels(file)
    assert "cluster" in json.loads(file.read_text())["kernels"]["forward"]
