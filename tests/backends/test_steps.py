"""⊕ with pooling units and masks: outputs and every gradient against `reference.unroll_with` in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from deeprnn import backends
from deeprnn.backends import stepwise as steps
from deeprnn.backends.stepwise import plain as steps_plain
from deeprnn.model import units
from deeprnn.model.models import dots_rnn
from deeprnn.model.operators import Plus
from tests.backends.grid import fresh_seed
from tests.backends.step_cases import (
    CASES,
    STAR,
    Case,
    call,
    compare,
    compare_edges,
    compare_floats,
    differs,
    draw,
    floats,
    fused,
    members,
    plain,
    results,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case):
    given = draw(case, fresh_seed())
    truth = members(case, given)
    compare(results(fused, case, given), truth, 1e-11)
    compare_floats(case, given, results(fused, case, floats(given)))


@pytest.mark.parametrize("case", [STAR, CASES[4], CASES[5]], ids=str)
def test_a_broken_slope_is_caught(case, monkeypatch):
    right = steps_plain.slopes

    def wrong(layout, states, given):
        right(layout, states, given)
        layout.columns(states.slope, 0)[1].mul_(1.01)

    monkeypatch.setattr(steps_plain, "slopes", wrong)
    given = draw(case, fresh_seed())
    with pytest.raises(AssertionError, match="is off by"):
        compare(results(fused, case, given), members(case, given), 1e-11)


def test_forgotten_reset_is_caught(monkeypatch):
    given = draw(STAR, fresh_seed())
    given["reset"] = torch.zeros_like(given["reset"])
    given["reset"][2] = True
    truth = members(STAR, given)
    monkeypatch.setattr(
        steps_plain.PlainBackward, "__call__", _without_reset(steps_plain.PlainBackward.__call__)
    )
    with pytest.raises(AssertionError, match="is off by"):
        compare(results(fused, STAR, given), truth, 1e-11)


def _without_reset(right):
    def call(self, l, t):
        self.reset = None
        right(self, l, t)

    return call


@pytest.mark.parametrize("unit", ["lp:2", "maxout:2"])
def test_empty_pools_equals_and_extremes(unit):
    compare_edges(unit)


def test_second_derivative():
    case = Case(("lp:2", "tanh"), (3, 2), "01", T=3, B=2, reset=True, masks="t", state_mask="s")
    given = draw(case, fresh_seed())
    names = [n for n in given if differs(n)]

    def function(*leaves: Tensor):
        return call(fused, case, given | dict(zip(names, leaves, strict=True)))

    leaves = [given[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_second_derivative_of_a_population():
    case = dataclasses.replace(STAR, population=2, T=3)
    given = draw(case, fresh_seed())

    def curvature(function):
        own = {n: x.clone().requires_grad_(differs(n)) for n, x in given.items()}
        h, _ = torch.func.vmap(lambda m: call(function, case, m))(own)
        (first,) = torch.autograd.grad(h.square().sum(), own["W0"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), own["rho0"])[0]

    torch.testing.assert_close(curvature(fused), curvature(plain))


def test_a_member_is_the_model_alone_to_the_bit():
    case = dataclasses.replace(STAR, population=3)
    given = floats(draw(case, fresh_seed()))
    together = results(fused, case, given)
    for p in range(3):
        alone = results(fused, dataclasses.replace(case, population=0), {n: x[p] for n, x in given.items()})
        for name, x in alone.items():
            assert torch.equal(together[name][p], x), name


# ---- where it is used


@pytest.fixture
def served(monkeypatch):
    """How often the operator ran."""
    count = []
    right = steps.unroll_with
    monkeypatch.setattr(steps, "unroll_with", lambda *a, **k: (count.append(1), right(*a, **k))[1])
    return count


def test_a_model_is_served_and_agrees_with_the_reference(served):
    model = dots_rnn(
        input_size=6,
        output_size=2,
        hidden_size=5,
        intermediate_size=4,
        output_hidden_size=4,
        intermediate_unit="lp:2",
        unit="tanh",
    ).double()
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    logits, _ = model(x)
    assert served
    served.clear()
    model.backend = "reference"
    torch.testing.assert_close(model(x)[0], logits)
    assert not served


def test_transformations_keep_the_reference(served):
    plus = Plus(3, 4, intermediate_sizes=(5,), units=("lp:2", "tanh"), shortcut="last").double()
    x, h0 = torch.randn(4, 2, 3, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)

    def loss(h0):
        return plus.unroll(x, h0)[0].square().sum()

    gradient = torch.func.grad(loss)(h0)
    torch.func.jvp(loss, (h0,), (h0,))
    assert not served
    h0.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(h0), h0)[0], gradient)
    assert served


def test_own_units_other_types_and_learned_masks_keep_the_reference(served):
    named = [("tanh", None, None)]
    A, W = torch.zeros(2, 3, 4), [torch.zeros(4, 4)]
    none = [None]
    assert steps.serves(A, W, none, named, [None, torch.ones(3, 4)])
    assert steps.serves(A, W, none, named, [torch.ones(2, 3, 4)])
    assert not steps.serves(A.half(), [W[0].half()], none, named, [])
    assert not steps.serves(A.to("meta"), [W[0].to("meta")], none, named, [])
    assert not steps.serves(A, W, none, named, [torch.ones(3, 4, requires_grad=True)])
    assert not steps.serves(A, W, none, named, [torch.ones(1, 4)])
    units.register("steps-swish", torch.nn.functional.silu)
    try:
        phis = [torch.nn.functional.silu]
        backends.unroll_with(A, A[0], W, [None], phis, [4], named=[("steps-swish", None, None)])
    finally:
        del units.ELEMENTWISE["steps-swish"]
    assert not served


def test_what_does_not_fit_reaches_no_kernel():
    A, W, S = torch.zeros(2, 3, 11), [torch.zeros(8, 3), torch.zeros(3, 4)], [None, torch.zeros(3, 3)]
    named = [("lp:2", torch.zeros(4), torch.zeros(8)), ("tanh", None, None)]
    masks = [torch.ones(3, 3), torch.ones(2, 3, 4), torch.ones(3, 3)]
    assert steps.serves(A, W, S, named, masks)
    assert not steps.serves(A, [W[0], torch.zeros(3, 8)], S, named, masks)
    assert not steps.serves(A, [torch.zeros(8, 4), W[1]], S, named, masks)
    assert not steps.serves(A, W, [None, torch.zeros(3, 4)], named, masks)
    assert not steps.serves(A, W, S, [("lp:2", torch.zeros(1), torch.zeros(8)), named[1]], masks)
    assert not steps.serves(A, W, S, [("lp:2", torch.zeros(4), torch.zeros(4)), named[1]], masks)
    for i in range(3):
        short = [m[..., :1] if i == j else m for j, m in enumerate(masks)]
        assert not steps.serves(A, W, S, named, short), "one column stands for all: the reference spreads it"


def test_operators_pass_torchs_own_checks():
    case = Case(("lp:2", "tanh"), (3, 2), "01", T=2, B=2, reset=True, masks="t", state_mask="s")
    g = draw(case, fresh_seed())
    learned = {n: x.requires_grad_(differs(n)) for n, x in g.items()}
    lists = [[learned["W0"], learned["W1"]], [learned["S1"]], [learned["rho0"]], [learned["c0"]]]
    masks = [g["mask0"], g["mask1"]]
    args = (
        learned["A"],
        learned["h0"],
        *lists,
        masks,
        g["state_mask"],
        g["reset"],
        "lp:2,tanh",
        "01",
        "11",
        True,
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(steps.unroll_steps, args, test_utils=tests)
