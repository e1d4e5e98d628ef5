"""DropConnect equals weights that are masked by hand, and composes with everything else that makes a step."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from deeprnn.errors import UserError
from deeprnn.model import losses
from deeprnn.reproduction.entries import identity
from deeprnn.training import rng
from deeprnn.training.dropconnect import DropConnect, recurrent_matrices
from deeprnn.training.evaluate import evaluate
from deeprnn.training.loop import Trainer
from deeprnn.training.noise import dropout_masks
from deeprnn.training.recipe import Recipe, override
from tests.training.toys import DEEP, music, recipe, text

LSTM = {"model__cell": "lstm", "model__hidden": [8, 6]}
RHN = {"model__cell": "rhn", "model__cell_options": ["depth=2"]}
P = 0.4


@pytest.fixture(autouse=True)
def one_thread():
    """Models of a few units: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def names_of(**changes) -> list[str]:
    made = recipe(**changes)
    return sorted(recurrent_matrices(made.model.spec(12, False, made.regulariser.dropout)))


def test_the_recurrent_matrices_are_those_inside_the_loop():
    assert names_of() == ["levels.0.W1"]
    assert names_of(**DEEP) == ["levels.0.S2", "levels.0.W1", "levels.0.W2"]
    assert names_of(**LSTM) == ["levels.0.cell.weight_hh", "levels.1.cell.weight_hh"]
    assert names_of(**RHN) == ["levels.0.cell.weight_hh_d1", "levels.0.cell.weight_hh_d2"]
    deep = names_of(model__cell="gru", model__intermediate=[5])
    assert deep == ["levels.0.cell.weight_hh", "levels.0.cell.weight_zh_d2"]


def first_update(trainer: Trainer):
    return trainer.plans(1)[0][0]


