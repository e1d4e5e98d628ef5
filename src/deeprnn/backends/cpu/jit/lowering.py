"""A cell's forward and backward pass as stages of sums and pointwise code, without sizes of batch, time or threads.

Forward, a stage's sums are its pre-activations. Backward, stages run in reverse, and a sum is the part of an output's
gradient that comes through matrices: from later stages of the same step and, where the output becomes a state, from
the step after. Gradients that flow between pointwise codes of the same unit go through memory: within a step (`local`)
and from step to step (`carry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deeprnn.backends.cpu.jit.pointwise import Pointwise, Read, Write, value_leaf
from deeprnn.backends.gradients import shared_products
from deeprnn.cells.adjoint import Adjoint, adjoint
from deeprnn.cells.description import CellDescription, Output, Rows, Vector
from deeprnn.cells.expressions import Expression, in_order, replace


class Operand(NamedTuple):
    """A tensor of a pass, by what it is; `width` numbers a row (marks: a byte)."""

    kind: str
    """"A", "first" (state), "vector", "mask", "marks", "matrix", "output", "saved"; backward also "gradient" (of an
    output, from outside), "delta", "carry", "local", "first_gradient" """
    index: int = 0
    width: int = 0


class View(NamedTuple):
    """Columns of an operand at step t + shift."""

    operand: Operand
    column: int = 0
    shift: int = 0
    outside: Operand | None = None
    """what stands for steps before the first or after the last"""


class Term(NamedTuple):
    """Rows of a matrix times a vector, or, backward, its columns times gradients: where both lie."""

    view: int
    marks: int | None
    depth: int
    matrix: Operand
    row: int
    column: int
    unit_step: int
    """rows from unit to unit (forward)"""


class LoweredStage(NamedTuple):
    """What is computed for each unit of a stage."""

    size: int
    views: tuple[View, ...]
    sums: tuple[tuple[Term, ...], ...]
    pointwise: Pointwise
    travels: bool
    """whether sums elsewhere read what it writes"""


class Pass(NamedTuple):
    """A forward or a backward pass."""

    operands: tuple[Operand, ...]
    stages: tuple[LoweredStage, ...]
    """in the order they run in a step"""
    final: tuple[LoweredStage, ...]
    """those that run once, after the last step"""
    backward: bool


MARKS = Operand("marks")
ZEROS = Operand("zeros")


@dataclass
class _StageBuilder:
    """Collects the slots, values and writes of a stage."""

    views: list[View] = field(default_factory=list)
    values: dict[Expression, tuple[Read, ...]] = field(default_factory=dict)

    def slot(self, view: View) -> int:
        if view not in self.views:
            self.views.append(view)
        return self.views.index(view)

    def marks(self, shift: int) -> int:
        """The reset marks of step t + shift."""
        return self.slot(View(MARKS, shift=shift, outside=ZEROS))

    def read(self, view: View, step: int = 1, marks: int | None = None) -> Read:
        return Read(self.slot(view), step=step, marks=marks)

    def pointwise(self, results: Sequence[tuple[Expression, tuple[Write, ...]]]) -> Pointwise:
        """With leaves replaced by numbers in the order of their first use."""
        leaves = [n for n in in_order([e for e, _ in results]) if n.is_leaf and n.op != "constant"]
        numbers = {node: value_leaf(i) for i, node in enumerate(leaves)}
        return Pointwise(
            tuple(self.values[node] for node in leaves),
            tuple((replace(e, numbers), writes) for e, writes in results),
        )


def forward_pass(cell: CellDescription, keep: bool) -> Pass:
    """Every output and, with `keep`, what the backward pass needs."""
    own = adjoint(cell)
    saved = own.saved if keep else ()
    operands = [
        Operand("A", 0, cell.entry_width),
        *_given(cell),
        *(_output(cell, o) for o in cell.outputs),
        *(_saved(cell, own, place) for place in saved),
        *_matrices(cell),
    ]
    stages = tuple(_forward_stage(cell, own, s, keep) for s in range(len(cell.stages)))
    return Pass((*operands, ZEROS), stages, (), backward=False)


def backward_pass(cell: CellDescription) -> Pass:
    """delta, and the gradients of the first states."""
    own = adjoint(cell)
    flows = _Flows(cell, own)
    stages = tuple(_backward_stage(flows, s) for s in range(len(cell.stages) - 1, -1, -1))
    final = tuple(_first_gradient(flows, j) for j in range(len(cell.states)))
    operands = [
        Operand("delta", 0, own.width),
        *_given(cell),
        *(_output(cell, o) for o in cell.outputs),
        *(_saved(cell, own, place) for place in own.saved),
        *(Operand("gradient", k, cell.stages[o.stage].size) for k, o in enumerate(cell.outputs)),
        *(Operand("first_gradient", j, n) for j, n in enumerate(cell.states)),
        *flows.carry.values(),
        *flows.local.values(),
        *_matrices(cell),
    ]
    return Pass((*operands, ZEROS), stages, final, backward=True)


def _given(cell: CellDescription) -> list[Operand]:
    """What both directions are given."""
    kinds = (("first", cell.states), ("vector", cell.vectors), ("mask", cell.masks))
    return [*(Operand(kind, i, n) for kind, sizes in kinds for i, n in enumerate(sizes)), MARKS]


def _matrices(cell: CellDescription) -> list[Operand]:
    return [Operand("matrix", i, columns) for i, (_, columns) in enumerate(cell.matrices)]


def _output(cell: CellDescription, output: Sequence[int]) -> Operand:
    stage, index = output
    return Operand("output", cell.outputs.index(Output(stage, index)), cell.stages[stage].size)


def _saved(cell: CellDescription, own: Adjoint, place: tuple[int, int]) -> Operand:
    return Operand("saved", own.saved.index(place), cell.stages[place[0]].size)


def _previous(cell: CellDescription, state: int) -> View:
    """A state as a step sees it."""
    output = _output(cell, cell.new_states[state])
    return View(output, shift=-1, outside=Operand("first", state, cell.states[state]))


def _leaf(cell: CellDescription, own: Adjoint, builder: _StageBuilder, node: Expression) -> Read:
    """How pointwise code of either direction reads a leaf of the forward pass."""
    index: tuple[int, ...] = node.value  # type: ignore[assignment]
    if node.op == "state":
        return builder.read(_previous(cell, index[0]), marks=builder.marks(0))
    if node.op == "output":
        return builder.read(View(_output(cell, index)))
    if node.op == "saved":
        return builder.read(View(_saved(cell, own, index)))  # type: ignore[arg-type]
    sizes = cell.vectors if node.op == "vector" else cell.masks
    return builder.read(View(Operand(node.op, index[0], sizes[index[0]])))


# ---- forward


def _forward_stage(cell: CellDescription, own: Adjoint, s: int, keep: bool) -> LoweredStage:
    stage, builder = cell.stages[s], _StageBuilder()
    results = [(e, View(_output(cell, (s, k)))) for k, e in enumerate(stage.outputs)]
    if keep:
        results += [(e, View(_saved(cell, own, (s, k)))) for k, e in enumerate(own.stages[s].saved)]
    numbers: dict[int, int] = {}  # of the sum that belongs to a pre-activation
    for node in in_order([e for e, _ in results]):
        if node.op == "preactivation":
            (i,) = node.value  # type: ignore[misc]
            reads = []
            if stage.preactivations[i].products:
                numbers[i] = len(numbers)
                reads.append(Read(numbers[i], is_sum=True))
            if (entry := stage.preactivations[i].entry) is not None:
                reads.append(builder.read(View(Operand("A", 0, cell.entry_width), entry.start), entry.step))
            builder.values[node] = tuple(reads)
        elif node.is_leaf and node.op != "constant":
            builder.values[node] = (_leaf(cell, own, builder, node),)
    pointwise = builder.pointwise([(e, (Write(builder.slot(view)),)) for e, view in results])
    sums = tuple(
        tuple(_forward_term(cell, builder, product) for product in stage.preactivations[i].products)
        for i in numbers
    )
    travels = any(o.stage == s for o in cell.travelling)
    return LoweredStage(stage.size, tuple(builder.views), sums, pointwise, travels)


def _forward_term(cell: CellDescription, builder: _StageBuilder, product) -> Term:
    vector = product.vector
    if vector.kind == "state":
        view, marks = builder.slot(_previous(cell, vector.index)), builder.marks(0)
    else:
        view, marks = builder.slot(View(_output(cell, (vector.stage, vector.index)))), None
    matrix = Operand("matrix", product.matrix, cell.matrices[product.matrix][1])
    depth = cell.size_of(vector)
    return Term(view, marks, depth, matrix, product.rows.start, product.column, product.rows.step)


# ---- backward


class _Flows:
    """Where gradients flow besides through matrices, and which matrices each vector's gradient comes through."""

    def __init__(self, cell: CellDescription, own: Adjoint):
        self.cell, self.own = cell, own
        self.delta = Operand("delta", 0, own.width)
        nodes = [node for stage in own.stages for node, _ in stage.leaves]
        states = sorted({node.value[0] for node in nodes if node.op == "state"})  # type: ignore[index]
        outputs = sorted({node.value for node in nodes if node.op == "output"})  # type: ignore[type-var]
        self.carry = {j: Operand("carry", j, cell.states[j]) for j in states}
        self.local = {
            o: Operand("local", i, cell.stages[o[0]].size)  # type: ignore[index]
            for i, o in enumerate(outputs)
        }
        self.products: dict[Vector, list] = {}
        for product in shared_products(own):
            self.products.setdefault(product.vector, []).append(product)
        self.started: set[Operand] = set()

    def terms(self, builder: _StageBuilder, vector: Vector) -> list[Term]:
        """The gradient of a vector from those of the pre-activations that its products are part of."""
        shift = 1 if vector.kind == "state" else 0
        terms = []
        for product in self.products.get(vector, ()):
            column = product.start
            for segment in product.segments:
                view = builder.slot(View(self.delta, column, shift))
                marks = builder.marks(1) if shift else None
                matrix = Operand("matrix", segment.matrix, self.cell.matrices[segment.matrix][1])
                terms.append(Term(view, marks, segment.rows, matrix, segment.row, segment.column, 1))
                column += segment.rows
        return terms

    def write(self, builder: _StageBuilder, operand: Operand) -> Write:
        """Store what flows to an operand; whoever comes later adds to it."""
        add = operand in self.started
        self.started.add(operand)
        return Write(builder.slot(View(operand)), add=add)

    def carried(self, builder: _StageBuilder, state: int) -> list[Read]:
        """What pointwise code of the step after passes back to a state."""
        if state not in self.carry:
            return []
        return [builder.read(View(self.carry[state], shift=1), marks=builder.marks(1))]


