"""The field regulariser.commutative: whose gradient it adds, and for which models."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from deeprnn.data.batching import music_chunks
from deeprnn.errors import UserError
from deeprnn.model.models import build
from deeprnn.training.commutative import commutativity
from deeprnn.training.loop import Trainer
from deeprnn.training.session import run_recipe
from deeprnn.training.updater import Scored
from tests.training import toys

DEEP = {"model__input_hidden": [5, 8], "model__intermediate": [7], "model__shortcut": "last"}


def one_batch(recipe):
    data = toys.music()
    model = build(
        recipe.model.spec(data.size, False, recipe.regulariser.dropout), recipe.init, seed=3
    ).double()
    plan = music_chunks(data.splits["train"], chunk=10, lanes=2, lengths=(10,))
    batch = next(plan[i] for i in range(len(plan)) if not bool(plan[i].mask.all()))
    return model, batch._replace(x=batch.x.double(), y=batch.y.double())


def by_hand(model, batch, state):
    """The penalty step by step, pair by pair, from the module's own matrices."""
    level, total, count, h = model.levels[0], 0.0, 0, state[0]

    def plus(e, h):
        z = torch.sigmoid(level.W1 @ h + (level.U1 @ e if level.spec.inputs[0] else 0.0) + level.b1)
        return torch.sigmoid(
            level.W2 @ z + (level.U2 @ e if level.spec.inputs[1] else 0.0) + level.S2 @ h + level.b2
        )

    for t in range(len(batch.x)):
        h = torch.where(batch.reset[t][:, None], 0.0, h)
        for b in range(batch.x.shape[1]):
            e = level.embed_input(batch.x[t, b])
            if batch.mask[t, b]:
                total, count = total + ((plus(e, h[b]) - plus(h[b], e)) ** 2).sum(), count + 1
        h = level(batch.x[t], h)
    return total / count


@pytest.mark.parametrize("input_to", ["first", "last", "all"])
@torch.no_grad()
def test_the_penalty_is_the_mean_over_the_pairs_that_training_meets(input_to):
    model, batch = one_batch(toys.recipe(**DEEP, model__input_to=input_to))
    before = (torch.rand(2, 8, dtype=torch.float64),)
    states, _ = model.level_states(batch.x, before, batch.reset)
    got = commutativity(model, batch.x, states, before, batch.reset, batch.mask)
    torch.testing.assert_close(got, by_hand(model, batch, before))


def test_the_operator_learns_to_commute_and_what_is_reported_stays_nats():
    recipe = toys.recipe(**DEEP, model__input_to="all")
    model, batch = one_batch(recipe)
    before = model.initial_state(2)
    plain, state = Scored(model)(batch, before, None)
    scored = Scored(model, 2.0)
    total, other = scored(batch, before, None)
    assert total.item() == plain.item()
    torch.testing.assert_close(other[0], state[0])
    states, _ = model.level_states(batch.x, before, batch.reset)
    penalty = commutativity(model, batch.x, states, before, batch.reset, batch.mask)
    names = [n for n, _ in model.named_parameters()]
    with_penalty, without, alone = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
        for loss in (total, plain, penalty)
    )
    count = batch.mask.sum()
    for name, a, b, c in zip(names, with_penalty, without, alone, strict=True):
        torch.testing.assert_close(a, b if c is None else b + 2.0 * count * c)
        assert (c is None) == name.startswith(("levels.0.E", "levels.0.e", "predict")), name


def test_members_of_a_population_equal_the_model_alone_under_it():
    changes = {**DEEP, "regulariser__commutative": 0.5, "stop__epochs": 1}
    both = Trainer(toys.recipe(**changes, seeds=[1, 2]), toys.music())
    both.train()
    alone = Trainer(toys.recipe(**changes, seeds=[2]), toys.music())
    alone.train()
    assert torch.equal(both.updater.parameters[1], alone.updater.parameters[0])
    without = Trainer(toys.recipe(**{**changes, "regulariser__commutative": 0.0}, seeds=[2]), toys.music())
    without.train()
    assert not torch.equal(without.updater.parameters[0], alone.updater.parameters[0])


def test_it_trains_under_vmap_as_on_a_gpu():
    model, batch = one_batch(toys.recipe(**DEEP))
    scored = Scored(model, 1.0)
    named = {n: torch.stack([p.detach(), 1.1 * p.detach()]) for n, p in scored.named_parameters()}
    states = tuple(torch.zeros(2, *h.shape, dtype=h.dtype) for h in model.initial_state(2))
    call = lambda parameters, state: functional_call(scored, parameters, (batch, state, None))[0]  # noqa: E731
    got = torch.func.vmap(call)(named, states)
    for p in range(2):
        torch.testing.assert_close(
            got[p], call({n: v[p] for n, v in named.items()}, tuple(h[p] for h in states))
        )


@pytest.mark.gpu
def test_on_a_gpu_it_trains_as_on_the_cpu():
    made = toys.recipe(
        **DEEP, regulariser__commutative=0.5, regulariser__weight_noise=0.0, seeds=[1, 2], stop__epochs=2
    )
    there, here = Trainer(made, toys.music(), device="cuda"), Trainer(made, toys.music())
    for trainer in (there, here):
        trainer.train()
    torch.testing.assert_close(there.updater.parameters.cpu(), here.updater.parameters, rtol=1e-3, atol=1e-4)


def test_a_stack_and_a_text_with_an_input_layer_have_levels_that_can_commute():
    data = toys.text()
    recipe = toys.recipe(
        data__name="toy-text",
        model__hidden=[8, 8],
        model__input_hidden=[8],
        regulariser__commutative=0.1,
        stop__epochs=1,
    )
    trainer = Trainer(recipe, data)
    before = trainer.updater.parameters.clone()
    trainer.train()
    assert torch.isfinite(trainer.updater.parameters).all()
    assert not torch.equal(before, trainer.updater.parameters)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "--model.input-hidden 8"),
        ({"model__input_hidden": [5]}, "state's size, 8"),
        ({"model__input_hidden": [8], "regulariser__commutative": -1.0}, "not negative"),
        ({"model__input_hidden": [8], "regulariser__commutative": float("nan")}, "not negative"),
    ],
)
def test_what_cannot_commute_is_refused_before_there_is_a_folder(tmp_path, changes, said):
    def train():
        recipe = toys.recipe(**{"regulariser__commutative": 0.1, **changes})
        run_recipe(recipe, tmp_path / "run", data=toys.music())

    with pytest.raises(UserError, match=said):
        train()
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_a_deep_input_function_is_a_recipe_field_and_not_for_cells():
    data = toys.music()
    trainer = Trainer(toys.recipe(model__input_hidden=[5, 9]), data)
    sizes = [tuple(trainer.model.get_parameter(f"levels.0.E{i}").shape) for i in (1, 2)]
    assert sizes == [(5, data.size), (9, 5)]
    with pytest.raises(UserError, match="leave one of the two out"):
        Trainer(toys.recipe(model__input_hidden=[5], model__cell="gru"), data)
    with pytest.raises(UserError, match="input_mlp_sizes"):
        Trainer(toys.recipe(model__input_hidden=[0]), data)
