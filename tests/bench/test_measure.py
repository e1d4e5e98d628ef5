"""The benchmark: equality before speed, ratios, memory, and the command around it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from deeprnn import cli
from deeprnn.backends import cpu
from deeprnn.bench import measure as measuring
from deeprnn.bench import peers
from deeprnn.bench.measure import Row, measure
from deeprnn.bench.peers import Work
from deeprnn.commands import bench
from deeprnn.commands.bench import with_ratios

WORK = Work(steps=4, batch=2, hidden=9, inputs=5)


def test_every_peer_on_the_cpu_is_right_and_timed():
    rows = measure(WORK, peers.peers_for("cpu"), repeats=2)
    assert [row.peer for row in rows] == list(peers.peers_for("cpu"))
    for row in rows:
        assert row.failed is None, f"{row.peer}: {row.failed}"
        assert row.error is not None
        assert row.error < measuring.TOLERANCE
        assert row.forward_us
        assert row.train_us
        assert len(row.times["train"]) == 2


def test_on_a_cpu_the_hosts_time_does_not_apply(capsys):
    assert cli.main(["bench", "--device", "cpu", "--steps", "2", "--hidden", "4", "--batch", "1", "--repeats", "1",
                     "--peers", "ours"]) == 0  # fmt: skip
    assert "host: not applicable" in capsys.readouterr().out


def test_the_hosts_time_is_taken_with_an_empty_queue_and_without_waiting(monkeypatch):
    log, now = [], iter((10.0, 10.5))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: log.append("clock") or next(now))
    assert measuring.host_seconds_of(lambda: log.append("call")) == 0.5
    assert log == ["wait", "clock", "call", "clock", "wait"]


@pytest.mark.parametrize("depth", [1, 3])
def test_other_depths(depth):
    (row,) = measure(Work(3, 1, 6, depth, inputs=4), ["ours"], repeats=1)
    assert row.failed is None


@pytest.fixture
def spoil(monkeypatch):
    """Make the CPU backend return something else than what it computed."""

    def spoilt(change):
        for name in ("forward", "forward_with_projection"):
            right = getattr(cpu.BACKEND, name)
            wrong = lambda *a, right=right: [change(x) for x in right(*a)]  # noqa: E731
            monkeypatch.setattr(cpu.BACKEND, name, wrong)

    return spoilt


def test_a_backend_that_is_wrong_gets_no_speed(spoil):
    spoil(lambda x: x * 1.001)
    ours, loop = measure(WORK, ["ours", "eager loop"], repeats=1)
    assert "off by" in str(ours.failed)
    assert ours.forward_us is ours.train_us is ours.train_us_min is None
    assert loop.failed is None
    rows = with_ratios([ours, loop])
    assert rows[1]["train_ratio"] is None, "no ratio to a backend that is wrong"


@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_wrong_from_a_later_call_on_is_refused(monkeypatch, gradients):
    """A layer goes another way when a shape is met again, and without gradients: that way is timed."""
    right, calls = peers.Bench.peer, []

    def peer(self, name):
        made = right(self, name)
        run = made.run

        def later() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            return run() * (
                1.0 + 0.01 * (torch.is_grad_enabled() is gradients and calls.count(gradients) > 2)
            )

        return replace(made, run=later)

    monkeypatch.setattr(peers.Bench, "peer", peer)
    (row,) = measure(WORK, ["ours"], repeats=1)
    assert "off by" in str(row.failed)
    assert ("without gradients" in str(row.failed)) is not gradients


def test_nan_is_refused(spoil):
    spoil(lambda x: x * float("nan"))
    (row,) = measure(WORK, ["ours"], repeats=1)
    assert row.failed


def test_ratios_are_multiples_of_ours():
    ours, other = Row("ours", WORK, train_us=2.0, forward_us=1.0), Row("eager loop", WORK, train_us=9.0)
    rows = with_ratios([ours, other])
    assert rows[0]["train_ratio"] == 1.0
    assert rows[1]["train_ratio"] == 4.5
    assert rows[1]["forward_ratio"] is None


def test_peak_memory_sees_a_large_tensor():
    peak = measuring.peak_memory(lambda: torch.ones(40_000_000), "cpu")  # 160 MB
    if peak is None:
        pytest.skip("the system does not tell peak memory")
    assert 120 < peak < 400


def test_the_command_prints_json_and_nothing_else(capsys):
    arguments = "bench --device cpu --batch 1 --hidden 6 --steps 3 --repeats 1 --peers ours nn.RNN --json"
    assert cli.main(arguments.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["peer"] for row in report["rows"]] == ["ours", "nn.RNN"]
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["torch"] == torch.__version__
    assert "commit" in report


def test_the_command_prints_a_table_and_fails_when_ours_is_wrong(capsys, spoil):
    shape = ["--batch", "1", "--hidden", "6", "--steps", "3"]
    arguments = ["bench", "--device", "cpu", *shape, "--repeats", "1", "--peers", "ours"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert "H=6 depth 2 B=1" in table
    assert "…" not in table, "every column is readable at 80 characters"
    spoil(lambda x: x + 1)
    assert cli.main(arguments) == 1
    assert "not timed" in capsys.readouterr().out


def test_the_command_times_first_calls_in_fresh_processes(capsys):
    arguments = "bench --device cpu --batch 1 --hidden 6 --steps 3 --repeats 1 --peers ours --first-call yes"
    assert cli.main([*arguments.split(), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["first_call"]
    assert first["cold_s"] > 0
    assert min(first["cached_s"], first["cached_again_s"]) > 0
    assert {"forward", "backward", "again"} <= set(first["parts_s"])
    text = bench._first_call_text(first)
    assert "kernels on disk" in text
    assert "failed" not in first


def test_a_peer_that_cannot_run_here_is_a_row_and_not_the_end(monkeypatch):
    def broken(self):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(peers.Bench, "_compiled", broken)
    failed, ours = measure(WORK, ["torch.compile", "ours"], repeats=1)
    assert failed.failed == "RuntimeError: no compiler"
    assert failed.train_us is None
    assert ours.train_us


def test_peers_of_a_gpu_have_ours_in_a_graph_and_called():
    names = peers.peers_for("cuda", compiled=True)
    assert {"ours", "ours, called", "eager loop", "CUDA graph", "nn.RNN", "nn.RNN x2", "nn.LSTM"} <= set(
        names
    )
    assert {"torch.compile", "torch.compile, CUDA graph", "nn.RNN, CUDA graph", "nn.LSTM, CUDA graph"} <= set(
        names
    )


def test_ratios_are_of_like_with_like():
    """On a GPU ours has two rows, in a graph and called from Python."""
    times = {"ours": 2.0, "ours, called": 10.0, "nn.RNN": 20.0, "nn.RNN, CUDA graph": 8.0}
    rows = with_ratios([Row(name, WORK, train_us=us) for name, us in times.items()])
    assert [row["train_ratio"] for row in rows] == [1.0, 1.0, 2.0, 4.0]


def test_jax_computes_the_same_function():
    pytest.importorskip("jax")
    (row,) = measure(WORK, [peers.JAX], repeats=1)
    assert row.failed is None
    assert row.train_us


@pytest.mark.parametrize("wrong", ["--steps 0", "--peers nobody", "--batch 0"])
def test_wrong_settings_are_explained(wrong, capsys):
    assert cli.main(["bench", "--device", "cpu", *wrong.split()]) == 2
    assert "error: --" in capsys.readouterr().err
