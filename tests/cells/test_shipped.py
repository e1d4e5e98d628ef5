"""Every shipped cell: described, equal to its own step in a loop, under all of torch's transformations."""

from __future__ import annotations

import copy
import re
import sys

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jvp, stack_module_state, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from deeprnn.backends.cuda import why_not_planned
from deeprnn.backends.cuda.device import Device
from deeprnn.cells import lookup
from deeprnn.cells.cell import Cell
from deeprnn.cells.functions import UNITS
from deeprnn.cells.library import LIBRARY
from deeprnn.cells.plans import PlanRequest, plan_of
from deeprnn.errors import UserError
from deeprnn.model.cell_loop import draw, draw_specs, unroll_cell
from deeprnn.model.recurrent import Recurrent

I, H, T, B = 3, 4, 5, 2
OPTIONS = {
    "deep-gru": ("gru", {"intermediate_sizes": (5,)}),
    "deep-lstm": ("lstm", {"intermediate_sizes": (5, 3)}),
    "projected-lstm": ("lstm", {"proj_size": 2}),
}
CELLS = [*LIBRARY, *OPTIONS]


def make(name, **options):
    torch.manual_seed(0)
    name, own = OPTIONS.get(name, (name, {}))
    return LIBRARY[name](I, H, **own, **options)


@pytest.mark.parametrize("name", ["rnn", "leaky", "indrnn"])
def test_every_unit_of_the_table_serves_a_cell_without_gates(name):
    for unit, phi in UNITS.items():
        cell = LIBRARY[name](I, H, unit=unit).double()
        x, h = torch.randn(T, B, I).double(), torch.zeros(B, H).double()
        y, _ = Recurrent(cell)(x)
        assert not plan_of(cell, PlanRequest(x.dtype, x.dtype, "cpu")).reason
        for t in range(T):
            recurrent = cell.weight_hh * h if name == "indrnn" else h @ cell.weight_hh.t()
            new = phi(x[t] @ cell.weight_ih.t() + cell.bias + recurrent)
            h = h + cell.alpha * (new - h) if name == "leaky" else new
            torch.testing.assert_close(y[t], h)
    with pytest.raises(UserError, match="unknown unit 'nosuch': known are sigmoid"):
        LIBRARY[name](I, H, unit="nosuch")


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("rhn", "depth=1000000", "depth must be a whole number from 1 to 1,000, got 1000000"),
        ("rhn", "zoneout=abc", "zoneout must be at least 0 and below 1, got 'abc'"),
        ("rhn", "zoneout=true", "zoneout must be at least 0 and below 1, got True"),
        ("rhn", "device=cuda", "'device=cuda': that is decided by the model and the run"),
        ("rhn", "dtype=float16", "'dtype=float16': that is decided by the model and the run"),
        (
            "gru",
            "intermediate_sizes=abc",
            "intermediate_sizes must be a whole number of at least 1, got 'abc'",
        ),
        (
            "gru",
            "intermediate_sizes=100+x",
            "intermediate_sizes must be a whole number of at least 1, got 'x'",
        ),
        ("gru", "intermediate_sizes=0", "intermediate_sizes must be a whole number of at least 1, got 0"),
        ("gru", "intermediate_sizes=1.5", "intermediate_sizes must be a whole number of at least 1, got 1.5"),
        ("gru", f"intermediate_sizes={10**12}+{10**12}", "cell gru cannot be built from input_size=3"),
        (
            "gru",
            f"intermediate_sizes={2**64}",
            f"intermediate_sizes must be a whole number of at least 1, got {2**64}",
        ),
        ("gru", "bias=3", "bias must be true or false, got 3"),
        ("lstm", "proj_size=-3", "proj_size must be a whole number of at least 0, got -3"),
        ("lstm", "proj_size=abc", "proj_size must be a whole number of at least 0, got 'abc'"),
        ("lstm", "peepholes=yes", "peepholes must be true or false, got 'yes'"),
        ("leaky", "alpha=abc", "alpha must be above 0 and at most 1, got 'abc'"),
        ("leaky", "noise=nan", "noise must be not negative and finite, got nan"),
        ("mogrifier", "rounds=2000", "rounds must be a whole number from 0 to 1,000, got 2000"),
    ],
)
def test_an_absurd_option_of_a_cell_is_one_sentence(name, option, told):
    with pytest.raises(UserError, match=re.escape(told)):
        lookup.on_meta(name, I, H, [option])


class Repeated(Cell):
    def __init__(self, times):
        super().__init__()
        self.U = torch.nn.Linear(I, H)
        self.times = times

    def step(self, x, h):
        y = self.U(x) + h
        for _ in range(self.times):
            y = torch.tanh(y)
        return y


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (
            lambda: lookup.build("rhn", I, H, ["depth=101"]),
            "more than 100 matrix products follow each other in a step",
        ),
        (lambda: Repeated(1001), "it has more than 1,000 pointwise operations in the loop"),
        (lambda: Repeated(3000), "it has more than 3,000 operations, too many to be read"),
    ],
)
@pytest.mark.parametrize("limit", [1000, 20_000])
def test_a_step_too_long_to_be_read_is_unrolled_by_the_plain_loop(cell, told, limit):
    layer, x = Recurrent(cell()), torch.randn(2, B, I)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        y, _ = layer(x)
    finally:
        sys.setrecursionlimit(before)
    assert told in layer.explain()
    torch.testing.assert_close(y[1], layer.step(x[1], layer.step(x[0])[1])[0])


