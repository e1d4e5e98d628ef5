"""Random cells, and random inputs for any cell: what every backend is tried on beside the cells the package ships.

A cell has one to four stages of one or two sizes, one to three states, pre-activations with entries side by side,
interleaved or none, products with states and earlier outputs through parts of matrices, and expressions made of every
function of the table, each kept where it is smooth enough for its slope to mean something. Units of the table take any
argument, so that a new one is drawn without a word here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.call import Inputs
from deeprnn.cells.description import CellDescription, Output, Preactivation, Product, Rows, Stage, Vector
from deeprnn.cells.expressions import Expression, apply, leaf
from deeprnn.cells.functions import UNITS

SIZES = (1, 7, 16, 33, 63, 129)


class _Draft:
    """A cell being drawn."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        some = self.draw.sample(SIZES, self.draw.choice((1, 1, 2)))
        self.sizes = [self.draw.choice(some) for _ in range(self.draw.choice((1, 1, 2, 2, 3, 4)))]
        self.states = [self.draw.choice(self.sizes) for _ in range(self.draw.choice((1, 1, 2, 3)))]
        self.matrices: list[tuple[int, int]] = []
        self.vectors: list[int] = []
        self.masks: list[int] = []
        self.stages: list[Stage] = []
        self.entry_width = 0

    # ---- products

    def vectors_to_multiply(self) -> list[tuple[Vector, int]]:
        """What a product of the next stage may multiply, and its length."""
        outputs = [
            (Vector("output", k, s), stage.size)
            for s, stage in enumerate(self.stages)
            for k in range(len(stage.outputs))
        ]
        return [*((Vector("state", j), n) for j, n in enumerate(self.states)), *outputs]

    def products(self, size: int, rows: Rows, total: int) -> tuple[Product, ...]:
        """One to three products through `rows` of matrices of `total` rows, some with columns to spare."""
        made = []
        for vector, length in self.draw.sample(
            self.vectors_to_multiply(), min(self.draw.randint(1, 3), len(self.vectors_to_multiply()))
        ):
            column, spare = self.draw.choice(((0, 0), (0, 0), (2, 3)))
            self.matrices.append((total, column + length + spare))
            made.append(Product(len(self.matrices) - 1, vector, rows, column))
        return tuple(made)

    def preactivations(self, size: int) -> tuple[Preactivation, ...]:
        count = self.draw.randint(0, 4)
        if count > 1 and self.draw.random() < 0.3:  # a pool: entries and rows of the same matrices in turns
            start, self.entry_width = self.entry_width, self.entry_width + count * size
            shared = self.products(size, Rows(0, count), count * size)
            return tuple(
                Preactivation(tuple(p._replace(rows=Rows(i, count)) for p in shared), Rows(start + i, count))
                for i in range(count)
            )
        made = []
        for _ in range(count):
            entry = None
            if self.draw.random() < 0.7:
                entry, self.entry_width = Rows(self.entry_width), self.entry_width + size
            if entry is not None and self.draw.random() < 0.2:
                made.append(Preactivation((), entry))
                continue
            start, step = self.draw.choice(((0, 1), (0, 1), (1, 1), (1, 2)))
            made.append(Preactivation(self.products(size, Rows(start, step), start + step * size), entry))
        return tuple(made)

    # ---- expressions

    def leaves(self, size: int, preactivations: int) -> list[Expression]:
        """What pointwise code of the next stage may read; a vector and a stream of its own may come with it."""
        found = [leaf("preactivation", i) for i in range(preactivations)] * 2
        found += [leaf("state", j) for j, n in enumerate(self.states) if n == size]
        found += [
            leaf("output", s, k)
            for s, stage in enumerate(self.stages)
            if stage.size == size
            for k in range(len(stage.outputs))
        ]
        for kind, sizes in (("vector", self.vectors), ("mask", self.masks)):
            if self.draw.random() < 0.4 or (kind == "vector" and not found):
                sizes.append(size)
            found += [leaf(kind, i) for i, n in enumerate(sizes) if n == size]
        return found

    def expression(self, leaves: list[Expression], depth: int) -> Expression:
        """A value of order one."""
        if depth == 0 or self.draw.random() < 0.1:
            return self.draw.choice(leaves)
        args = [self.expression(leaves, depth - 1) for _ in range(3)]
        form, unit = self.draw.choice(FORMS), list(UNITS)[int(len(UNITS) * self.draw.random())]
        return form(*args) if form is not None else apply(unit, args[0])

    def output(self, leaves: list[Expression]) -> Expression:
        return apply(
            self.draw.choice(("tanh", "sigmoid", "softplus")),
            self.expression(leaves, self.draw.choice((1, 2, 2, 3))),
        )


def _positive(x: Expression) -> Expression:
    """Between 0.5 and 1.5."""
    return apply("sigmoid", x) + 0.5