def _backward_stage(flows: _Flows, s: int) -> LoweredStage:
    cell, own, builder = flows.cell, flows.own, _StageBuilder()
    stage, formulas = cell.stages[s], own.stages[s]
    columns = [own.columns[s, i] for i in range(len(stage.preactivations))]
    results: list[tuple[Expression, Rows | Operand]] = list(
        zip(formulas.preactivations, columns, strict=True)
    )
    for node, formula in formulas.leaves:
        if node.op == "vector":
            place = own.vector_columns[s, node.value[0]]  # type: ignore[index]
            if place not in columns:
                results.append((formula, place))
        else:
            to = flows.carry[node.value[0]] if node.op == "state" else flows.local[node.value]  # type: ignore
            results.append((formula, to))
    wanted: list[tuple[Vector, ...]] = []
    for node in in_order([e for e, _ in results]):
        if node.op == "gradient":
            (k,) = node.value  # type: ignore[misc]
            builder.values[node] = _gradient_reads(flows, builder, s, k, wanted)
        elif node.is_leaf and node.op != "constant":
            builder.values[node] = (_leaf(cell, own, builder, node),)
    pointwise = builder.pointwise([(e, (_target(flows, builder, to),)) for e, to in results])
    terms = tuple(tuple(t for v in vectors for t in flows.terms(builder, v)) for vectors in wanted)
    travels = any(a.products for a in stage.preactivations)
    return LoweredStage(stage.size, tuple(builder.views), terms, pointwise, travels)


