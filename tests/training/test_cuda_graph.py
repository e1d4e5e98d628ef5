"""What runs the updates: CUDA graphs of populations that train side by side, or any other engine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from benchmarks.rehearsal import rehearsal
from torch.utils._python_dispatch import TorchDispatchMode

from deeprnn.data.batching import music_chunks, text_chunks
from deeprnn.training import cuda_graph
from deeprnn.training.engine import Eager
from deeprnn.training.loop import Trainer
from deeprnn.training.session import run_recipe
from tests.training.toys import music, recipe, text


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


@pytest.mark.parametrize("kind", ["songs, one lane", "songs, three lanes", "text"])
def test_a_batch_of_the_device_plan_is_the_plan_s(kind):
    """Also after another epoch's order was loaded, and for pitches that fill no whole byte."""
    songs, lanes = music(pitches=13).splits["train"], 1 + 2 * kind.endswith("three lanes")
    plans = [
        text_chunks(text().splits["train"], chunk=8, lanes=3)
        if kind == "text"
        else music_chunks(songs, chunk=8, lanes=lanes, seed=1, epoch=epoch)
        for epoch in (1, 2)
    ]
    device_plan = cuda_graph.DevicePlan(plans[0], torch.device("cpu"))
    for plan in plans:
        assert device_plan.fits(plan)
        device_plan.load(plan)
        for index, length in enumerate(plan.lengths):
            found = device_plan.batch(torch.tensor(index), length)
            for name, mine, expected in zip(found._fields, found, plan[index], strict=True):
                assert mine.dtype == expected.dtype, name
                assert torch.equal(mine, expected), name


def test_a_text_is_laid_out_once():
    trainer = Trainer(recipe(data__chunk=8, data__lanes=2), text())
    (first,), (again,) = trainer.plans(1), trainer.plans(2)
    assert first is again
    plan = cuda_graph.DevicePlan(first, torch.device("cpu"))
    plan.index.zero_()
    plan.load(again)
    assert not plan.index.any(), "what is there already is not brought again"
    plan.load(text_chunks(text().splits["train"], chunk=8, lanes=2))
    assert plan.index.any()
    songs = Trainer(recipe(data__chunk=8), music())
    assert songs.plans(1)[0] is not songs.plans(2)[0]


def computes(function) -> bool:
    """Whether an operation is a launch on a GPU: neither a view nor memory alone."""
    schema = function._schema
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return not views and not schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_local_scalar"))


class Launches(TorchDispatchMode):
    """Those of torch's operations; `own` counts ours."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.own = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten" and computes(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def launched(self) -> None:
        self.own += 1


def test_an_update_at_batch_size_one_is_few_launches():
    """Its time on a GPU is their number, about two microseconds each: the paper's music has nothing else to do."""
    count = Launches()
    with rehearsal(launched=count.launched, training=True):
        trainer = Trainer(recipe(model__kind="rnn", model__hidden=[40], data__chunk=8), music(pitches=88))
        updater = trainer.updater
        plan = cuda_graph.DevicePlan(trainer.plan(trainer.members[0], 1), torch.device("cpu"))
        for mode in (nullcontext(), count):  # what is made once is made in the first
            count.own = 0
            with mode:
                updater.update([plan.batch(torch.tensor(0), 8)])
    assert count.own >= 4, "noise, both directions, the judgement and the step"
    assert len(count.names) + count.own <= 62, count.names


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