def layer_of(name, dtype=torch.float64, **options):
    return Recurrent(make(name).to(dtype), **options)


def inputs(layer, dtype=torch.float64, batch=B):
    generator = torch.Generator().manual_seed(1)
    rows = layer.num_layers * layer.num_directions
    x = torch.randn(T, batch, I, dtype=dtype, generator=generator)
    states = [torch.randn(rows, batch, n, dtype=dtype, generator=generator) for n in layer.state_sizes]
    return x, states[0] if len(states) == 1 else tuple(states)


def parts(state):
    return list(state) if isinstance(state, tuple) else [state]


def loop(layer, x, state, reset=None):
    """The first cell of a layer, called step by step."""
    cell, h = layer.cells[0], [s[0] for s in parts(state)]
    outputs = []
    for t in range(x.shape[0]):
        if reset is not None:
            h = [torch.where(reset[t, :, None], 0.0, s) for s in h]
        h = list(new) if isinstance(new := cell.step(x[t], *h), tuple) else [new]
        outputs.append(h[0])
    return torch.stack(outputs), h


@pytest.mark.parametrize("name", CELLS)
def test_it_is_described(name):
    cell = make(name)
    assert plan_of(cell, PlanRequest(torch.float32, torch.float32, "cpu")).reason == ""


@pytest.mark.parametrize("name", [name for name in CELLS if name != "indrnn"])
def test_a_persistent_kernel_can_run_it(name):
    """But for an IndRNN, which multiplies no matrix in its loop. The device "meta" is read as a GPU is."""
    traced = plan_of(make(name), PlanRequest(torch.float32, torch.float32, "meta")).traced
    assert traced is not None
    assert why_not_planned(traced.cell, False, Device()) is None


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("marked", [False, True])
def test_outputs_states_and_gradients_equal_the_loop(name, marked):
    layer = layer_of(name)
    x, state = inputs(layer)
    reset = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.3 if marked else None
    leaves = [x, *parts(state), *layer.parameters()]
    for leaf in leaves[: 1 + len(parts(state))]:
        leaf.requires_grad_()
    y, last = layer(x, state, reset=reset)
    want, h = loop(layer, x, state, reset)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    for s, truth in zip(parts(last), h, strict=True):
        torch.testing.assert_close(s[0], truth, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(y)
    found = torch.autograd.grad((y * weights).sum() + sum(s.sin().sum() for s in parts(last)), leaves)
    truth = torch.autograd.grad((want * weights).sum() + sum(s.sin().sum() for s in h), leaves)
    for g, wanted in zip(found, truth, strict=True):
        torch.testing.assert_close(g, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CELLS)
def test_in_fp32_the_chosen_backend_is_as_exact_as_fp32(name):
    layer = layer_of(name, torch.float32)
    x, state = inputs(layer, torch.float32)
    twin = copy.deepcopy(layer).double()
    first = tuple(h.double() for h in parts(state))
    want = loop(twin, x.double(), first)[0]
    y = layer(x, state)[0]
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(y.sin().sum(), list(layer.parameters()))
    truth = torch.autograd.grad(want.sin().sum(), list(twin.parameters()))
    for g, wanted in zip(found, truth, strict=True):
        torch.testing.assert_close(g.double(), wanted, rtol=1e-5, atol=1e-5)


DRAWING = {name: (name, {"zoneout": 0.3, "recurrent_dropout": 0.2}) for name in LIBRARY}
DRAWING["noisy"] = ("leaky", {"noise": 0.5})


@pytest.mark.parametrize("name", DRAWING)
def test_with_the_same_random_numbers_every_backend_computes_the_same(name):
    kind, options = DRAWING[name]
    cell = make(kind, **options)
    x, state = torch.randn(T, B, I), [torch.randn(B, n) for n in cell.sizes().states]
    specs = draw_specs(cell, PlanRequest(torch.float32, torch.float32, "cpu"))
    assert specs
    drawn = draw(specs, x, torch.float32)
    found = [
        unroll_cell(cell, x, state, None, None, drawn, backend).states[0] for backend in ("auto", "reference")
    ]
    torch.testing.assert_close(*found)
    grads = [torch.autograd.grad(y.sin().sum(), list(cell.parameters())) for y in found]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", CELLS)
def test_lengths_equal_each_sequence_by_itself(name):
    layer = layer_of(name, bidirectional=True, num_layers=2, dropout=0.0)
    x, state = inputs(layer, batch=3)
    lengths = torch.tensor([5, 2, 4])
    y, last = layer(x, state, lengths=lengths)
    packed, packed_last = layer(pack_padded_sequence(x, lengths, enforce_sorted=False), state)
    torch.testing.assert_close(pad_packed_sequence(packed, total_length=T)[0], y)
    for b, n in enumerate(lengths.tolist()):
        alone = [s[:, b : b + 1] for s in parts(state)]
        own, own_last = layer(x[:n, b : b + 1], alone[0] if len(alone) == 1 else tuple(alone))
        torch.testing.assert_close(y[:n, b : b + 1], own, rtol=1e-12, atol=1e-12)
        assert not y[n:, b].any()
        for s, also, truth in zip(parts(last), parts(packed_last), parts(own_last), strict=True):
            torch.testing.assert_close(s[:, b : b + 1], truth, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(also[:, b : b + 1], truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_reset_marks_separate_sequences_in_both_directions(name):
    layer = layer_of(name, bidirectional=True)
    x, _ = inputs(layer)
    marks = torch.zeros(T, B, dtype=torch.bool)
    marks[2] = True
    y, _ = layer(x, reset=marks)
    torch.testing.assert_close(y[:2], layer(x[:2])[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[2:], layer(x[2:])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_member_of_a_population_equals_the_cell_alone(name):
    members = []
    for seed in range(3):
        layer = layer_of(name)
        torch.manual_seed(seed)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.4)
        members.append(layer)
    parameters, buffers = stack_module_state(members)
    x, state = inputs(layer)

    def run(p, b, x):
        return functional_call(members[0], (p, b), (x, state))[0]

    y = vmap(run, (0, 0, None))(parameters, buffers, x)
    grads = torch.autograd.grad(y.sin().sum(), list(parameters.values()))
    for k, layer in enumerate(members):
        own = layer(x, state)[0]
        torch.testing.assert_close(y[k], own, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(own.sin().sum(), list(layer.parameters()))
        for g, truth in zip(grads, wanted, strict=True):
            torch.testing.assert_close(g[k], truth, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CELLS)
def test_second_derivatives(name):
    layer = layer_of(name)
    x, state = inputs(layer)
    x = x[:3].requires_grad_()
    leaves = [x, *layer.parameters()]

    def penalty(y):
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return sum(g.square().sum() for g in first)

    found = torch.autograd.grad(penalty(layer(x, state)[0]), leaves)
    truth = torch.autograd.grad(penalty(loop(layer, x, state)[0]), leaves)
    for g, wanted in zip(found, truth, strict=True):
        torch.testing.assert_close(g, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_forward_mode_and_functional_derivatives(name):
    layer = layer_of(name)
    x, state = inputs(layer)
    direction = torch.randn_like(x)
    y, tangent = jvp(lambda x: layer(x, state)[0], (x,), (direction,))
    want, truth = jvp(lambda x: loop(layer, x, state)[0], (x,), (direction,))
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(tangent, truth)
    small = x[:2, :1]
    first = tuple(s[:, :1] for s in parts(state))
    first = first[0] if len(first) == 1 else first
    H1 = hessian(lambda x: layer(x, first)[0].sin().sum())(small)
    H2 = hessian(lambda x: loop(layer, x, first)[0].sin().sum())(small)
    torch.testing.assert_close(H1, H2, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["gru", "lstm", "rhn", "mogrifier", "indrnn", "deep-gru"])
def test_a_compiler_sees_one_graph(name):
    torch._dynamo.reset()
    layer = layer_of(name, torch.float32)
    x, state = inputs(layer, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(x, state)
    torch.testing.assert_close(y, layer(x, state)[0])
    found = torch.autograd.grad(y.sin().sum(), list(layer.parameters()))
    truth = torch.autograd.grad(layer(x, state)[0].sin().sum(), list(layer.parameters()))
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("name", CELLS)
def test_under_autocast_states_keep_their_type(name):
    layer = layer_of(name, torch.float32)
    x, state = inputs(layer, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = layer(x, state)
        stepped = layer.step(x[0], state)[1]
    assert {t.dtype for t in (y, *parts(last), *parts(stepped))} == {torch.float32}
    torch.testing.assert_close(y, layer(x, state)[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", CELLS)
def test_steps_one_by_one_equal_the_sequence(name):
    layer = layer_of(name, num_layers=2)
    x, state = inputs(layer)
    y, last = layer(x, state)
    for t in range(T):
        out, state = layer.step(x[t], state)
        torch.testing.assert_close(out, y[t], rtol=1e-12, atol=1e-12)
    for s, truth in zip(parts(state), parts(last), strict=True):
        torch.testing.assert_close(s, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_two_halves_equal_one(name):
    layer = layer_of(name, num_layers=2, batch_first=True)
    x, state = inputs(layer)
    x = x.transpose(0, 1)
    first, middle = layer(x[:, :2], state)
    second, last = layer(x[:, 2:], middle)
    whole, end = layer(x, state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    for s, truth in zip(parts(last), parts(end), strict=True):
        torch.testing.assert_close(s, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_all_sequences_on_request(name):
    layer = layer_of(name, num_layers=2)
    x, state = inputs(layer)
    y, last, sequences = layer(x, state, return_all_states=True)
    assert len(sequences) == 2
    assert torch.equal(sequences[-1][0], y)
    for level, of_level in enumerate(sequences):
        for s, sequence in zip(parts(last), of_level, strict=False):
            assert torch.equal(sequence[-1], s[level])
