"""Small cells as users write them: the same recurrence in many spellings, and many others.

`SAME` holds groups of spellings that must have one description; `FUSED` single cells that can be described; `PLAIN` cells
that cannot, with the word that the log line must contain.
"""

# ruff: noqa: E501  (a table: one cell a line)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.cells.cell import Cell

INPUT, HIDDEN = 3, 4
Rule = Callable[..., Any]


class Own(Cell):
    """A cell from two functions: one that makes its parameters, one that makes a step."""

    def __init__(
        self,
        make: Callable[[Cell], None],
        rule: Rule,
        states: tuple[int, ...] = (HIDDEN,),
        symbols: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.state_sizes, self.symbols = INPUT, states, symbols
        make(self)
        self.rule = rule

    def step(self, x: Tensor, *state: Tensor) -> Any:
        return self.rule(self, x, *state)


def simple(m: Any) -> None:
    m.U, m.W = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)


def gates(m: Any) -> None:
    m.U, m.W = nn.Linear(INPUT, 3 * HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)


def two(m: Any) -> None:
    simple(m)
    m.V = nn.Linear(HIDDEN, HIDDEN)


def joint(m: Any) -> None:
    m.J = nn.Linear(INPUT + HIDDEN, 2 * HIDDEN)


def paced(m: Any) -> None:
    simple(m)
    m.pace = nn.Parameter(torch.randn(HIDDEN))


def symbol(m: Any) -> None:
    m.E, m.W = nn.Embedding(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)


# ---- the same recurrence, spelled differently


def _in_place(m: Any, x: Tensor, h: Tensor) -> Tensor:
    a = m.U(x)
    a += m.W(h)
    return a.tanh_()


def _by_hand(m: Any, x: Tensor, h: Tensor) -> Tensor:
    a = torch.mm(x, m.U.weight.t())
    a = torch.addmm(a, h, m.W.weight.T)
    return (a + m.U.bias).tanh()


TANH = [
    lambda m, x, h: torch.tanh(m.U(x) + m.W(h)),
    lambda m, x, h: F.tanh(m.W(h) + m.U(x)),
    lambda m, x, h: (F.linear(x, m.U.weight, m.U.bias) + F.linear(h, m.W.weight)).tanh(),
    lambda m, x, h: torch.tanh(x @ m.U.weight.mT + h @ m.W.weight.mT + m.U.bias),
    lambda m, x, h: torch.tanh(torch.matmul(x, m.U.weight.t()) + m.U.bias + torch.matmul(h, m.W.weight.t())),
    lambda m, x, h: torch.tanh(torch.addmm(m.U(x), h, m.W.weight.t())),
    lambda m, x, h: torch.tanh((m.W.weight @ h.t()).t() + m.U(x)),
    lambda m, x, h: torch.tanh(torch.einsum("oh,bh->bo", m.W.weight, h) + m.U(x)),
    lambda m, x, h: torch.tanh((h.unsqueeze(1) @ m.W.weight.t()).squeeze(1) + m.U(x)),
    lambda m, x, h: torch.tanh(torch.bmm(h[:, None], m.W.weight.t().expand(len(h), -1, -1))[:, 0] + m.U(x)),
    lambda m, x, h: torch.tanh(
        F.linear(h.view(h.shape[0], -1), m.W.weight).reshape(x.size(0), HIDDEN) + m.U(x)
    ),
    lambda m, x, h: (
        torch.tanh(m.U(x) - F.linear(-h, m.W.weight)) if False else torch.tanh(m.U(x) + m.W(h.clone()))
    ),
    _in_place,
    _by_hand,
]


