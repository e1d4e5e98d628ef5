"""Units φ: values, gradients to second order, edge cases, and their names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import deeprnn
from deeprnn.cells import functions
from deeprnn.errors import UserError
from deeprnn.model import units
from deeprnn.model.units import ELEMENTWISE, UnitSpec, lp, maxout, named, register, resolve

# A new unit is one row here: its name, a point, its value there.
POINTS = [
    ("sigmoid", 0.4, 1 / (1 + math.exp(-0.4))),
    ("tanh", -0.7, math.tanh(-0.7)),
    ("relu", 1.5, 1.5),
    ("relu", -1.5, 0.0),
    ("identity", -3.25, -3.25),
    ("softsign", -3.0, -0.75),
]
DOUBLE = {"dtype": torch.float64}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


@pytest.fixture
def registry(monkeypatch):
    """A copy of the table of units, so that a test may add to it."""
    monkeypatch.setattr(units, "ELEMENTWISE", dict(ELEMENTWISE))
    return units.ELEMENTWISE


@pytest.mark.parametrize(("name", "a", "value"), POINTS)
def test_value(name, a, value):
    assert ELEMENTWISE[name](torch.tensor(a, **DOUBLE)).item() == pytest.approx(value, abs=1e-15)


def test_every_elementwise_unit_has_a_row():
    assert set(functions.UNITS) == {name for name, _, _ in POINTS}


@pytest.mark.parametrize("name", functions.UNITS)
def test_numpy_computes_what_torch_does(name):
    """In sampling's quick step, at arguments of any size."""
    a = torch.cat([draw(40), draw(40, seed=1) * 1e-4, draw(40, seed=2) * 100]).float()
    numpy = functions.FUNCTIONS[name].numpy
    assert numpy is not None
    np.testing.assert_allclose(numpy(a.numpy().copy()), ELEMENTWISE[name](a).numpy(), rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in POINTS}))
def test_gradients_to_second_order(name):
    a = draw(3, 4).requires_grad_()
    assert gradcheck(ELEMENTWISE[name], (a,))
    assert gradgradcheck(ELEMENTWISE[name], (a,))


def test_maxout_takes_the_greatest_of_each_pool():
    a = torch.tensor([[1.0, 5.0, 2.0, -1.0, -3.0, -2.0]])
    assert maxout(a, 3).tolist() == [[5.0, -1.0]]
    assert maxout(a, 2).tolist() == [[5.0, 2.0, -2.0]]
    assert maxout(a, 1).equal(a)


def test_maxout_gradients_to_second_order():
    a = draw(3, 6).requires_grad_()
    assert gradcheck(lambda a: maxout(a, 2), (a,))
    assert gradgradcheck(lambda a: maxout(a, 2), (a,))


def test_maxout_shares_the_gradient_of_a_tie():
    a = torch.ones(1, 4, requires_grad=True)
    maxout(a, 4).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [[0.25] * 4]


def lp_by_hand(a, pool, rho, centre):
    p = 1 + np.log1p(np.exp(rho))
    d = np.abs(a - centre).reshape(*a.shape[:-1], -1, pool)
    return np.mean(d ** p[:, None], -1) ** (1 / p)


def lp_case(units: int = 3, pool: int = 2):
    return draw(4, units * pool), draw(units, seed=1), 0.3 * draw(units * pool, seed=2)


def test_lp_is_the_formula():
    a, rho, c = lp_case()
    want = lp_by_hand(a.numpy(), 2, rho.numpy(), c.numpy())
    np.testing.assert_allclose(lp(a, 2, rho, c).numpy(), want, rtol=1e-13)


def test_lp_with_p_2_is_the_root_mean_square_and_with_great_p_the_maximum():
    a = draw(4, 6)
    rho = torch.full((3,), math.log(math.e - 1), **DOUBLE)  # p = 1 + softplus(ρ) = 2
    zero = torch.zeros(6, **DOUBLE)
    rms = a.unflatten(-1, (3, 2)).square().mean(-1).sqrt()
    torch.testing.assert_close(lp(a, 2, rho, zero), rms)
    largest = lp(a, 2, torch.full((3,), 3000.0, **DOUBLE), zero)
    torch.testing.assert_close(largest, maxout(a.abs(), 2), rtol=1e-3, atol=0)


def test_lp_gradients_to_second_order_in_inputs_orders_and_centres():
    arguments = [t.requires_grad_() for t in lp_case()]
    assert gradcheck(lambda a, rho, c: lp(a, 2, rho, c), arguments)
    assert gradgradcheck(lambda a, rho, c: lp(a, 2, rho, c), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [-4.0, 0.0, 1.85, 20.0])