Form = Callable[[Expression, Expression, Expression], Expression]
FORMS: list[Form | None] = [
    *[None] * 5,  # a unit of the table
    lambda a, b, c: a + b,
    lambda a, b, c: a - b,
    lambda a, b, c: apply("sigmoid", a) * b,
    lambda a, b, c: apply("tanh", a) * apply("tanh", b),
    lambda a, b, c: a / _positive(b),
    lambda a, b, c: -a,
    lambda a, b, c: apply("softplus", a),
    lambda a, b, c: apply("exp", apply("tanh", a)) + apply("expm1", apply("tanh", b)),
    lambda a, b, c: apply("log", _positive(a)) + apply("log1p", _positive(b)),
    lambda a, b, c: apply("sqrt", _positive(a)),
    lambda a, b, c: apply("sine", a + b) + apply("cosine", c),
    lambda a, b, c: apply("erf", a) * b + apply("erfc", c),
    lambda a, b, c: apply("sinh", apply("tanh", a)) + apply("cosh", apply("tanh", b)) + apply("arcsinh", c),
    lambda a, b, c: apply("arctan2", a, _positive(b)) + apply("hypot", _positive(b), c),
    lambda a, b, c: apply("floor", a) * apply("tanh", b) + apply("round", c) * apply("sigmoid", b),
    lambda a, b, c: apply("fmod", a, _positive(b)) + apply("remainder", c, _positive(b)),
    lambda a, b, c: apply("square", apply("tanh", a)),
    lambda a, b, c: apply("absolute", a),
    lambda a, b, c: apply("sign", a) * apply("tanh", b),
    lambda a, b, c: apply("step", a) * b,
    lambda a, b, c: apply("equal", a, b) + c,
    lambda a, b, c: apply("select", apply("greater", a, b), a, c),
    lambda a, b, c: apply("maximum", a, b, c),
    lambda a, b, c: apply("minimum", a, b),
    lambda a, b, c: apply("ratio", a, _positive(b)),
    lambda a, b, c: apply("power", _positive(a), _positive(b)),
    lambda a, b, c: apply("power_log", _positive(a), _positive(b)),
    lambda a, b, c: apply("lp", _positive(a) + 1.0, b, c),
    lambda a, b, c: apply("mix", apply("sigmoid", a), b, c),
    lambda a, b, c: apply("detach", a) + b,
    lambda a, b, c: 0.7 * a + 0.3,
    lambda a, b, c: (1.0 - apply("sigmoid", a)) * b + apply("sigmoid", a) * c,
]


def random_cell(seed: int) -> CellDescription:
    """The cell of a seed."""
    draft = _Draft(seed)
    for size in draft.sizes:
        preactivations = draft.preactivations(size)
        leaves = draft.leaves(size, len(preactivations))
        outputs = tuple(draft.output(leaves) for _ in range(draft.draw.choice((1, 1, 1, 2, 3))))
        draft.stages.append(Stage(size, preactivations, outputs))
    if draft.entry_width == 0:  # every input enters somewhere
        return random_cell(seed + 100_000)
    return CellDescription(
        states=tuple(draft.states),
        stages=tuple(draft.stages),
        new_states=tuple(_becomes(draft, n) for n in draft.states),
        matrices=tuple(draft.matrices),
        entry_width=draft.entry_width,
        vectors=tuple(draft.vectors),
        masks=tuple(draft.masks),
    )


def _becomes(draft: _Draft, size: int) -> Output:
    s = max(s for s, stage in enumerate(draft.stages) if stage.size == size)
    return Output(s, draft.draw.randrange(len(draft.stages[s].outputs)))


class Shape(NamedTuple):
    """How long, how many, and what comes along."""

    T: int = 5
    B: int = 3
    P: int | None = None
    reset: bool = False


def random_inputs(cell: CellDescription, shape: Shape, seed: int) -> Inputs:
    """Inputs in float64; masks are 0 or 1.25, every other one the same at all steps."""
    generator = torch.Generator().manual_seed(seed)
    lead = () if shape.P is None else (shape.P,)
    rows = (shape.T, shape.B)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*lead, *size, generator=generator, dtype=torch.float64) * scale

    def mask(*size: int) -> Tensor:
        return 1.25 * (torch.rand(*lead, *size, generator=generator, dtype=torch.float64) < 0.8).double()

    reset = torch.rand(*rows, generator=generator) < 0.25 if shape.reset else None
    return Inputs(
        normal(*rows, cell.entry_width),
        [normal(shape.B, n) for n in cell.states],
        [normal(m, n, scale=0.7 / n**0.5) for m, n in cell.matrices],
        [1.0 + 0.3 * normal(n) for n in cell.vectors],
        [mask(*(rows if i % 2 == 0 else rows[1:]), n) for i, n in enumerate(cell.masks)],
        reset,
    )


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers in another type."""
    return inputs._replace(
        A=None if inputs.A is None else inputs.A.to(dtype),
        states=[x.to(dtype) for x in inputs.states],
        matrices=[x.to(dtype) for x in inputs.matrices],
        vectors=[x.to(dtype) for x in inputs.vectors],
        masks=[x.to(dtype) for x in inputs.masks],
    )
