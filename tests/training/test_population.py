"""A member of a population equals the same model trained alone: bit for bit on the CPU."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training.loop import Trainer
from deeprnn.training.members import members_of
from deeprnn.training.recipe import override
from tests.training.toys import DEEP, music, recipe, text

CASES = {
    "noise": {},
    "deep": DEEP,
    "dropout": {**DEEP, "regulariser__weight_noise": 0.0, "regulariser__dropout_output": 0.5},
    "adam": {"optimiser__name": "adam", "optimiser__rate": 0.01, "data__lanes": 2},
    "own order": {"data__order": "own"},
    "averaged": {"optimiser__average": "ema", "optimiser__average_decay": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_a_member_equals_the_model_alone(case):
    together = Trainer(recipe(seeds=[1, 2, 3], **CASES[case]), music())
    together.train()
    alone = Trainer(recipe(seeds=[2], **CASES[case]), music())
    alone.train()
    assert torch.equal(together.updater.parameters[1], alone.updater.parameters[0])
    assert torch.equal(together.best[1], alone.best[0])
    assert together.schedule.members[1] == alone.schedule.members[0]
    assert together.results()[1] == alone.results()[0]
    assert not torch.equal(together.best[0], together.best[1])


def test_a_text_member_too():
    changes = {"data__chunk": 8, "data__lanes": 2, "schedule__name": "halving"}
    together = Trainer(recipe(seeds=[1, 2], **changes), text())
    alone = Trainer(recipe(seeds=[2], **changes), text())
    together.train()
    alone.train()
    assert torch.equal(together.best[1], alone.best[0])


def test_a_grid_of_rates():
    grid = recipe(seeds=[1, 2], rates=[1.0, 0.25], stop__epochs=2)
    assert [m.name for m in members_of(grid)] == [
        "seed-1-rate-1", "seed-1-rate-0.25", "seed-2-rate-1", "seed-2-rate-0.25",
    ]  # fmt: skip
    together = Trainer(grid, music())
    together.train()
    alone = Trainer(override(grid, {"seeds": [1], "rates": [], "optimiser.rate": 0.25}), music())
    alone.train()
    assert torch.equal(together.best[1], alone.best[0])


def test_members_stop_by_themselves_and_stay_as_they_are():
    wide = recipe(
        seeds=[1, 2, 3, 4], stop__epochs=0, stop__patience=1, schedule__patience=1, optimiser__rate=2.0
    )
    together = Trainer(wide, music())
    together.train()
    epochs = [m.best_epoch for m in together.schedule.members]
    for p, seed in enumerate((1, 2, 3, 4)):
        alone = Trainer(override(wide, {"seeds": [seed]}), music())
        alone.train()
        assert torch.equal(together.best[p], alone.best[0])
        assert epochs[p] == alone.schedule.members[0].best_epoch


def test_vmap_over_members_agrees_with_one_by_one():
    """The GPU's way of serving a population, run on the CPU: equal up to rounding."""
    settings = recipe(seeds=[1, 2], stop__epochs=1, **DEEP)
    loop, mapped = Trainer(settings, music()), Trainer(settings, music())
    mapped.updater.groups = [slice(0, 2)]
    mapped.updater.leaves = [mapped.updater._leaves(slice(0, 2))]
    mapped.updater.messages = [mapped.updater._message(slice(0, 2))]
    for trainer in (loop, mapped):
        trainer.train()
    torch.testing.assert_close(loop.updater.parameters, mapped.updater.parameters, rtol=1e-4, atol=1e-6)
