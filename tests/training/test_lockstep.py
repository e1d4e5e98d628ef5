"""Members with recipes of their own: each equals the model trained alone, and only what may differ does."""

from __future__ import annotations

import pytest
import torch

from deeprnn.training import fused, lockstep
from deeprnn.training.loop import Trainer
from deeprnn.training.recipe import Recipe, field_names, override
from tests.training.toys import music, recipe

DIFFERENT = [
    {},
    {"optimiser.rate": 0.3, "regulariser.weight_noise": 0.0},
    {"optimiser.clip": 0.1, "regulariser.weight_noise": 0.2, "seeds": [7]},
    {"optimiser.clip": 0.0, "init.input_std": 0.5, "schedule.beta": 3.0, "schedule.patience": 1},
    {"stop.patience": 1, "schedule.patience": 1, "schedule.restore_best": False, "optimiser.rate": 4.0},
]


def variants() -> list[Recipe]:
    return [override(recipe(seeds=[1], stop__epochs=6), changes) for changes in DIFFERENT]


@pytest.mark.parametrize("schedule", ["paper", "halving"])
def test_a_member_with_a_recipe_of_its_own_equals_the_model_alone(schedule):
    own = [override(r, {"schedule.name": schedule}) for r in variants()]
    assert lockstep.together(own, 8) == [[0, 1, 2, 3, 4]]
    together = Trainer(lockstep.shared_recipe(own), music(), variants=own)
    together.train()
    for p, variant in enumerate(own):
        alone = Trainer(variant, music())
        alone.train()
        assert torch.equal(together.best[p], alone.best[0]), DIFFERENT[p]
        assert together.schedule.members[p] == alone.schedule.members[0], DIFFERENT[p]
    assert len({tuple(row.tolist()) for row in together.best}) == len(own)


def test_recipes_of_other_shapes_are_kept_apart():
    base = recipe(seeds=[1])
    changed = [
        {},
        {"model.hidden": [9]},
        {"optimiser.rate": 0.5},
        {"data.chunk": 7},
        {"optimiser.momentum": 0.5},
    ]
    assert lockstep.together([override(base, c) for c in changed], 8) == [[0, 2], [1], [3], [4]]
    assert lockstep.together([base] * 5, 2) == [[0, 1], [2, 3], [4]]


DEEP = {"model.intermediate": [7], "model.output_hidden": [6], "optimiser.rate": 0.7, "stop.epochs": 3}
CHANGED = {
    "data.chunk": 7, "data.lanes": 2, "data.order": "own", "data.order_seed": 3, "data.random_transpose": 4,
    "model.hidden": [9], "model.intermediate": [5], "model.output_hidden": [5], "model.shortcut": "all",
    "model.input_to": "all", "model.unit": "tanh", "model.intermediate_unit": "relu", "model.output_unit": "tanh",
    "model.output": "nade", "model.input_hidden": [8],
    "init.input_std": 0.5, "init.output_std": 0.5, "init.output_hidden_std": 0.5, "init.incoming": 3,
    "init.spectral_norm": 0.5, "init.bias": 0.3, "init.output_bias": 0.3,
    "optimiser.name": "adam", "optimiser.rate": 0.3, "optimiser.clip": 0.1, "optimiser.average": "ema",
    "schedule.name": "cosine", "schedule.warmup": 5, "regulariser.weight_noise": 0.2, "regulariser.dropout_input": 0.2,
    "regulariser.dropout_state": 0.2, "regulariser.dropout_intermediate": 0.2, "regulariser.dropout_output": 0.2,
    "regulariser.dropconnect": 0.3, "stop.epochs": 2, "seeds": [4],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_counts_in_a_member_of_its_own_as_it_does_alone(name):
    base = override(recipe(seeds=[1]), DEEP)
    changed = override(base, {name: CHANGED[name]})
    alone, member = Trainer(changed, music()), Trainer(changed, music(), variants=[changed])
    before = alone.best.clone()
    alone.train()
    member.train()
    assert not torch.equal(alone.best, before)
    assert torch.equal(member.best, alone.best)


def test_in_orders_and_lanes_of_their_own_members_cannot_keep_step():
    base = recipe(seeds=[1], data__order="own", data__lanes=2)
    assert lockstep.together([base, override(base, {"seeds": [2]})], 8) == [[0], [1]]


def test_every_field_that_may_differ_exists():
    known = field_names()
    assert all(any(n.startswith(own) for n in known) for own in lockstep.MAY_DIFFER)
    assert not lockstep.may_differ("model.hidden")
    assert lockstep.may_differ("init.input_std")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_noise_of_each_members_own_size(device):
    parameters, seeds = torch.zeros(3, 4096, device=device), torch.tensor([5, 6, 7], device=device)
    stds, step = torch.tensor([0.0, 0.5, 2.0], device=device), torch.tensor(3, device=device)
    noisy = fused.add_noise(parameters, stds, seeds, step, torch.empty_like(parameters), count=4000)
    assert noisy[0].abs().max() == 0
    assert noisy[1, :4000].std().item() == pytest.approx(0.5, rel=0.05)
    one = fused.add_noise(parameters[2:], 2.0, seeds[2:], step, torch.empty_like(parameters[2:]), count=4000)
    assert torch.equal(noisy[2:], one)
    assert noisy[:, 4000:].abs().max() == 0


@pytest.mark.gpu
def test_on_a_gpu_members_of_their_own_match_the_model_alone():
    own = variants()
    there = Trainer(lockstep.shared_recipe(own), music(), variants=own, device="cuda")
    alone = [Trainer(variant, music(), device="cuda") for variant in own]
    for trainer in (there, *alone):
        trainer.train_epoch()
    for p, trainer in enumerate(alone):
        torch.testing.assert_close(
            there.updater.parameters[p], trainer.updater.parameters[0], rtol=1e-3, atol=1e-4
        )
