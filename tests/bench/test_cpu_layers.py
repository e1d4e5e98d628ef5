"""The measurement of layers on a CPU: in pieces, and nothing wrong is timed."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks import cpu_layers
from benchmarks.records import read
from benchmarks.shapes import CPU_GROUPS, JAX, LOOP, OURS, STEP, TORCH, Shape

from deeprnn.backends import cpu

SMALL = {"small": (lambda: iter([Shape("rnn", 6, 1, 2, 3), Shape("dts", 6, 2, 2, 3, depth=2)]), (OURS, TORCH, LOOP)),
         "single": (lambda: iter([Shape("lstm", 6, 1, 1, 3)]), (OURS, STEP, TORCH))}  # fmt: skip


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The script with small shapes, writing into one file."""
    CPU_GROUPS_before = dict(CPU_GROUPS)
    CPU_GROUPS.clear()
    CPU_GROUPS.update(SMALL)
    monkeypatch.setattr(cpu_layers, "ROUNDS", (1, 1))
    file = tmp_path / "cpu.jsonl"

    def call(*options: str) -> list[dict]:
        monkeypatch.setattr(sys, "argv", ["cpu_layers.py", str(file), "--threads", "1", *options])
        assert cpu_layers.main() == 0
        return [json.loads(line) for line in file.read_text().splitlines()]

    yield call
    CPU_GROUPS.clear()
    CPU_GROUPS.update(CPU_GROUPS_before)


def test_it_goes_on_where_it_stopped_and_measures_nothing_twice(run, tmp_path):
    assert all("about" in row for row in run("--minutes", "0"))
    rows = [row for row in run() if "peer" in row]
    assert [row["peer"] for row in rows] == [OURS, TORCH, LOOP, OURS, TORCH, LOOP, OURS, STEP, TORCH]
    for row in rows:
        assert "failed" not in row, row
        assert row["python_train_us"] >= row["python_train_us_min"] > 0
        assert row["error"] < 1e-6
    assert len(run()) == 2 + len(rows), "a third call finds nothing to do"
    found = read(tmp_path / "cpu.jsonl")
    assert found.microseconds(Shape("rnn", 6, 1, 2, 3), OURS) == rows[0]["python_train_us"] / 2


def test_goals_come_first_and_a_shape_of_two_groups_once(tmp_path):
    wanted = cpu_layers.still_wanted(tmp_path / "none", CPU_GROUPS, {})
    pairs = [(shape, peer) for shape, peers in wanted for peer in peers if peer != OURS]
    assert len(pairs) == len(set(pairs))
    goals = list(CPU_GROUPS["goals"][0]())
    assert [shape for shape, _ in wanted][: len(goals)] == goals
    assert {shape for shape, _ in wanted} == {s for shapes, _ in CPU_GROUPS.values() for s in shapes()}


def test_rows_of_another_commit_are_measured_anew(run, tmp_path):
    run("--only", "single")
    text = (tmp_path / "cpu.jsonl").read_text().replace('"commit": "', '"commit": "other')
    (tmp_path / "cpu.jsonl").write_text(text)
    assert sum("peer" in row for row in run("--only", "single")) == 6


def test_a_layer_that_is_off_is_not_timed(run, monkeypatch):
    monkeypatch.setattr(cpu.BACKEND, "direct_call", lambda *a: None)
    for name in ("forward", "forward_with_projection"):
        right = getattr(cpu.BACKEND, name)
        wrong = lambda *a, right=right: [x * 1.001 for x in right(*a)]  # noqa: E731
        monkeypatch.setattr(cpu.BACKEND, name, wrong)
    ours, theirs, _ = [row for row in run("--only", "small") if "peer" in row][:3]
    assert "off by" in ours["failed"]
    assert "python_train_us" not in ours
    assert theirs["python_train_us"] > 0


def test_what_is_wrong_in_later_calls_alone_is_not_timed(run, monkeypatch):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit.direct import DirectCall

    right = DirectCall.forward

    def wrong(*given):
        y, *rest = right(*given)
        return [y * 1.001, *rest]

    monkeypatch.setattr(DirectCall, "forward", wrong)
    ours = next(row for row in run("--only", "small") if row.get("peer") == OURS)
    assert "off by" in ours["failed"]


def test_a_long_sequence_is_compared_over_its_beginning():
    bench = cpu_layers.CpuBench(Shape("rnn", 4, 1, 3000, 2), sample=0.0)
    peer = bench.peer(OURS)
    assert peer.results is not None
    assert peer.results()[0].shape == peer.truth()[0].shape == (2, 1000, 1, 4)
    assert len(peer.run()) == 3000


def test_jax_is_left_out_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(cpu_layers, "find_spec", lambda name: None)
    assert cpu_layers.peers_of(Shape("rnn", 6, 1, 2), (OURS, JAX)) == [OURS]


def test_jax_is_measured_where_it_is_installed():
    pytest.importorskip("jax")
    row = list(cpu_layers.rows(Shape("gru", 6, 1, 2, 3), [OURS, JAX], sample=0.0))[1]
    assert row["python_train_us"] > 0
    assert row["error"] < 1e-6