def test_lp_at_its_centres_is_zero_with_finite_slopes(dtype, rho):
    a = torch.full((2, 4), 0.3, dtype=dtype)
    a[1, :2] += torch.tensor([1.0, -2.0], dtype=dtype)  # one pool of the second row is not at its centres
    a.requires_grad_()
    order, c = torch.full((2,), rho, dtype=dtype), torch.full((4,), 0.3, dtype=dtype)
    order.requires_grad_(), c.requires_grad_()
    y = lp(a, 2, order, c)
    assert y[0].tolist() == [0, 0]
    assert y[1, 1] == 0 < y[1, 0]
    first = torch.autograd.grad(y.sum(), (a, order, c), create_graph=True)
    assert all(g.isfinite().all() for g in first)
    assert first[0][0].abs().sum() == 0
    second = torch.autograd.grad(first[0][0].sum(), (a, order, c), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second)


@pytest.mark.parametrize("rho", [-4.0, 0.0, 1.85])
def test_lp_with_one_of_a_pool_at_its_centre_has_finite_slopes(rho):
    a = torch.tensor([[0.0, 2.0]], requires_grad=True)
    y = lp(a, 2, torch.full((1,), rho), torch.zeros(2))
    (g,) = torch.autograd.grad(y.sum(), a)
    assert g.isfinite().all()
    assert g[0, 0] == 0 < g[0, 1]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e300)])
def test_lp_of_great_and_small_values_neither_overflows_nor_vanishes(dtype, size):
    rho, c = torch.full((2,), 10.0, dtype=dtype), torch.zeros(4, dtype=dtype)
    for scale in (size, 1 / size):
        a = (torch.tensor([[1.0, 2.0, -3.0, 0.5]], dtype=dtype) * scale).requires_grad_()
        y = lp(a, 2, rho, c)
        torch.testing.assert_close(y / scale, lp(a / scale, 2, rho, c))
        (g,) = torch.autograd.grad(y.sum(), a)
        assert g.isfinite().all()
        assert g.abs().max() > 0.1


# ---- names


@pytest.mark.parametrize(
    ("text", "name", "pool"),
    [("sigmoid", "sigmoid", 1), ("maxout:3", "maxout", 3), ("lp:1", "lp", 1), ("lp", "lp", 2)],
)
def test_parse_and_str_round_trip(text, name, pool):
    unit = UnitSpec.parse(text)
    assert (unit.name, unit.pool) == (name, pool)
    assert UnitSpec.parse(str(unit)) == unit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sigmod", "did you mean 'sigmoid'"),
        ("", "known are sigmoid"),
        ("tanh:2", "does not pool"),
        ("maxout:0", "at least 1"),
        ("maxout:-1", "at least 1"),
        ("lp:two", "whole number"),
    ],
)
def test_unknown_units_are_refused_with_a_hint(text, words):
    with pytest.raises(UserError, match=words):
        UnitSpec.parse(text)


def test_an_unknown_unit_says_how_to_add_it():
    with pytest.raises(UserError, match=r"units.register\(name, function\)"):
        UnitSpec.parse("nosuchunit")


def test_a_callable_is_known_by_its_name(registry):
    def halved(a):
        return a / 2

    name = named(halved)
    assert named(halved) == name
    assert named(name) == name
    assert resolve(UnitSpec.parse(name)) is halved


def test_two_functions_of_one_name_stay_two(registry):
    one, two = (lambda a: a), (lambda a: 2 * a)
    assert named(one) != named(two)
    assert registry[named(two)] is two


def test_a_module_serves_as_a_unit(registry):
    net = deeprnn.rnn(input_size=2, hidden_size=3, output_size=2, unit=torch.nn.Softplus())
    assert net.spec.levels[0].units == ("Softplus",)
    assert (net.hidden(torch.zeros(2, 1, 2))[0] > 0).all()


def test_a_module_whose_parameters_nobody_would_train_is_refused(registry):
    with pytest.raises(UserError, match="parameters of its own"):
        deeprnn.rnn(input_size=2, hidden_size=3, output_size=2, unit=torch.nn.PReLU())
    assert "PReLU" not in registry


@pytest.mark.parametrize("name", ["sigmoid", "maxout", "a:b", "a,b", ""])
def test_names_that_are_taken_or_unusable_are_refused(name, registry):
    with pytest.raises(UserError, match="not usable"):
        register(name, torch.relu)


def test_what_is_no_function_is_no_unit(registry):
    with pytest.raises(UserError, match="function"):
        register("three", 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="function"):
        named(3)  # type: ignore[arg-type]


def test_lp_without_its_parameters_is_refused():
    with pytest.raises(UserError, match="learned"):
        resolve(UnitSpec("lp", 2))


def test_a_new_unit_works_everywhere_by_being_in_the_table(registry):
    """Every model can use it. In the table of functions, every backend too: CONTRIBUTING shows how."""
    registry["softplus"] = torch.nn.functional.softplus
    net = deeprnn.dots_rnn(
        input_size=3,
        hidden_size=4,
        intermediate_size=5,
        output_hidden_size=6,
        output_size=3,
        unit="softplus",
        output_unit="softplus",
    )
    logits, _ = net(torch.zeros(4, 2, 3))
    logits.sum().backward()
    layer = deeprnn.DeepRNN(3, 4, nonlinearity="softplus")
    assert (layer(torch.zeros(4, 2, 3))[0] > 0).all()
    assert deeprnn.ModelSpec.from_dict(net.spec.to_dict()) == net.spec
