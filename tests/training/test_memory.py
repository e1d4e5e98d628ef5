"""Memory: a run that cannot fit is refused by the settings that ask for it, before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deeprnn.data.music import MusicData, Songs
from deeprnn.data.text import TextData
from deeprnn.errors import UserError
from deeprnn.training import memory
from deeprnn.training.recipe import Recipe, override
from deeprnn.training.session import run_recipe

CPU = torch.device("cpu")


def music() -> MusicData:
    songs = Songs.pack([np.ones((n, 88), np.uint8) for n in (9, 40, 8)])
    return MusicData("toy", {"train": songs, "valid": songs[:1], "test": songs[:1]})


def text() -> TextData:
    ids = np.arange(400, dtype=np.int16) % 7
    return TextData("toy", "char", {"train": ids, "valid": ids[:50], "test": ids[:50]}, list("abcdefg"))


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (music(), {"data.lanes": 100_000_000}, "data.lanes=100,000,000 and data.chunk=40"),
        (music(), {"model.hidden": 10_000_000}, "model.hidden=10,000,000 would take"),
        (music(), {"model.hidden": 2**62}, "hidden_size must be at most 2,147,483,647, got 4,611"),
        (music(), {"model.hidden": 2**30}, "model.hidden=1,073"),
        (music(), {"seeds": list(range(100_000)), "model.hidden": 2000}, "of 100,000 models"),
        (
            music(),
            {"model.output": "nade", "model.nade_size": 10**9},
            "and model.nade_size=1,000,000,000 would take",
        ),
        (
            music(),
            {"model.cell": "gru", "model.cell_options": ["intermediate_sizes=99999999999"]},
            "model.cell=gru with intermediate_sizes=99999999999 and model.hidden=200 would take",
        ),
        (text(), {"data.lanes": 2**62}, "data.lanes=4,611"),
        (text(), {"data.lanes": 401}, "data.lanes=401 is more than the 400 symbols"),
        (music(), {"data.lanes": 58}, "data.lanes=58 is more than the 57 frames"),
        (text(), {"evaluation.streams": 2**50}, "evaluation.streams=1,125"),
    ],
)
def test_more_than_there_is_is_refused_and_leaves_nothing_behind(tmp_path, data, changes, message):
    with pytest.raises(UserError, match=message):
        run_recipe(override(Recipe(), {"stop.epochs": 1, **changes}), tmp_path / "run", data=data)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("data", [music(), text()], ids=["music", "text"])
@pytest.mark.parametrize("chunk", ["data.chunk", "evaluation.chunk"])
def test_a_chunk_beyond_the_data_is_all_of_it(tmp_path, data, chunk):
    """A person who asks for whole sequences writes a large number: no more is laid out than there are steps."""
    small = {"model.hidden": 4, "stop.epochs": 1, "evaluation.streams": 2}
    whole = run_recipe(override(Recipe(), {**small, chunk: 10**8}), tmp_path / "whole", data=data)
    fitting = run_recipe(override(Recipe(), {**small, chunk: 1600}), tmp_path / "fitting", data=data)
    assert whole[0]["test"] == fitting[0]["test"]


def test_ordinary_runs_fit_and_more_of_anything_needs_more():
    memory.check(Recipe(), music())
    before = list(memory.needs(Recipe(), music(), CPU).values())
    more = override(Recipe(), {"data.lanes": 4, "data.chunk": 20, "model.hidden": 400, "seeds": [1, 2]})
    assert all(a < b for a, b in zip(before, memory.needs(more, music(), CPU).values(), strict=True))
    together = memory.needs(more, music(), torch.device("cuda"))
    assert sum(together.values()) > sum(memory.needs(more, music(), CPU).values())


def test_what_is_free_is_some_of_the_machine(monkeypatch):
    free = memory.at_hand(CPU)
    assert free is not None
    assert 2**20 < free < 2**50
    monkeypatch.setattr(memory, "at_hand", lambda device: None)
    memory.check(override(Recipe(), {"model.hidden": 10**9}), music())  # nothing is known, nothing refused