@pytest.mark.parametrize("fields", [DEEP, LSTM, RHN], ids=["dots", "lstm", "rhn"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_an_update_equals_weights_masked_by_hand_and_so_does_its_gradient(fields, noise):
    made = recipe(**fields, regulariser__weight_noise=noise, regulariser__dropconnect=P, optimiser__clip=0.0)
    trainer = Trainer(made, music())
    updater, layout = trainer.updater, trainer.layout
    before = layout.views(updater.parameters[0].clone())
    batch = first_update(trainer)
    updater.update([batch])

    uniform = torch.rand(updater.dropconnect.count, generator=rng.generator(1, rng.DROPCONNECT, 0))
    drawn = torch.zeros(layout.width)
    drawn[: layout.matrices] = torch.randn(layout.matrices, generator=rng.generator(1, rng.NOISE, 0)) * noise
    noises, at = layout.views(drawn), 0
    leaves, effective = {}, {}
    for name, value in before.items():
        leaves[name] = value.clone().requires_grad_()
        effective[name] = leaves[name] + noises[name]
        if name in recurrent_matrices(trainer.spec):
            mask = uniform[at : at + value.numel()].view_as(value) >= P
            effective[name] = torch.where(mask, effective[name] / (1 - P), 0.0)
            at += value.numel()
    assert at == len(uniform)
    logits, _ = functional_call(trainer.model, effective, (batch.x, None, batch.reset))
    nats, count = losses.nll("bernoulli", logits, batch.y, batch.mask)
    grads = torch.autograd.grad(nats / count, list(leaves.values()))
    after = layout.views(updater.parameters[0])
    for (name, leaf), g in zip(leaves.items(), grads, strict=True):
        torch.testing.assert_close(after[name], (leaf - g).detach(), rtol=2e-5, atol=2e-6)


def test_masks_are_fresh_for_every_update_and_member_and_the_same_in_any_company():
    trainer = Trainer(recipe(seeds=[1, 2], regulariser__dropconnect=P, model__hidden=[40]), music())
    layout, spec = trainer.layout, trainer.spec
    both = DropConnect(P, spec, layout, [1, 2], torch.device("cpu"))
    first, second = (both.draw(slice(0, 2), torch.tensor(u)) for u in (0, 1))
    assert first is not None
    assert second is not None
    assert first.shape == (2, 1600)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    alone = DropConnect(P, spec, layout, [2], torch.device("cpu")).draw(slice(0, 1), torch.tensor(1))
    assert alone is not None
    assert torch.equal(alone[0], second[1])
    assert first.unique().tolist() == pytest.approx([0, 1 / (1 - P)])
    assert (first == 0).float().mean().item() == pytest.approx(P, abs=0.03)


ALL = {
    "model__cell": "lstm",
    "model__hidden": [7, 6],
    "model__embedding": 6,
    "model__tied": True,
    "regulariser__dropconnect": P,
    "regulariser__dropout_input": 0.2,
    "regulariser__dropout_state": 0.2,
    "regulariser__dropout_levels": 0.2,
    "regulariser__dropout_output": 0.2,
    "regulariser__dropout_symbols": 0.1,
    "regulariser__dropout_per_sequence": True,
    "optimiser__name": "adamw",
    "optimiser__rate": 0.01,
    "optimiser__weight_decay": 0.1,
    "optimiser__average": "ema",
    "optimiser__average_decay": 0.9,
    "data__lanes": 2,
}
"""every field of the section at once, for text"""


def test_with_all_fields_together_a_member_equals_the_model_alone():
    together = Trainer(recipe(seeds=[1, 2], stop__epochs=2, **ALL), text())
    alone = Trainer(recipe(seeds=[2], stop__epochs=2, **ALL), text())
    for trainer in (together, alone):
        trainer.train()
    assert torch.equal(together.updater.parameters[1], alone.updater.parameters[0])
    assert torch.equal(together.best[1], alone.best[0])
    assert together.results()[1] == alone.results()[0]
    assert not torch.equal(together.best[0], together.best[1])


def test_members_under_vmap_agree_with_one_by_one():
    """The GPU's way of serving a population, run on the CPU: equal up to rounding."""
    made = recipe(seeds=[1, 2], **{**ALL, "stop__epochs": 1})
    loop, mapped = Trainer(made, text()), Trainer(made, text())
    mapped.updater.groups = [slice(0, 2)]
    mapped.updater.leaves = [mapped.updater._leaves(slice(0, 2))]
    mapped.updater.messages = [mapped.updater._message(slice(0, 2))]
    for trainer in (loop, mapped):
        trainer.train()
    torch.testing.assert_close(loop.updater.parameters, mapped.updater.parameters, rtol=1e-3, atol=1e-5)


def test_evaluation_sees_whole_weights_and_no_dropout():
    trainer = Trainer(recipe(**ALL), text())
    trainer.train()
    plain = override(recipe(**ALL), {f"regulariser.{n}": 0.0 for n in ("dropconnect", "dropout_state")})
    model = Trainer(plain, text()).model
    model.load_state_dict(trainer.parameters(0))
    result = trainer.results()[0]
    assert result is not None
    assert evaluate(model, text(), "test") == result["test"]
    trainer.model.eval()
    assert dropout_masks(trainer.model, 5, 2, torch.tensor([1]), torch.tensor(0)) is None


def test_weight_decay_and_averaging_act_on_the_weights_themselves_by_hand():
    fields = {"regulariser__dropconnect": P, "regulariser__weight_noise": 0.0, "optimiser__clip": 0.0}
    decayed = {"optimiser__name": "adamw", "optimiser__rate": 0.05, "optimiser__weight_decay": 0.5}
    average = {"optimiser__average": "ema", "optimiser__average_decay": 0.6}
    trainer = Trainer(recipe(**fields, **decayed, **average, schedule__name="constant"), music())
    updater, plan = trainer.updater, trainer.plans(1)[0]
    p, m, v, mean = updater.parameters[0].double().clone(), 0.0, 0.0, 0.0
    for update in range(3):
        updater.update([plan[update]])
        g = updater.messages[0].gradient[0].double()  # clipping is off: the step's own
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 0.05 * 0.5 * p
        correction = (1 - 0.999 ** (update + 1)) ** 0.5 / (1 - 0.9 ** (update + 1))
        p = p - 0.05 * correction * m / (v.sqrt() + 1e-8)
        weight = max(1 / (update + 1), 0.4)
        mean = mean + weight * (p - mean)
        torch.testing.assert_close(updater.parameters[0].double(), p, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(updater.evaluated[0].double(), mean, rtol=1e-4, atol=1e-4)
    dropped = (
        updater.messages[0].gradient[0][updater.dropconnect.spans[0][0] : updater.dropconnect.spans[0][1]]
        == 0
    )
    assert 0.1 < dropped.float().mean() < 0.9  # what was missing in the last update has no gradient there


def test_without_it_no_weights_are_computed():
    updater = Trainer(recipe(regulariser__weight_noise=0.0), music()).updater
    assert updater.noisy is updater.parameters
    assert updater.dropconnect.draw(slice(0, 1), torch.tensor(0)) is None


def test_where_there_is_no_recurrent_matrix_it_is_refused():
    made = recipe(model__cell="indrnn", regulariser__dropconnect=0.5)
    with pytest.raises(UserError, match=r"regulariser.dropconnect=0.5 has nothing to act on"):
        Trainer(made, music())


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), 1000.0])
@pytest.mark.parametrize("name", ["dropconnect", "dropout_levels", "dropout_symbols"])
def test_a_share_is_at_least_0_and_below_1(name, value):
    with pytest.raises(UserError, match=rf"regulariser.{name} must be at least 0 and below 1"):
        recipe(**{f"regulariser__{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regulariser.dropconnect", 0.1),
        ("regulariser.dropout_levels", 0.1),
        ("regulariser.dropout_symbols", 0.1),
        ("model.embedding", 4),
        ("model.tied", True),
    ],
)
def test_every_field_is_part_of_a_recipes_identity(name, value):
    assert identity(override(Recipe(), {name: value})) != identity(Recipe())


@pytest.mark.gpu
def test_on_a_gpu_the_graph_masks_as_a_single_update_does():
    """Captured with the fused step; afterwards the same updates one by one, without a graph."""
    from deeprnn.training.engine import Eager

    made = recipe(seeds=[1, 2], **{**ALL, "stop__epochs": 2})
    graph = Trainer(made, text(), device="cuda")
    eager = Trainer(made, text(), device="cuda", engine=Eager)
    eager.plan = lambda member, epoch: type(eager).plan(eager, member, epoch).to(eager.device)  # type: ignore[method-assign]
    for trainer in (graph, eager):
        trainer.train()
    torch.testing.assert_close(graph.updater.parameters, eager.updater.parameters, rtol=1e-3, atol=1e-5)
    mask = graph.updater.dropconnect.draw(slice(0, 2), torch.tensor(3, device="cuda"))
    assert mask is not None
    assert (mask == 0).float().mean().item() == pytest.approx(P, abs=0.1)