def _target(flows: _Flows, builder: _StageBuilder, to: Rows | Operand) -> Write:
    if isinstance(to, Operand):
        return flows.write(builder, to)
    return Write(builder.slot(View(flows.delta, to.start)), to.step)


def _gradient_reads(
    flows: _Flows, builder: _StageBuilder, s: int, k: int, wanted: list[tuple[Vector, ...]]
) -> tuple[Read, ...]:
    """The gradient of an output: through matrices, from outside, from the step after, from later stages."""
    cell = flows.cell
    states = [j for j, o in enumerate(cell.new_states) if tuple(o) == (s, k)]
    vectors = [Vector("output", k, s), *(Vector("state", j) for j in states)]
    vectors = [v for v in vectors if v in flows.products]
    reads = []
    if vectors:
        reads.append(Read(len(wanted), is_sum=True))
        wanted.append(tuple(vectors))
    number = cell.outputs.index(Output(s, k))
    reads.append(builder.read(View(Operand("gradient", number, cell.stages[s].size))))
    for j in states:
        reads += flows.carried(builder, j)
    if (s, k) in flows.local:
        reads.append(builder.read(View(flows.local[s, k])))
    return tuple(reads)


def _first_gradient(flows: _Flows, state: int) -> LoweredStage:
    """The gradient of a state before the first step."""
    size, builder = flows.cell.states[state], _StageBuilder()
    reads, sums, result = [], (), Expression("constant", value=0.0)
    if Vector("state", state) in flows.products:
        reads.append(Read(0, is_sum=True))
    reads += flows.carried(builder, state)
    if reads:
        result = Expression("state", value=(state,))
        builder.values[result] = tuple(reads)
    target = Operand("first_gradient", state, size)
    pointwise = builder.pointwise([(result, (Write(builder.slot(View(target))),))])
    if Vector("state", state) in flows.products:
        sums = (tuple(flows.terms(builder, Vector("state", state))),)
    return LoweredStage(size, tuple(builder.views), sums, pointwise, travels=False)
