"""Descriptions of well-known cells, written out by hand for tests of the backends."""

from __future__ import annotations

from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import (
    CellDescription,
    Output,
    Preactivation,
    Product,
    Rows,
    Stage,
    Vector,
)
from deeprnn.cells.expressions import apply, leaf


def pre(i):
    return leaf("preactivation", i)


STATE = Vector("state", 0)


def gates(
    count: int, size: int, vector: Vector = STATE, matrix: int = 0, entries: bool = True, start: int = 0
):
    """As many pre-activations, each `size` rows of one matrix times one vector."""
    return tuple(
        Preactivation((Product(matrix, vector, Rows(k * size)),), Rows(start + k * size) if entries else None)
        for k in range(count)
    )


def lstm(H: int, peepholes: bool = False) -> CellDescription:
    """i, f, g, o as in nn.LSTM."""
    c = leaf("state", 1)
    peep = [leaf("vector", k) for k in range(3)] if peepholes else None
    i = apply("sigmoid", pre(0) + peep[0] * c if peep else pre(0))
    f = apply("sigmoid", pre(1) + peep[1] * c if peep else pre(1))
    new = f * c + i * apply("tanh", pre(2))
    o = apply("sigmoid", pre(3) + peep[2] * new if peep else pre(3))
    stage = Stage(H, gates(4, H), (o * apply("tanh", new), new))
    vectors = (H,) * 3 if peepholes else ()
    return CellDescription((H, H), (stage,), (Output(0, 0), Output(0, 1)), ((4 * H, H),), 4 * H, vectors)


def gru(H: int) -> CellDescription:
    """As in nn.GRU: reset after the product, with the product's own bias."""
    h = leaf("state", 0)
    r, z = apply("sigmoid", pre(0)), apply("sigmoid", pre(1))
    n = apply("tanh", pre(2) + r * (pre(3) + leaf("vector", 0)))
    state = Vector("state", 0)
    pres = (
        Preactivation((Product(0, state, Rows(0)),), Rows(0)),
        Preactivation((Product(0, state, Rows(H)),), Rows(H)),
        Preactivation((), Rows(2 * H)),
        Preactivation((Product(0, state, Rows(2 * H)),), None),
    )
    stage = Stage(H, pres, ((1.0 - z) * n + z * h,))
    return CellDescription((H,), (stage,), (Output(0, 0),), ((3 * H, H),), 3 * H, (H,))


def gru_as_published(H: int) -> CellDescription:
    """Reset before the product: two stages."""
    h = leaf("state", 0)
    first = Stage(H, gates(2, H), (apply("sigmoid", pre(0)) * h, apply("sigmoid", pre(1))))
    candidate = Preactivation((Product(1, Vector("output", 0, 0)),), Rows(2 * H))
    z = leaf("output", 0, 1)
    second = Stage(H, (candidate,), (z * h + (1.0 - z) * apply("tanh", pre(0)),))
    return CellDescription((H,), (first, second), (Output(1, 0),), ((2 * H, H), (H, H)), 3 * H)


def highway(H: int, depth: int) -> CellDescription:
    """A recurrent highway: s_l = h_l t_l + s_{l-1} (1 - t_l); the input enters the first stage."""
    stages = []
    for l in range(depth):
        vector = Vector("state", 0) if l == 0 else Vector("output", 0, l - 1)
        below = vector.leaf
        t = apply("sigmoid", pre(1))
        out = apply("tanh", pre(0)) * t + below * (1.0 - t)
        stages.append(Stage(H, gates(2, H, vector, l, entries=l == 0), (out,)))
    return CellDescription((H,), tuple(stages), (Output(depth - 1, 0),), ((2 * H, H),) * depth, 2 * H)


def leaky(H: int) -> CellDescription:
    """h + α (tanh(a) - h) with a rate for each unit, and noise as a stream."""
    h, rate = leaf("state", 0), leaf("vector", 0)
    out = h + rate * (apply("tanh", pre(0) + leaf("mask", 0)) - h)
    return CellDescription((H,), (Stage(H, gates(1, H), (out,)),), (Output(0, 0),), ((H, H),), H, (H,), (H,))


def by_name(H: int = 7) -> dict[str, CellDescription]:
    """Every cell at a small size."""
    sizes = (H + 3, H)
    return {
        "rnn": DeepTransition((H,), ("tanh",), (False,)).cell,
        "dts": DeepTransition(sizes, ("sigmoid", "tanh"), (False, True)).cell,
        "dts3": DeepTransition((H + 2, H + 5, H), ("relu", "sigmoid", "tanh"), (False, True, True)).cell,
        "pooled": DeepTransition(sizes, ("lp", "maxout"), (False, True), (2, 3)).cell,
        "masked": DeepTransition(sizes, ("tanh", "sigmoid"), (False, True), (), (True, False), True).cell,
        "lstm": lstm(H),
        "peepholes": lstm(H, peepholes=True),
        "gru": gru(H),
        "gru-published": gru_as_published(H),
        "highway": highway(H, 3),
        "leaky": leaky(H),
    }
