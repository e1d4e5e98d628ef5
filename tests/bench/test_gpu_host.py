"""The measurement of host and device time, as far as it goes without a GPU."""

from __future__ import annotations

import json
import time

import pytest
from benchmarks import gpu_host
from benchmarks.rehearsal import rehearsal

SHAPE = gpu_host.Shape("gru", 8, 2, 3, 5)


def test_every_way_of_calling_is_timed():
    with rehearsal():
        found = list(gpu_host.rows("cpu", gpu_host.Clock(dry=True), time.perf_counter() + 60, [SHAPE]))
    *rows, profile = found
    assert [row["peer"] for row in rows] == ["ours", "ours, torch's products", "torch.nn"]
    for row in rows:
        assert "failed" not in row, row
        for name in ("host", "python", "graph"):
            assert row[f"{name}_forward_us"] > 0
            assert row[f"{name}_train_us"] > 0
    assert "backward" in profile["text"]
    json.dumps(found, allow_nan=False)


def test_a_layer_that_is_off_is_not_timed():
    """Launches that do nothing give the wrong numbers, which must be noticed."""

    class Clock(gpu_host.Clock):
        def __getattribute__(self, name):
            return False if name == "dry" else super().__getattribute__(name)

        def host(self, *given):
            pytest.fail("timed")

    truth = gpu_host.truth_of(SHAPE, "cpu")
    with rehearsal():
        row = gpu_host.measure(SHAPE, "ours", truth, "cpu", Clock(dry=True))
    assert "off by" in row["failed"]


def test_no_row_begins_after_its_time():
    (row,) = gpu_host.rows("cpu", gpu_host.Clock(dry=True), 0.0, [SHAPE])
    assert row == {"stopped": "1 of 1 shapes not begun"}


def test_the_most_wanted_shape_comes_first_and_none_twice():
    wanted = list(gpu_host.shapes())
    assert wanted[0] == gpu_host.Shape("dts", 400, 1, 200, 88)
    assert len(set(wanted)) == len(wanted)
