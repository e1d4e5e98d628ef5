"""Steps that reduce over units: sums, means, norms and normalisations are described, whatever they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deeprnn.cells.cell import Cell
from deeprnn.cells.plans import PlanRequest, plan_of
from deeprnn.model.recurrent import Recurrent
from tests.cells.test_spellings import compare

T, B, INPUT, HIDDEN = 5, 3, 3, 24


class Ruled(Cell):
    """A cell of 24 units that does what it is told."""

    def __init__(self, rule, states=(HIDDEN,)):
        super().__init__()
        self.input_size, self.state_sizes, self.rule = INPUT, states, rule
        self.U, self.W = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.V = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.G = nn.Linear(HIDDEN, 1)
        self.E = nn.Linear(HIDDEN, 3)
        self.gates = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.norm, self.other = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN, bias=False)
        self.groups = nn.GroupNorm(4, HIDDEN)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)

    def step(self, x, *state):
        return self.rule(self, x, *state)


def sized(cell):
    generator = torch.Generator().manual_seed(1)
    cell.double()
    x = torch.randn(T, B, INPUT, dtype=torch.float64, generator=generator).requires_grad_()
    states = [
        torch.randn(B, n, dtype=torch.float64, generator=generator).requires_grad_() for n in cell.state_sizes
    ]
    return x, states, torch.rand(T, B, generator=generator) < 0.2


def _lstm(m, x, h, c):
    i, f, o, g = (m.gates(h) + F.pad(m.U(x), (0, 3 * HIDDEN))).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * torch.tanh(m.norm(c)), c


def _gates_apart(m, x, h, c):
    i, f, o, g = (F.layer_norm(a, (HIDDEN,)) + m.U(x) for a in m.gates(h).chunk(4, 1))
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * torch.tanh(m.norm(c)), c


def _experts(m, x, h):
    weight = m.E(h).softmax(-1)
    options = torch.tanh(m.gates(h)[:, : 3 * HIDDEN].view(-1, 3, HIDDEN))
    return (weight.unsqueeze(-1) * options).sum(1) + m.U(x)


def _heads(m, x, h):
    value = torch.tanh(m.W(h) + m.U(x)).view(-1, 2, HIDDEN // 2)
    return (value / (1 + value.square().mean(-1, keepdim=True))).flatten(1)


def _memory(m, x, h, s):
    """A matrix of fast weights, written by an outer product and read by a product."""
    key, value, query = (m.gates(h)[:, :15] + m.U(x)[:, :15]).tanh().split(5, 1)
    s = 0.9 * s.view(-1, 5, 5) + value.unsqueeze(2) * key.unsqueeze(1)
    read = (s * query.unsqueeze(1)).sum(-1)
    return torch.tanh(m.W(h) + F.pad(read, (0, HIDDEN - 5)) + m.U(x)), s.flatten(1)


def _variance_and_mean(m, x, h):
    variance, mean = torch.var_mean(m.W(h) + m.U(x), -1, keepdim=True)
    return torch.tanh(m.W(h) * variance + mean)


FUSED = {
    "layer norm": lambda m, x, h: torch.tanh(m.norm(m.W(h) + m.U(x))),
    "layer norm of a product alone": lambda m, x, h: torch.tanh(m.norm(m.W(h)) + m.U(x)),
    "two layer norms": lambda m, x, h: torch.tanh(m.norm(m.W(h)) + m.other(m.V(h)) + m.norm(m.U(x))),
    "layer norm of what is no sum of products": lambda m, x, h: m.norm(torch.tanh(m.W(h) + m.U(x))),
    "layer norm of the state": lambda m, x, h: torch.tanh(m.W(m.norm(h)) + m.U(x)),
    "layer norm of a mixture": lambda m, x, h: m.norm(h + 0.5 * torch.tanh(m.W(h) + m.U(x))),
    "layer norm of a sum with what is no product": lambda m, x, h: torch.tanh(m.norm(m.W(h) - h * m.V(h) + m.U(x) * 2)),
    "layer norm without parameters": lambda m, x, h: torch.tanh(F.layer_norm(m.W(h) + m.U(x), (HIDDEN,), eps=1e-3)),
    "layer norm by hand": lambda m, x, h: torch.tanh(_by_hand(m.W(h) + m.U(x))),
    "layer norm by hand, its variance biased": lambda m, x, h: torch.tanh(_standardised(m.W(h) + m.U(x))),
    "layer norm and what it normalises": lambda m, x, h: (lambda a: m.norm(a) * a.sigmoid())(m.W(h) + m.U(x)),
    "rms norm": lambda m, x, h: torch.tanh(F.rms_norm(m.W(h) + m.U(x), (HIDDEN,), m.norm.weight)),
    "group norm": lambda m, x, h: torch.tanh(m.groups(m.W(h) + m.U(x))),
    "group norm of the state": lambda m, x, h: torch.tanh(m.W(m.groups(h)) + m.U(x)),
    "mean": lambda m, x, h: torch.tanh(m.W(h) - h.mean(-1, keepdim=True) + m.U(x)),
    "mean of products": lambda m, x, h: torch.tanh(h - (m.W(h) + m.U(x)).mean(1, keepdim=True)),
    "mean without its dimension": lambda m, x, h: torch.tanh(m.W(h) * h.mean(-1)[:, None] + m.U(x)),
    "scaled sum": lambda m, x, h: torch.tanh(m.U(x) + (2 * m.W(h) - m.V(h) + 1).sum(-1, keepdim=True) / 7),
    "sum of squares": lambda m, x, h: m.U(x) + m.W(h) / (1 + h.square().sum(-1, keepdim=True)),
    "norm": lambda m, x, h: F.normalize(m.W(h) + m.U(x), dim=-1),
    "clipped norm": lambda m, x, h: (lambda a: a / a.norm(dim=1, keepdim=True).clamp(min=1))(m.W(h) + m.U(x)),
    "absolute norm": lambda m, x, h: torch.tanh(m.U(x) + h / torch.linalg.vector_norm(m.W(h), 1, dim=-1, keepdim=True)),
    "standard deviation": lambda m, x, h: (m.W(h) + m.U(x)) / (1 + m.W(h).std(-1, keepdim=True)),
    "variance and mean": _variance_and_mean,
    "one gate for all units": lambda m, x, h: torch.lerp(h, torch.tanh(m.W(h) + m.U(x)), m.G(h).sigmoid()),
    "inner product of two states": lambda m, x, h: torch.tanh(m.U(x) + h * (h * m.W(h)).sum(-1, keepdim=True) / 5),
    "mixture of experts": _experts,
    "heads": _heads,
    "largest of a pool": lambda m, x, h: (m.gates(h) + m.U(x).repeat(1, 4)).view(-1, HIDDEN, 4).amax(-1).tanh(),
    "smooth largest": lambda m, x, h: m.gates(h).view(-1, HIDDEN, 4).logsumexp(-1).tanh() + m.U(x),
    "logarithm of softmax": lambda m, x, h: m.gates(h).view(-1, HIDDEN, 4).log_softmax(-1)[..., 0].tanh() + m.U(x),
    "sum of a pool": lambda m, x, h: m.gates(h).tanh().view(-1, HIDDEN, 4).sum(-1).tanh() + m.U(x),
}  # fmt: skip


def _by_hand(a):
    d = a - a.mean(-1, keepdim=True)
    return d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-5)


def _standardised(a):
    return (a - a.mean(1, True)) / (a.std(1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("name", FUSED)
def test_reductions_equal_their_own_step(name):
    torch.manual_seed(0)
    cell = Ruled(FUSED[name])
    compare(cell, *sized(cell))


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [(_lstm, (HIDDEN, HIDDEN)), (_gates_apart, (HIDDEN, HIDDEN)), (_memory, (HIDDEN, 25))],
)
def test_reductions_in_cells_of_two_states(rule, sizes):
    torch.manual_seed(0)
    cell = Ruled(rule, sizes)
    compare(cell, *sized(cell))


def described(rule):
    plan = plan_of(Ruled(rule), PlanRequest(torch.float32, torch.float32, "cpu"))
    assert plan.traced is not None, plan.reason
    return plan.traced.cell


def test_the_mean_of_products_costs_nothing_in_the_loop():
    """Rows of the matrices without their mean stand in for it: one product of all units, the others of one number."""
    cell = described(FUSED["layer norm"])
    assert [stage.size for stage in cell.stages] == [HIDDEN, 1, HIDDEN]
    assert sorted(cell.matrices) == [(1, HIDDEN), (HIDDEN, 1), (HIDDEN, HIDDEN)]


def test_layer_norm_keeps_the_input_as_one_product():
    layer = Recurrent(Ruled(FUSED["layer norm"]))
    assert "one product" in layer.explain()


def test_a_gate_for_all_units_is_computed_once():
    cell = described(FUSED["one gate for all units"])
    assert sorted(stage.size for stage in cell.stages) == [1, HIDDEN]


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda m, x, h: m.W(h).softmax(-1) + m.U(x), "_softmax over more than 16 units"),
        (lambda m, x, h: m.W(h) - h.amax(-1, keepdim=True) + m.U(x), "amax over more than 16 units"),
        (lambda m, x, h: m.W(h) + m.U(x) - h.mean(), "mixes the rows"),
        (lambda m, x, h: m.W(h) + m.U(x) - h.mean(0), "mixes the rows"),
        (lambda m, x, h: m.W(h) / h.norm(3, dim=-1, keepdim=True) + m.U(x), "of order 3"),
        (lambda m, x, h: m.W(h) + m.U(x) + h.median(-1, keepdim=True).values, "median"),
    ],
)
def test_other_reductions_are_refused_by_name(rule, reason):
    assert reason in plan_of(Ruled(rule), PlanRequest(torch.float32, torch.float32, "cpu")).reason
