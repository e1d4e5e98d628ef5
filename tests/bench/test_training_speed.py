"""Populations and epochs are measured, and a wrong population is not."""

from __future__ import annotations

from benchmarks import training_speed

from deeprnn.backends import cpu


def test_a_population_is_right_before_it_is_timed(monkeypatch):
    rows = list(training_speed.population("cpu", tiny=True))
    assert [row["members"] for row in rows] == [1, 2]
    assert all(row["train_us"] > 0 and row["error"] < 1e-6 for row in rows)
    right = cpu.BACKEND.forward
    monkeypatch.setattr(cpu.BACKEND, "forward", lambda *a: [x * 1.001 for x in right(*a)])
    for row in training_speed.population("cpu", tiny=True):
        assert "off by" in row["failed"]
        assert "train_us" not in row
