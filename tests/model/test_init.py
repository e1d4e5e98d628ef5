"""Initialisation as Sec. 5.2 gives it, by role."""

from __future__ import annotations

import math

import pytest
import torch

import deeprnn
from deeprnn.model.init import CHAR, MUSIC, WORD, InitSpec, gaussian_, initialise, sparse_
from deeprnn.model.plus import Plus
from deeprnn.model.predict import Predict


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def norm(w: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(w.detach().double(), 2).item()


@pytest.mark.parametrize("shape", [(50, 60), (60, 21), (100, 100), (7, 400)])
def test_twenty_incoming_per_unit_and_unit_top_singular_value(shape):
    w = sparse_(torch.empty(shape), 20, 1.0, generator())
    assert (w != 0).sum(1).tolist() == [20] * shape[0]
    assert norm(w) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("columns", [1, 5, 19, 20])
def test_fewer_than_twenty_incoming_are_dense(columns):
    w = sparse_(torch.empty(30, columns), 20, 1.0, generator())
    assert (w != 0).all()
    assert norm(w) == pytest.approx(1, abs=1e-6)


def test_the_places_of_the_twenty_are_drawn_for_every_unit():
    w = sparse_(torch.empty(200, 100), 20, 1.0, generator()) != 0
    assert len({tuple(row) for row in w.tolist()}) > 190
    assert (w.sum(0) > 0).all()  # with 40 expected, no input is left out of all 200


def test_another_number_of_incoming_and_another_norm():
    w = sparse_(torch.empty(40, 50, dtype=torch.float64), 5, 1.3, generator())
    assert (w != 0).sum(1).unique().tolist() == [5]
    assert norm(w) == pytest.approx(1.3, abs=1e-12)


def test_gaussian_has_its_standard_deviation():
    w = gaussian_(torch.empty(400, 500), 0.01, generator())
    assert w.std().item() == pytest.approx(0.01, rel=0.01)
    assert abs(w.mean().item()) < 1e-4


def test_the_papers_constants():
    assert (MUSIC.input_std, MUSIC.output_std, MUSIC.output_hidden_std) == (0.1, 0.01, 0.01)
    assert (CHAR.input_std, CHAR.output_std, CHAR.output_hidden_std) == (0.01, 0.001, 0.01)
    assert (WORD.input_std, WORD.output_std, WORD.output_hidden_std) == (0.1, 0.1, 0.01)
    assert {(i.incoming, i.spectral_norm, i.bias) for i in (MUSIC, CHAR, WORD)} == {(20, 1.0, 0.0)}
    assert (MUSIC.rectifier_bias, CHAR.rectifier_bias) == (0.0, 0.1)


INPUT, HIDDEN, OUTPUT = 0.2, "sparse", 0.03
ROLES = InitSpec(
    input_std=INPUT,
    output_std=OUTPUT,
    output_hidden_std=0.07,
    bias=0.5,
    rectifier_bias=0.6,
    output_bias=-0.5,
    lp_order=3.0,
)
SIZES = {"input_size": 90, "hidden_size": 80, "output_size": 70, "seed": 0, "init": ROLES}


def check(p: torch.Tensor, want: float | str) -> None:
    if want == HIDDEN:
        assert (p != 0).sum(1).unique().tolist() == [20]
        assert norm(p) == pytest.approx(1, abs=1e-6)
    else:
        assert p.std().item() == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("symbols", [False, True])
def test_each_matrix_by_its_role(symbols):
    net = deeprnn.stacked_dts_rnn(
        intermediate_size=60,
        output_hidden_size=(50, 55),
        input_to_levels="all",
        output_shortcut=True,
        symbols=symbols,
        **SIZES,
    )
    want = {
        "levels.0.W1": HIDDEN,
        "levels.0.U1": INPUT,
        "levels.0.W2": HIDDEN,
        "levels.0.U2": INPUT,
        "levels.0.S2": HIDDEN,
        "levels.1.W1": HIDDEN,
        "levels.1.U1": HIDDEN,  # from the level below: between two hidden layers
        "levels.1.K1": INPUT,
        "levels.1.W2": HIDDEN,
        "levels.1.U2": HIDDEN,
        "levels.1.K2": INPUT,
        "levels.1.S2": HIDDEN,
        "predict.V1": 0.07,
        "predict.V2": HIDDEN,
        "predict.V3": OUTPUT,
        "predict.K": OUTPUT,
    }
    matrices = {name: p for name, p in net.named_parameters() if p.dim() == 2}
    assert set(matrices) == set(want)
    for name, p in matrices.items():
        check(p.detach(), want[name])


def test_a_deep_input_has_gaussian_weights_below_and_sparse_ones_above():
    net = deeprnn.rnn(input_mlp=(60, 50), **SIZES)
    level = net.levels[0]
    check(level.E1.detach(), INPUT)
    check(level.E2.detach(), HIDDEN)
    check(level.U1.detach(), HIDDEN)


def test_biases_by_unit():
    net = deeprnn.dot_rnn(
        intermediate_size=60, output_hidden_size=50, intermediate_unit="relu", output_unit="relu", **SIZES
    )
    values = {name: p.unique().tolist() for name, p in net.named_parameters() if p.dim() == 1}
    assert values == {
        "levels.0.b1": [pytest.approx(0.6)],
        "levels.0.b2": [0.5],
        "predict.b1": [pytest.approx(0.6)],
        "predict.b2": [-0.5],
    }


def test_lp_starts_at_its_order_with_centres_at_zero():
    plus = Plus(10, 8, units=("lp:2",))
    p = 1 + torch.nn.functional.softplus(plus.rho1)
    assert p.tolist() == pytest.approx([3.0] * 8)
    assert plus.c1.abs().sum() == 0
    initialise(plus, InitSpec(lp_order=2.0))
    assert (1 + torch.nn.functional.softplus(plus.rho1)).tolist() == pytest.approx([2.0] * 8)


def test_an_operator_alone_is_initialised_as_for_music():
    predict = Predict(300, 200)
    check(predict.V1.detach(), 0.01)
    assert predict.b1.abs().sum() == 0
    plus = Plus(200, 50)
    check(plus.U1.detach(), 0.1)
    check(plus.W1.detach(), HIDDEN)


def test_the_same_generator_gives_the_same_weights_in_every_type():
    single = sparse_(torch.empty(30, 40), 20, 1.0, generator(3))
    double = sparse_(torch.empty(30, 40, dtype=torch.float64), 20, 1.0, generator(3))
    assert torch.equal(single, double.float())


def test_every_parameter_is_filled():
    net = deeprnn.SequenceModel(deeprnn.dots_rnn(**SIZES, intermediate_size=5, output_hidden_size=4).spec)
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(math.nan)
    initialise(net, MUSIC)
    assert all(p.isfinite().all() for p in net.parameters())
