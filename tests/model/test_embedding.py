"""Learned vectors for symbols, of their own or tied to the output's matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from deeprnn.data.batching import Batch
from deeprnn.errors import UserError
from deeprnn.generation.one_step import fastest_step
from deeprnn.model.export import export_program
from deeprnn.model.models import assemble, build
from deeprnn.model.notation import equations
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import Dropout, ModelSpec
from deeprnn.model.structure import dissect
from deeprnn.render.model_diagram import model_svg
from deeprnn.runs.folder import load_run
from deeprnn.training.session import run_recipe
from deeprnn.training.updater import LARGE, Scored
from tests.training.toys import recipe, text

T, B, V = 5, 3, 7


@pytest.fixture(autouse=True)
def one_thread():
    """Models of a few units: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


TEXT = {"input_size": V, "output_size": V, "output": "categorical"}


def spec_of(tied: bool = True, **options) -> ModelSpec:
    settings = {**TEXT, "hidden_sizes": (6, 4), "embedding": 4, "tied": tied, **options}
    return assemble(**settings)


def pair(**options) -> tuple[SequenceModel, SequenceModel]:
    """The same model with one matrix for both uses, and with two equal ones."""
    tied = build(spec_of(**options), seed=1, dtype=torch.float64)
    apart = build(spec_of(tied=False, **options), seed=1, dtype=torch.float64)
    values = dict(tied.state_dict())
    apart.load_state_dict({**values, "embedding.weight": values[_last(tied)]})
    return tied, apart


def _last(model: SequenceModel) -> str:
    return f"predict.V{len(model.spec.predict.sizes) + 1}"


@pytest.mark.parametrize("options", [
    {}, {"cell": "lstm"}, {"input_to_levels": "all"}, {"hidden_sizes": (6,), "cell": "gru", "output_hidden": 4},
    {"hidden_sizes": (6, 5), "output_hidden": 4, "output_unit": "identity"},
])  # fmt: skip
def test_tied_matrices_are_one_parameter_and_its_gradient_sums_both_uses(options):
    tied, apart = pair(**options)
    assert len(list(tied.parameters())) == len(list(apart.parameters())) - 1
    assert set(apart.state_dict()) - set(tied.state_dict()) == {"embedding.weight"}
    x, y = torch.randint(V, (2, T, B))
    losses = [F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten()) for m in (tied, apart)]
    assert torch.equal(losses[0], losses[1])
    own, other = (
        dict(zip(dict(m.named_parameters()), torch.autograd.grad(loss, list(m.parameters())), strict=True))
        for m, loss in zip((tied, apart), losses, strict=True)
    )
    last = _last(tied)
    torch.testing.assert_close(own[last], other[last] + other["embedding.weight"])
    assert other["embedding.weight"].abs().max() > 0
    for name in own.keys() - {last}:
        torch.testing.assert_close(own[name], other[name])


def test_the_loss_over_many_classes_sums_both_uses_too():
    big = {"input_size": LARGE, "output_size": LARGE}
    tied, apart = pair(**big)
    x, y = torch.randint(LARGE, (2, T, B))
    batch = Batch(x, y, torch.ones(T, B, dtype=torch.bool), torch.zeros(T, B, dtype=torch.bool))
    totals = [Scored(m)(batch, m.initial_state(B), None)[0] for m in (tied, apart)]
    own = torch.autograd.grad(totals[0], tied.predict.V1)[0]
    parts = torch.autograd.grad(totals[1], [apart.predict.V1, apart.embedding.weight])
    torch.testing.assert_close(own, parts[0] + parts[1])


def test_an_embedding_below_the_first_level_equals_vectors_looked_up_by_hand():
    model = build(spec_of(tied=False, hidden_sizes=(6,)), seed=1)
    inner = dataclasses.replace(model.spec, embedding=None)
    vectors = SequenceModel(inner)
    vectors.load_state_dict({k: v for k, v in model.state_dict().items() if k != "embedding.weight"})
    x = torch.randint(V, (T, B))
    assert torch.equal(model(x)[0], vectors(model.embedding.weight[x])[0])


def test_one_step_at_a_time_and_exported_it_is_the_same():
    model = build(spec_of(cell="lstm"), seed=1).eval()
    x = torch.randint(V, (T, B))
    want, _ = model(x)
    state, step = model.initial_state(B), fastest_step(model)
    for t in range(T):
        y, state = step(x[t], state)
        torch.testing.assert_close(y, want[t])
    plain = build(spec_of(), seed=1).eval()
    found = export_program(plain).module()(x, *plain.initial_state(B))[0]
    torch.testing.assert_close(found, plain(x)[0])


def test_symbols_that_are_dropped_are_zero_wherever_they_occur():
    model = build(spec_of(tied=False, dropout=Dropout(symbols=0.5, input=0.3, per_sequence=True)), seed=1)
    masks = model.draw_masks(T, B, torch.Generator().manual_seed(1))
    assert {k: tuple(m.shape) for k, m in masks.items()} == {"symbols": (V, 1), "input": (B, 4)}
    dropped = (masks["symbols"] == 0).flatten()
    assert 0 < dropped.sum() < V
    x = torch.randint(V, (T, B))
    entered = model.embed(x, masks["symbols"])
    assert torch.equal(entered.abs().sum(-1) == 0, dropped[x])
    kept = ~dropped[x]
    torch.testing.assert_close(entered[kept], 2 * model.embedding.weight[x][kept])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding": 5}, r"7 x 5, but ▷'s last one is 7 x 4: set model.embedding = 4, or put a projection"),
        ({"embedding": 0}, r"model.tied=true .*set model.embedding"),
        ({"output_size": 8}, r"7 x 4, but ▷'s last one is 8 x 4"),
        ({"output_hidden": 4, "output_shortcut": True}, "output_shortcut exclude each other"),
        ({"output": "bernoulli"}, r"model.embedding=4 is for symbols"),
        ({"embedding": -1}, r"model.embedding must be a whole number, 0 for none, got -1"),
        ({"tied": 1}, "tied must be True or False, got 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options, message):
    with pytest.raises(UserError, match=message):
        spec_of(**options)


def test_counts_equations_picture_and_plain_data():
    for tied in (True, False):
        spec = spec_of(tied)
        assert dissect(spec).parameters == sum(p.numel() for p in build(spec).parameters())
        assert equations(spec)[0] == ("fₜ = (V₁ᵀ xₜ)" if tied else "fₜ = (E₀ xₜ)")
        assert ModelSpec.from_dict(spec.to_dict()) == spec
        assert (spec.symbols, spec.input_size) == (True, V)
        assert model_svg(spec).startswith("<svg")
    old = spec_of(tied=False, embedding=0).to_dict()
    del old["embedding"]  # as an earlier version wrote it
    assert ModelSpec.from_dict(old).embedding is None


def test_a_run_keeps_it(tmp_path):
    fields = {"model__cell": "lstm", "model__hidden": [5], "model__embedding": 5, "model__tied": True}
    short = recipe(**fields, stop__epochs=1, data__lanes=2)
    run_recipe(short, tmp_path / "run", data=text())
    run = load_run(tmp_path / "run")
    model = run.model()
    assert run.spec.embedding is not None
    assert run.spec.embedding.tied
    assert "embedding.weight" not in model.state_dict()
    assert run.info["parameters"] == sum(p.numel() for p in model.parameters())
