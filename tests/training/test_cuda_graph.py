"""What runs the updates: CUDA graphs of populations that train side by side, or any other engine."""

from __future__ import annotations

import torch

from deeprnn.training import cuda_graph
from deeprnn.training.loop import Eager
from deeprnn.training.session import run_recipe
from tests.training.toys import music, recipe


def test_streams_are_lent_and_never_shared(monkeypatch):
    gpu, seen = 0, {0: set(), 1: set()}
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu)
    monkeypatch.setattr(cuda_graph, "_idle_streams", {})
    for turn in range(100):
        gpu = turn % 2
        with cuda_graph.own_stream() as first, cuda_graph.own_stream() as second:
            assert first is not second
            seen[gpu] |= {first, second}
    assert len(seen[0]) == len(seen[1]) == 2
    assert not seen[0] & seen[1], "a stream belongs to one GPU"


def test_a_run_is_driven_by_the_engine_it_is_given(tmp_path):
    steps = []

    class Counting(Eager):
        def step(self, index):
            steps.append(index)
            super().step(index)

    settings = recipe(stop__epochs=2)
    given = run_recipe(settings, tmp_path / "given", data=music(), engine=Counting)
    assert given == run_recipe(settings, tmp_path / "usual", data=music())
    assert steps == 2 * list(range(len(steps) // 2))
    assert steps