def _gru_lines(m: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    i, k = m.U(x).chunk(3, -1), m.W(h).chunk(3, -1)
    r, z = torch.sigmoid(i[0] + k[0]), torch.sigmoid(i[1] + k[1])
    return z, torch.tanh(i[2] + r * k[2]), r


def _gru(mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    def step(m: Any, x: Tensor, h: Tensor) -> Tensor:
        z, n, _ = _gru_lines(m, x, h)
        return mix(z, n, h)

    return step


def _gru_split(m: Any, x: Tensor, h: Tensor) -> Tensor:
    rz, n = (m.U(x)[:, : 2 * HIDDEN] + m.W(h)[:, : 2 * HIDDEN]).sigmoid(), m.U(x)[:, 2 * HIDDEN :]
    r, z = rz.split(HIDDEN, 1)
    n = torch.tanh(torch.addcmul(n, r, m.W(h)[:, 2 * HIDDEN :]))
    return n + z * (h - n)


def _gru_unflattened(m: Any, x: Tensor, h: Tensor) -> Tensor:
    i, k = m.U(x).unflatten(-1, (3, HIDDEN)), m.W(h).view(-1, 3, HIDDEN)
    r, z = (i[:, :2] + k[:, :2]).sigmoid().unbind(1)
    return torch.lerp(torch.tanh(i[:, 2] + r * k[:, 2]), h, z)


GRU = [
    _gru(lambda z, n, h: z * h + (1 - z) * n),
    _gru(lambda z, n, h: (1.0 - z) * n + h * z),
    _gru(lambda z, n, h: n + z * (h - n)),
    _gru(lambda z, n, h: (h - n) * z + n),
    _gru(lambda z, n, h: n - z * (n - h)),
    _gru(lambda z, n, h: n - z * n + z * h),
    _gru(lambda z, n, h: torch.lerp(n, h, z)),
    _gru(lambda z, n, h: torch.addcmul(n, z, h - n)),
    _gru(lambda z, n, h: z.mul(h).add_(z.neg().add(1).mul(n))),
    _gru_split,
    _gru_unflattened,
]

LEAKY = [
    lambda m, x, h: h + 0.1 * (torch.tanh(m.U(x) + m.W(h)) - h),
    lambda m, x, h: torch.lerp(h, torch.tanh(m.U(x) + m.W(h)), 0.1),
    lambda m, x, h: (1 - 0.1) * h + 0.1 * torch.tanh(m.W(h) + m.U(x)),
    lambda m, x, h: h - 0.1 * (h - torch.tanh(m.W(h) + m.U(x))),
]

JOINT = [  # one matrix for [x, h]
    lambda m, x, h: _glu_of(*m.J(torch.cat([x, h], 1)).chunk(2, 1)),
    lambda m, x, h: _glu_of(*torch.split(torch.hstack((x, h)) @ m.J.weight.t() + m.J.bias, HIDDEN, -1)),
    lambda m, x, h: _glu_of(
        *F.linear(torch.concat([x, h], dim=-1), m.J.weight, m.J.bias).unflatten(1, (2, -1)).unbind(1)
    ),
    lambda m, x, h: _glu_of(
        *(F.linear(x, m.J.weight[:, :INPUT]) + F.linear(h, m.J.weight[:, INPUT:]) + m.J.bias).chunk(2, 1)
    ),
]


def _glu_of(a: Tensor, b: Tensor) -> Tensor:
    return a.tanh() * b.sigmoid()


SAME: dict[str, tuple[Callable[[Any], None], list[Rule]]] = {
    "tanh": (simple, TANH),
    "gru": (gates, GRU),
    "leaky": (simple, LEAKY),
}
EQUIVALENT: dict[str, tuple[Callable[[Any], None], list[Rule]]] = {"joint": (joint, JOINT)}

# ---- others that can be described


def _two_level(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(m.V(torch.relu(m.W(h) + m.U(x))))


def _split_state(m: Any, x: Tensor, h: Tensor) -> Tensor:
    a, b = h.chunk(2, 1)
    u, v = (m.U(x) + m.W(h)).chunk(2, 1)
    return torch.cat([torch.tanh(u) * b, a + v.sigmoid() * b], 1)


def _interleaved(m: Any, x: Tensor, h: Tensor) -> Tensor:
    a, b = m.W(h)[:, ::2], m.W(h)[:, 1::2]
    return torch.stack([torch.tanh(a), torch.sigmoid(b)], -1).flatten(1) + m.U(x)


def _masked_assignment(m: Any, x: Tensor, h: Tensor) -> Tensor:
    y = torch.tanh(m.W(h) + m.U(x)).clone()
    y[:, 0] = 0.5 * y[:, 0]
    y[:, 1:3] += h[:, 1:3]
    return y


def _numbers_assigned(m: Any, x: Tensor, h: Tensor) -> Tensor:
    y, open_ = torch.tanh(m.W(h) + m.U(x)).clone(), torch.zeros_like(h)
    open_[:, 1:] = 1
    open_[:, 3].fill_(m.U.bias[0])
    y[:, 0] = 0.5
    return y * (2 * open_ - 0.5) + 0.1 * h


def _buffer(m: Any, x: Tensor, h: Tensor) -> Tensor:
    new = torch.zeros(x.shape[0], HIDDEN, dtype=h.dtype)
    new[:, :2] = torch.tanh(m.W(h))[:, :2]
    new[:, 2:] = m.U(x)[:, 2:]
    return new


def _scalar_gate(m: Any, x: Tensor, h: Tensor) -> Tensor:
    g = torch.sigmoid(F.linear(h, m.W.weight[:1]) + x[:, :1])
    return g * h + (1 - g) * torch.tanh(m.W(h) + m.U(x))


def _heads(m: Any, x: Tensor, h: Tensor) -> Tensor:
    parts = h.view(-1, 2, HIDDEN // 2).transpose(0, 1)  # (heads, B, n)
    mixed = torch.bmm(parts, m.W.weight.view(2, HIDDEN, HIDDEN // 2)[:, : HIDDEN // 2])
    return torch.tanh(mixed.transpose(0, 1).reshape(-1, HIDDEN) + m.U(x))


def _no_grad(m: Any, x: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        k = torch.sigmoid(m.W(h))
    return k * torch.tanh(m.W(h) + m.U(x))


def _repeated(times: int, update: Callable[[Tensor], Tensor]) -> Rule:
    def step(m: Any, x: Tensor, h: Tensor) -> Tensor:
        y = m.U(x) + m.W(h)
        for _ in range(times):
            y = update(y)
        return torch.tanh(y)

    return step


def _pade(m: Any, x: Tensor, h: Tensor) -> Tensor:
    """Each of the two is made of both of the iteration before: 2^30 paths."""
    p, q = m.U(x) + m.W(h), torch.ones_like(h)
    for _ in range(30):
        p, q = p + 0.1 * q, q + 0.1 * p * p / (1 + p * p)
    return torch.tanh(p / q)


def _plastic(m: Any, x: Tensor, h: Tensor, s: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """Short-term plasticity: resources s that spikes use up, and a release u that they raise."""
    release = m.pace.sigmoid()
    s = torch.clamp(s + 0.2 * (1 - s) - 0.1 * u * s * h, min=0, max=1)
    u = torch.clamp(u + 0.15 * (release - u) + 0.1 * release * (1 - u) * h, 0, 1)
    return F.relu(0.8 * h + 0.2 * (m.U(x) + m.W(u * s * h))), s, u


def _memory(m: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A Legendre memory unit: one number, of the input and both states, enters a linear memory."""
    enters = F.linear(x, m.U.weight[:1]) + F.linear(h, m.W.weight[:1]) + F.linear(c, m.V.weight[:1, :2])
    c = F.linear(c, m.V.weight[2:, :2]) + F.linear(enters, m.V.weight[2:, 2:3])
    return torch.tanh(m.U(x) + m.W(h) + F.linear(c, m.V.weight[:, :2])), c


def _rotated(m: Any, x: Tensor, h: Tensor) -> Tensor:
    """Complex numbers by their real and imaginary parts: oscillators that the input pushes."""
    (a, b), (u, v) = h.chunk(2, 1), m.U(x).chunk(2, 1)
    angle, left = m.pace[:2], 1 - h[:, :2] ** 2 - h[:, 2:] ** 2
    return torch.cat(
        [a * angle.cos() - b * angle.sin() + 0.1 * left * a + u, a * angle.sin() + b * angle.cos() + v], 1
    )


def _of(phi: Callable[[Tensor], Tensor]) -> Rule:
    return lambda m, x, h: phi(m.U(x) + m.W(h))


FUSED: dict[str, tuple[Callable[[Any], None], Rule, tuple[int, ...]]] = {
    "paced": (paced, lambda m, x, h: torch.lerp(h, torch.tanh(m.U(x) + m.W(h)), m.pace.sigmoid()), (HIDDEN,)),
    "two levels": (two, _two_level, (HIDDEN,)),
    "shortcut": (two, lambda m, x, h: torch.tanh(m.V(torch.relu(m.W(h) + m.U(x))) + m.W(h) + m.U(x)), (HIDDEN,)),
    "product twice": (simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x)) * torch.sigmoid(m.W(h)), (HIDDEN,)),
    "function of the state multiplied": (simple, lambda m, x, h: m.W(torch.relu(h)) + m.U(x), (HIDDEN,)),
    "rate model": (simple, lambda m, x, h: h + 0.1 * (-h + m.W(torch.tanh(h)) + m.U(x)), (HIDDEN,)),
    "minus": (simple, lambda m, x, h: torch.tanh(m.U(x) - m.W(h)), (HIDDEN,)),
    "no input": (simple, lambda m, x, h: torch.tanh(m.W(h)), (HIDDEN,)),
    "no matrix": (paced, lambda m, x, h: torch.relu(m.U(x) + m.pace * h), (HIDDEN,)),
    "no recurrence": (simple, lambda m, x, h: torch.tanh(m.U(x)), (HIDDEN,)),
    "input twice": (two, lambda m, x, h: m.U(x).sigmoid() * torch.tanh(m.W(h) + m.U(x)), (HIDDEN,)),
    "input through an MLP": (two, lambda m, x, h: torch.tanh(m.V(torch.relu(m.U(x))) + m.W(h)), (HIDDEN,)),
    "input by itself": (simple, lambda m, x, h: torch.tanh(m.W(h)) * x.sum(-1, keepdim=True).sigmoid() + m.U(x), (HIDDEN,)),
    "input normalised": (simple, lambda m, x, h: torch.tanh(m.U(F.layer_norm(x, (INPUT,))) + m.W(h)), (HIDDEN,)),
    "input softmax": (simple, lambda m, x, h: torch.tanh(m.U(x.softmax(-1)) + m.W(h)), (HIDDEN,)),
    "input transposed": (simple, lambda m, x, h: torch.tanh((m.U.weight @ x.t()).t() + m.W(h)), (HIDDEN,)),
    "two states": (two, lambda m, x, h, c: (torch.tanh(m.W(h) + c), torch.sigmoid(m.V(c) + m.U(x))), (HIDDEN, HIDDEN)),
    "delay": (simple, lambda m, x, h, d: (torch.tanh(m.W(d) + m.U(x)), h), (HIDDEN, HIDDEN)),
    "states of two sizes": (
        simple,
        lambda m, x, h, s: (torch.tanh(m.W(h) + m.U(x)) * s[:, :1], F.linear(h, m.W.weight[:2]) + s.sigmoid()),
        (HIDDEN, 2),
    ),
    "split state": (simple, _split_state, (HIDDEN,)),
    "interleaved": (simple, _interleaved, (HIDDEN,)),
    "assignment": (simple, _masked_assignment, (HIDDEN,)),
    "numbers assigned": (simple, _numbers_assigned, (HIDDEN,)),
    "buffer": (simple, _buffer, (HIDDEN,)),
    "scalar gate": (simple, _scalar_gate, (HIDDEN,)),
    "heads": (simple, _heads, (HIDDEN,)),
    "roll": (simple, lambda m, x, h: torch.tanh(h.roll(1, -1) + m.U(x)), (HIDDEN,)),
    "flip": (simple, lambda m, x, h: torch.tanh(m.W(h.flip(-1)) + m.U(x)), (HIDDEN,)),
    "no_grad": (simple, _no_grad, (HIDDEN,)),
    "detach": (simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x)) * h.detach(), (HIDDEN,)),
    "where": (simple, lambda m, x, h: torch.where(h > 0.1, m.W(h), 0.5 * h) + m.U(x), (HIDDEN,)),
    "masked_fill": (simple, lambda m, x, h: m.W(h).masked_fill(h < 0.1, 0.3) + m.U(x), (HIDDEN,)),
    "comparison": (simple, lambda m, x, h: (h >= m.W(h)).to(h.dtype) * m.U(x) + 0.1 * h, (HIDDEN,)),
    "logic": (simple, lambda m, x, h: ((h > 0) & ~(m.W(h) <= 0.2) | (h == 0)).double() * m.U(x) + 0.2 * h, (HIDDEN,)),
    "logic of numbers": (
        simple,
        lambda m, x, h: (
            torch.logical_and(h, m.W(h)).to(h.dtype)
            + torch.logical_or(h, F.relu(m.W(h))).to(h.dtype)
            + torch.logical_xor(F.relu(h), m.W(h)).to(h.dtype)
            + torch.logical_not(F.relu(h)).to(h.dtype)
        ) * m.U(x) + 0.2 * h,
        (HIDDEN,),
    ),
    "sums of truth values": (simple, lambda m, x, h: ((h > -1) + (m.W(h) > -9) ^ (h > 0)).to(h.dtype) * m.U(x), (HIDDEN,)),
    "small arguments": (
        simple,
        lambda m, x, h: (torch.expm1(1e-9 * m.W(h)) + torch.log1p(1e-9 * m.U(x) + 1e-9 * h)) * 1e8,
        (HIDDEN,),
    ),
    "softplus that ends early": (simple, lambda m, x, h: F.softplus(m.W(h) + m.U(x), 3, 0.5), (HIDDEN,)),
    "constant factor of a product": (simple, lambda m, x, h: m.W(0 * h) + m.U(x), (HIDDEN,)),
    "constant condition": (simple, lambda m, x, h: F.hardsigmoid(h * 0 + 3.0) * m.U(x) + 0.1 * h, (HIDDEN,)),
    "constant state": (simple, lambda m, x, h, c: (torch.tanh(m.W(h) + m.U(x) + c), torch.full_like(c, 0.5)), (HIDDEN, HIDDEN)),
    "state of inputs alone": (simple, lambda m, x, h: torch.zeros_like(h) + m.U(x), (HIDDEN,)),
    "clamp": (simple, lambda m, x, h: (m.W(h) + m.U(x)).clamp(-0.3, 0.4), (HIDDEN,)),
    "maximum": (simple, lambda m, x, h: torch.maximum(m.W(h), m.U(x)) + torch.minimum(h, m.U(x)), (HIDDEN,)),
    "power": (simple, lambda m, x, h: (m.W(h) + m.U(x)) ** 3 * 0.1 + (1 + h**2).pow(-1) + (1 + h.abs()).pow(0.7), (HIDDEN,)),
    "logarithm": (simple, lambda m, x, h: torch.log1p(h.abs()) + (m.W(h) + m.U(x)).exp().add(1).log(), (HIDDEN,)),
    "roots": (simple, lambda m, x, h: (1 + m.W(h).square()).sqrt() - (1 + m.U(x) ** 2 + h**2).rsqrt(), (HIDDEN,)),
    "gates by glu": (joint, lambda m, x, h: F.glu(m.J(torch.cat([x, h], -1)), -1), (HIDDEN,)),
    "low rank": (two, lambda m, x, h: torch.tanh(F.linear(h, m.V.weight[:, :2] @ m.W.weight[:2]) + m.U(x)), (HIDDEN,)),
    "weights of parameters": (two, lambda m, x, h: torch.tanh(h @ (m.W.weight * m.V.weight.sigmoid()).t() + m.U(x)), (HIDDEN,)),
    "GRUCell": (lambda m: setattr(m, "c", nn.GRUCell(INPUT, HIDDEN)), lambda m, x, h: m.c(x, h), (HIDDEN,)),
    "LSTMCell": (lambda m: setattr(m, "c", nn.LSTMCell(INPUT, HIDDEN)), lambda m, x, h, c: m.c(x, (h, c)), (HIDDEN, HIDDEN)),
    "short-term plasticity": (paced, _plastic, (HIDDEN, HIDDEN, HIDDEN)),
    "a number into a memory": (two, _memory, (HIDDEN, 2)),
    "complex by hand": (paced, _rotated, (HIDDEN,)),
    "product of products": (two, lambda m, x, h: torch.tanh(m.V(m.U(x) * m.W(h))), (HIDDEN,)),
    "einsum over blocks": (
        simple,
        lambda m, x, h: torch.tanh(
            torch.einsum("bgi,gij->bgj", h.view(-1, 2, 2), m.W.weight[:2].view(2, 2, 2)).reshape(-1, HIDDEN) + m.U(x)
        ),
        (HIDDEN,),
    ),
    "squared thirty times": (simple, _repeated(30, lambda y: y * y * 0.05 + 0.9 * y), (HIDDEN,)),
    "doubled forty times": (simple, _repeated(40, lambda y: (y + y) * 0.5), (HIDDEN,)),
    "a chain beyond Python's own stack": (simple, _repeated(260, lambda y: 1.01 * y - 0.001), (HIDDEN,)),
    "two sequences of fractions": (simple, _pade, (HIDDEN,)),
    "constants computed with": (
        simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x) * torch.full_like(x[:, :1], 0.3).exp()) + 0.1 * torch.ones_like(h), (HIDDEN,)
    ),
    "truth values squared": (
        simple, lambda m, x, h: _repeated(40, lambda y: torch.logical_and(y, y > 0).to(h.dtype))(m, x, h) * m.U(x), (HIDDEN,)
    ),
    "phases": (paced, lambda m, x, h: (h + m.pace + 0.1 * torch.sin(m.W(h) + m.U(x))) % (2 * torch.pi), (HIDDEN,)),
    "remainders by parameters": (
        paced,
        lambda m, x, h: torch.remainder(m.W(h) + m.U(x), m.pace) + torch.fmod(m.U(x) - h, 0.7 + m.pace.exp()),
        (HIDDEN,),
    ),
    "remainders by negative numbers": (simple, lambda m, x, h: (m.W(h) + m.U(x)) % -0.3 + (h % 1) * 0.5, (HIDDEN,)),
    "quotients rounded": (
        paced,
        lambda m, x, h: (
            torch.div(m.W(h), 0.3, rounding_mode="floor") + torch.div(h, m.pace, rounding_mode="floor")
            + torch.div(m.W(h), -0.2, rounding_mode="trunc") + torch.div(h, m.pace, rounding_mode="trunc")
        ) * m.U(x) * 0.1 + 0.1 * h,
        (HIDDEN,),
    ),
    "whole numbers": (
        simple,
        lambda m, x, h: (
            torch.floor(3 * h) + torch.ceil(2 * m.W(h)) + torch.trunc(4 * h) + torch.round(3 * m.W(h)) + torch.fix(h)
            + torch.round(h, decimals=1) + torch.round(30 * h, decimals=-1)
        ) * m.U(x) * 0.1 + 0.2 * h.frac(),
        (HIDDEN,),
    ),
    "straight-through rounding": (simple, lambda m, x, h: h + (torch.round(4 * m.W(h)) / 4 - m.W(h)).detach() + m.U(x), (HIDDEN,)),
    "angles": (
        simple,
        lambda m, x, h: torch.atan2(m.W(h), m.U(x)) + torch.atan(h) + torch.arctan2(h, torch.tensor(0.5, dtype=h.dtype)),
        (HIDDEN,),
    ),
    "arc functions": (
        simple,
        lambda m, x, h: torch.asin(torch.tanh(m.W(h))) + torch.acos(torch.sigmoid(m.U(x) + h)) + torch.rad2deg(h) * 0.01,
        (HIDDEN,),
    ),
    "hyperbolic": (
        simple,
        lambda m, x, h: (
            torch.sinh(h.tanh()) + torch.cosh(m.W(h).tanh()) + torch.asinh(m.U(x) + h)
            + torch.atanh(0.9 * torch.tanh(m.W(h))) + torch.acosh(1.1 + h**2)
        ) * 0.3,
        (HIDDEN,),
    ),
    "lengths": (simple, lambda m, x, h: torch.hypot(m.W(h), m.U(x)) / torch.hypot(h, 1 + m.U(x) ** 2), (HIDDEN,)),
    "logarithms of sums": (
        simple,
        lambda m, x, h: torch.logaddexp(m.W(h), m.U(x)) + torch.logaddexp(h, h) + torch.log10(1 + h**2),
        (HIDDEN,),
    ),
    "odds": (
        simple,
        lambda m, x, h: torch.logit(torch.sigmoid(m.W(h)) * 0.9 + 0.05) + torch.logit(m.U(x) * h, eps=0.1),
        (HIDDEN,),
    ),
    "entropy": (
        simple,
        lambda m, x, h: (lambda p: -torch.xlogy(p, p) - torch.special.xlogy(1 - p, 1 - p))(torch.sigmoid(m.W(h) + m.U(x))),
        (HIDDEN,),
    ),
    "entropy of zeros": (simple, lambda m, x, h: (lambda p: torch.xlogy(p, p.detach()))(F.relu(m.W(h) + m.U(x))), (HIDDEN,)),
    "extremes that pass NaN over": (
        simple, lambda m, x, h: torch.fmax(m.W(h), m.U(x)) + torch.fmin(h, m.U(x)) + 0.1 * torch.fmax(h, h), (HIDDEN,)
    ),
    "missing values": (simple, lambda m, x, h: torch.where(torch.isnan(h), 0.0, m.W(h)) + m.U(x) + 0.1 * h, (HIDDEN,)),
    "normal distribution": (
        simple, lambda m, x, h: torch.special.ndtr(m.W(h) + m.U(x)) + torch.erfc(h) * torch.special.erf(m.U(x)), (HIDDEN,)
    ),
    "RNNCell": (lambda m: setattr(m, "c", nn.RNNCell(INPUT, HIDDEN)), lambda m, x, h: m.c(x, h), (HIDDEN,)),
    **{
        f"unit {name}": (simple, _of(phi), (HIDDEN,))
        for name, phi in {
            "relu": F.relu, "silu": F.silu, "gelu": F.gelu, "gelu by tanh": lambda a: F.gelu(a, approximate="tanh"), "elu": F.elu, "selu": F.selu,
            "celu": F.celu, "leaky_relu": F.leaky_relu, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh,
            "hardswish": F.hardswish, "relu6": F.relu6, "softsign": F.softsign, "softplus": F.softplus, "mish": F.mish,
            "tanhshrink": F.tanhshrink, "softshrink": F.softshrink, "hardshrink": F.hardshrink, "logsigmoid": F.logsigmoid,
            "threshold": lambda a: F.threshold(a, 0.1, 0.2), "abs": torch.abs, "sign": lambda a: a.sign() * a * 0.5,
            "sin": torch.sin, "cos": lambda a: a.cos(), "tan": lambda a: torch.tan(a) * 0.1, "sinc": torch.sinc,
            "snake": lambda a: a + torch.sin(3 * a) ** 2 / 3, "deg2rad": lambda a: torch.deg2rad(50 * a),
            "expm1": lambda a: torch.expm1(a) * 0.1, "prelu": lambda a: F.prelu(a, torch.tensor(0.3, dtype=a.dtype)),
        }.items()
    },
}  # fmt: skip

SYMBOLS: dict[str, tuple[Callable[[Any], None], Rule]] = {
    "embedding": (symbol, lambda m, x, h: torch.tanh(m.E(x) + m.W(h))),
    "embedding function": (symbol, lambda m, x, h: torch.tanh(F.embedding(x, m.E.weight) + m.W(h))),
    "embedding, then a product": (symbol, lambda m, x, h: torch.tanh(m.W(m.E(x)) + m.W(h))),
    "one-hot": (symbol, lambda m, x, h: torch.tanh(F.one_hot(x, INPUT).to(h.dtype) @ m.E.weight + m.W(h))),
}

# ---- what runs by the plain loop, and the word that says why


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _branch(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.tanh(m.W(h)) if h.sum() > 0 else torch.relu(m.U(x))


def _hooked(m: Any, x: Tensor, h: Tensor) -> Tensor:
    y = torch.tanh(m.W(h) + m.U(x))
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-1, 1))
    return y


PLAIN: dict[str, tuple[Callable[[Any], None], Rule, str]] = {
    "branch": (simple, _branch, "value of a tensor"),
    "item": (simple, lambda m, x, h: torch.tanh(m.W(h)) * h.abs().amax(1)[0].item(), "value of a tensor"),
    "no such function": (simple, lambda m, x, h: torch.lgamma(m.W(h) + m.U(x)) * 0.1, "lgamma"),
    "no derivative in torch": (simple, lambda m, x, h: (m.W(h) // 0.3).detach() + m.U(x), "floor_divide"),
    "remainder of a number": (simple, lambda m, x, h: (2.0 % (1 + h**2)).detach() + m.U(x), "remainder of a number"),
    "sort": (simple, lambda m, x, h: torch.tanh(m.W(h)).sort(-1).values, "sort"),
    "gather": (simple, lambda m, x, h: torch.tanh(m.W(h))[:, (m.U(x) > 0).long()[0]], "index"),
    "batch": (simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x)) / x.shape[0], "batch size"),
    "over the batch": (simple, lambda m, x, h: torch.tanh(m.W(h) + m.U(x - x.mean(0))), "rows of a batch"),
    "state times state": (simple, lambda m, x, h: torch.tanh((h.unsqueeze(1) @ h.unsqueeze(2)).squeeze(1) * m.U(x)), "bmm"),
    "state times matrix of the input": (
        simple, lambda m, x, h: torch.bmm(h[:, None], torch.diag_embed(m.U(x)))[:, 0], "diag",
    ),
    "autograd.Function": (simple, lambda m, x, h: _Straight.apply(m.W(h) + m.U(x)) * h, "autograd.Function"),
    "gradient hook": (simple, _hooked, "requires_grad"),
    "numpy": (simple, lambda m, x, h: torch.tanh(m.W(h) + float(x.detach().numpy().mean())), "numpy"),
    "division by zero": (simple, lambda m, x, h: torch.tanh(m.U(x) + ((1 + h.abs()) / 0.0).clamp(-1, 1)), "division by zero"),
    "a negative base": (simple, lambda m, x, h: (-2.0) ** (m.W(h) > 0).to(h.dtype) * m.U(x), "pow"),
    "numbers into integers": (simple, lambda m, x, h: torch.zeros_like(h, dtype=torch.int64).copy_(4 * h) * m.U(x), "int64"),
    "double inside": (simple, lambda m, x, h: torch.tanh(m.W(h).half().to(h.dtype) + m.U(x)), "float16"),
}  # fmt: skip
