"""A user's step, however it is spelled, is described, and computes what it computes step by step."""

from __future__ import annotations

import logging

import pytest
import torch

from deeprnn.cells.plans import PlanRequest, plan_of
from deeprnn.model.cell_loop import plain_loop, unroll_cell
from deeprnn.model.recurrent import Recurrent
from tests.cells.spellings import EQUIVALENT, FUSED, INPUT, PLAIN, SAME, SYMBOLS, Own, simple

T, B = 6, 3


def example(cell, symbols=False):
    generator = torch.Generator().manual_seed(1)
    cell.double()
    if symbols:
        x = torch.randint(0, INPUT, (T, B), generator=generator)
    else:
        x = torch.randn(T, B, INPUT, dtype=torch.float64, generator=generator).requires_grad_()
    states = [
        torch.randn(B, n, dtype=torch.float64, generator=generator).requires_grad_() for n in cell.state_sizes
    ]
    reset = torch.rand(T, B, generator=generator) < 0.2
    return x, states, reset


def compare(cell, x, states, reset):
    """Outputs and all gradients of the described cell against its own step in a loop."""
    plan = plan_of(cell, PlanRequest(x.dtype, torch.float64, "cpu"))
    assert not plan.reason, plan.reason
    found = unroll_cell(cell, x, states, reset).states
    truth = plain_loop(cell, x, states, reset, None, "auto").states
    leaves = [t for t in (x, *states, *cell.parameters()) if t.is_floating_point()]
    weights = [torch.randn_like(y) for y in truth]
    grads = [
        torch.autograd.grad(
            sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), leaves, allow_unused=True
        )
        for ys in (found, truth)
    ]
    for y, want in zip(found, truth, strict=True):
        torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)
    for g, want in zip(*grads, strict=True):
        g = torch.zeros(()) if g is None else g
        torch.testing.assert_close(*torch.broadcast_tensors(g.double(), torch.zeros(()) if want is None else want),
                                   rtol=1e-7, atol=1e-7, check_dtype=False)  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_described_cells_equal_their_own_step(name):
    make, rule, states = FUSED[name]
    torch.manual_seed(0)
    cell = Own(make, rule, states)
    compare(cell, *example(cell))


def test_what_shares_parts_is_explained_in_few_words():
    make, rule, states = FUSED["two sequences of fractions"]
    assert len(Recurrent(Own(make, rule, states)).explain()) < 10_000


@pytest.mark.parametrize("factor", [1.0000001, 1.0000004])
def test_constants_that_look_alike_are_told_apart(factor):
    """Machine code is kept by what it computes, to the last digit."""
    torch.manual_seed(0)
    cell = Own(simple, lambda m, x, h: torch.tanh(m.U(x) + m.W(h)) * factor)
    compare(cell, *example(cell))


NARROW = (
    "split state",
    "states of two sizes",
    "constant factor of a product",
    "constant condition",
    "constant state",
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_types(name, dtype):
    make, rule, states = FUSED[name]
    torch.manual_seed(0)
    cell = Own(make, rule, states)
    x, h, reset = example(cell)
    x, h = x.detach().to(dtype), [a.detach().to(dtype) for a in h]
    cell.to(dtype)
    assert not plan_of(cell, PlanRequest(dtype, dtype, "cpu")).reason
    found, truth = unroll_cell(cell, x, h, reset).states, plain_loop(cell, x, h, reset, None, "auto").states
    assert {y.dtype for y in found} == {dtype}
    torch.testing.assert_close(found, truth, rtol=0.05, atol=0.05)


def test_units_that_are_drawn():
    """A draw whose probability depends on the state is a comparison with a number drawn before the loop."""
    cell = Own(simple, lambda m, x, h: torch.bernoulli(torch.sigmoid(m.U(x) + 4 * h - 2)))
    assert not plan_of(cell, PlanRequest(torch.float32, torch.float32, "cpu")).reason
    for p in cell.parameters():
        torch.nn.init.zeros_(p)
    torch.manual_seed(0)
    h = unroll_cell(cell, torch.zeros(2, 5000, INPUT), [torch.zeros(5000, 4)]).states[0]
    assert set(h.unique().tolist()) == {0.0, 1.0}
    before, after = h[0].flatten().bool(), h[1].flatten()
    low, high = torch.sigmoid(torch.tensor([-2.0, 2.0])).tolist()
    assert abs(h[0].mean() - low) < 0.01
    assert abs(after[before].mean() - high) < 0.03
    assert abs(after[~before].mean() - low) < 0.01


def test_a_fault_of_the_reader_leaves_the_plain_loop(monkeypatch):
    cell = Own(simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x)))
    x, states, reset = example(cell)
    monkeypatch.setattr("deeprnn.cells.trace.normalise", lambda recording: {}["missing"])
    plan = plan_of(cell, PlanRequest(torch.float64, torch.float64, "cpu"))
    assert "reading it failed: KeyError" in plan.reason
    found = unroll_cell(cell, x, states, reset).states[0]
    assert torch.equal(found, plain_loop(cell, x, states, reset, None, "auto").states[0])


@pytest.mark.parametrize("name", SYMBOLS)
def test_integer_symbols_are_gathered(name):
    torch.manual_seed(0)
    cell = Own(*SYMBOLS[name])
    compare(cell, *example(cell, symbols=True))


@pytest.mark.parametrize(
    ("group", "k"), [(g, k) for g in (SAME | EQUIVALENT) for k in range(len((SAME | EQUIVALENT)[g][1]))]
)
def test_spellings_of_one_cell(group, k):
    make, rules = (SAME | EQUIVALENT)[group]
    torch.manual_seed(0)
    first, cell = Own(make, rules[0]), Own(make, rules[k])
    compare(cell, *example(cell))
    if group in SAME:
        request = PlanRequest(torch.float32, torch.float64, "cpu")
        first.double()
        assert plan_of(cell, request).traced.cell == plan_of(first, request).traced.cell


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_described_runs_by_the_plain_loop_and_says_so_once(name, caplog):
    make, rule, word = PLAIN[name]
    torch.manual_seed(0)

    class Odd(Own):
        pass

    Odd.__qualname__ = f"Odd {name}"
    cell = Odd(make, rule)
    x, states, reset = example(cell)
    with caplog.at_level(logging.INFO, logger="deeprnn"):
        for _ in range(2):
            found = unroll_cell(cell, x, states, reset).states[0]
    lines = [r.getMessage() for r in caplog.records if "plain loop" in r.getMessage()]
    assert len(lines) == 1
    assert word in lines[0], lines[0]
    h, steps = states[0], []
    for t in range(T):
        h = cell.step(x[t], torch.where(reset[t, :, None], 0.0, h))
        steps.append(h)
    assert torch.equal(found, torch.stack(steps))
