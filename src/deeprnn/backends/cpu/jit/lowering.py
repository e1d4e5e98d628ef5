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
from deeprnn.backends.gradients import merged_products
from deeprnn.cells.adjoint import Adjoint, adjoint_of
from deeprnn.cells.description import CellDescription, Output, Rows, Stage, Vector
from deeprnn.cells.expressions import Expression, in_order, replace_all


class Operand(NamedTuple):
    """A tensor of a pass, by what it is; `width`: numbers per row (marks: a byte)."""

    kind: str
    """"A", or "input" and "input_matrix" instead, and "bias"; "first" (state), "vector", "mask", "marks", "matrix",
    "output", "saved"; backward also "gradient" (of an output, from outside), "delta", "carry", "local",
    "first_gradient" """
    index: int = 0
    width: int = 0


class StepRows(NamedTuple):
    """Columns of an operand at step t + shift."""

    operand: Operand
    column: int = 0
    shift: int = 0
    boundary: Operand | None = None
    """what stands for steps before the first or after the last"""


class ProductTerm(NamedTuple):
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
    views: tuple[StepRows, ...]
    sums: tuple[tuple[ProductTerm, ...], ...]
    pointwise: Pointwise
    travels: bool
    """whether sums elsewhere read what it writes"""


class InputProjectionShape(NamedTuple):
    """An input that enters through matrices: A's columns are the x U_kᵀ side by side, plus biases.

    The x U_kᵀ are sums of their own, whether they are computed in the loop or before it: so neither changes a bit.
    """

    inputs: int
    """numbers of x in a step and row"""
    heights: tuple[int, ...]
    """rows of each U"""
    biases: tuple[tuple[int, int], ...]
    """(first column of A, how many) of each"""

    def matrix_row(self, entry: Rows, size: int) -> tuple[int, int] | None:
        """The number of the U that makes these columns of A, and its first row; None where no single one does."""
        start = 0
        for k, height in enumerate(self.heights):
            if start <= entry.start and entry.start + (size - 1) * entry.step < start + height:
                return k, entry.start - start
            start += height
        return None

    def fits(self, cell: CellDescription) -> bool:
        """Whether each pre-activation's columns come from one U, and from whole biases or none of them."""
        for stage in cell.stages:
            for entry in (a.entry for a in stage.preactivations):
                if entry is None:
                    continue
                last = entry.start + (stage.size - 1) * entry.step
                if self.matrix_row(entry, stage.size) is None:
                    return False
                for start, count in self.biases:
                    inside = start <= entry.start and last < start + count
                    if not inside and start <= last and entry.start < start + count:
                        return False
        return True


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

    views: list[StepRows] = field(default_factory=list)
    values: dict[Expression, tuple[Read, ...]] = field(default_factory=dict)

    def slot(self, view: StepRows) -> int:
        if view not in self.views:
            self.views.append(view)
        return self.views.index(view)

    def marks(self, shift: int) -> int:
        """The reset marks of step t + shift."""
        return self.slot(StepRows(MARKS, shift=shift, boundary=ZEROS))

    def read(self, view: StepRows, step: int = 1, marks: int | None = None) -> Read:
        return Read(self.slot(view), step=step, marks=marks)

    def pointwise(self, results: Sequence[tuple[Expression, tuple[Write, ...]]]) -> Pointwise:
        """With leaves replaced by numbers in the order of their first use."""
        leaves = [n for n in in_order([e for e, _ in results]) if n.is_leaf and n.op != "constant"]
        numbers = {node: value_leaf(i) for i, node in enumerate(leaves)}
        numbered = replace_all([e for e, _ in results], numbers)
        return Pointwise(
            tuple(self.values[node] for node in leaves),
            tuple((e, writes) for e, (_, writes) in zip(numbered, results, strict=True)),
        )


def input_pass(projection: InputProjectionShape) -> Pass:
    """A, less its biases, from the input: no step needs another."""
    x, A = Operand("input", 0, projection.inputs), Operand("A", 0, sum(projection.heights))
    stages, start = [], 0
    for k, height in enumerate(projection.heights):
        builder, result = _StageBuilder(), value_leaf(0)
        builder.values[result] = (Read(0, is_sum=True),)
        pointwise = builder.pointwise([(result, (Write(builder.slot(StepRows(A, start))),))])
        term = ProductTerm(
            builder.slot(StepRows(x)), None, projection.inputs, _input_matrix(projection, k), 0, 0, 1
        )
        stages.append(LoweredStage(height, tuple(builder.views), ((term,),), pointwise, travels=False))
        start += height
    matrices = [_input_matrix(projection, k) for k in range(len(projection.heights))]
    return Pass((x, MARKS, A, *matrices, ZEROS), tuple(stages), (), backward=False)


def forward_pass(
    cell: CellDescription, keep: bool, projection: InputProjectionShape | None = None, in_loop: bool = False
) -> Pass:
    """Every output and, with `keep`, what the backward pass needs.

    A is given or, for an input with a `projection`, given without biases, or computed `in_loop`.
    """
    adjoint = adjoint_of(cell)
    saved = adjoint.saved if keep else ()
    operands = [
        *_entering(cell, projection, in_loop),
        *_given(cell),
        *(_output(cell, o) for o in cell.outputs),
        *(_saved(cell, adjoint, place) for place in saved),
        *_matrices(cell),
    ]
    stages = tuple(
        _forward_stage(cell, adjoint, s, keep, projection, in_loop) for s in range(len(cell.stages))
    )
    return Pass((*operands, ZEROS), stages, (), backward=False)


def backward_pass(cell: CellDescription) -> Pass:
    """delta, and the gradients of the first states."""
    adjoint = adjoint_of(cell)
    routes = _GradientRoutes(cell, adjoint)
    stages = tuple(_backward_stage(routes, s) for s in range(len(cell.stages) - 1, -1, -1))
    final = tuple(_first_gradient(routes, j) for j in range(len(cell.states)))
    operands = [
        Operand("delta", 0, adjoint.width),
        *_given(cell),
        *(_output(cell, o) for o in cell.outputs),
        *(_saved(cell, adjoint, place) for place in adjoint.saved),
        *(Operand("gradient", k, cell.stages[o.stage].size) for k, o in enumerate(cell.outputs)),
        *(Operand("first_gradient", j, n) for j, n in enumerate(cell.states)),
        *routes.carry.values(),
        *routes.local.values(),
        *_matrices(cell),
    ]
    return Pass((*operands, ZEROS), stages, final, backward=True)


def _entering(cell: CellDescription, projection: InputProjectionShape | None, in_loop: bool) -> list[Operand]:
    """What enters from outside the recurrence."""
    A = Operand("A", 0, cell.entry_width)
    if projection is None:
        return [A]
    if not in_loop:
        return [A, *_biases(projection)]
    matrices = [_input_matrix(projection, k) for k in range(len(projection.heights))]
    return [Operand("input", 0, projection.inputs), *matrices, *_biases(projection)]


def _input_matrix(projection: InputProjectionShape, k: int) -> Operand:
    return Operand("input_matrix", k, projection.inputs)


def _biases(projection: InputProjectionShape) -> list[Operand]:
    return [Operand("bias", i, count) for i, (_, count) in enumerate(projection.biases)]


def _given(cell: CellDescription) -> list[Operand]:
    """What both directions are given."""
    kinds = (("first", cell.states), ("vector", cell.vectors), ("mask", cell.masks))
    return [*(Operand(kind, i, n) for kind, sizes in kinds for i, n in enumerate(sizes)), MARKS]


def _matrices(cell: CellDescription) -> list[Operand]:
    return [Operand("matrix", i, columns) for i, (_, columns) in enumerate(cell.matrices)]


def _output(cell: CellDescription, output: Sequence[int]) -> Operand:
    stage, index = output
    return Operand("output", cell.outputs.index(Output(stage, index)), cell.stages[stage].size)


def _saved(cell: CellDescription, adjoint: Adjoint, place: tuple[int, int]) -> Operand:
    return Operand("saved", adjoint.saved.index(place), cell.stages[place[0]].size)


def _previous(cell: CellDescription, state: int) -> StepRows:
    """A state as a step sees it."""
    output = _output(cell, cell.new_states[state])
    return StepRows(output, shift=-1, boundary=Operand("first", state, cell.states[state]))


def _leaf(cell: CellDescription, adjoint: Adjoint, builder: _StageBuilder, node: Expression) -> Read:
    """How pointwise code of either direction reads a leaf of the forward pass."""
    index: tuple[int, ...] = node.value  # type: ignore[assignment]
    if node.op == "state":
        return builder.read(_previous(cell, index[0]), marks=builder.marks(0))
    if node.op == "output":
        return builder.read(StepRows(_output(cell, index)))
    if node.op == "saved":
        return builder.read(StepRows(_saved(cell, adjoint, index)))  # type: ignore[arg-type]
    sizes = cell.vectors if node.op == "vector" else cell.masks
    return builder.read(StepRows(Operand(node.op, index[0], sizes[index[0]])))


# ---- forward


def _forward_stage(
    cell: CellDescription,
    adjoint: Adjoint,
    s: int,
    keep: bool,
    projection: InputProjectionShape | None,
    in_loop: bool,
) -> LoweredStage:
    stage, builder = cell.stages[s], _StageBuilder()
    results = [(e, StepRows(_output(cell, (s, k)))) for k, e in enumerate(stage.outputs)]
    if keep:
        results += [
            (e, StepRows(_saved(cell, adjoint, (s, k)))) for k, e in enumerate(adjoint.stages[s].saved)
        ]
    summed: list[tuple[int, bool]] = []  # sums by pre-activation, and whether it is that of the input
    for node in in_order([e for e, _ in results]):
        if node.op == "preactivation":
            (i,) = node.value  # type: ignore[misc]
            products, entry = stage.preactivations[i].products, stage.preactivations[i].entry
            reads: list[Read] = []
            # Biases first: their sum is rounded as that of the parameters is where a caller adds them.
            if entry is not None and projection is not None:
                reads += _bias_reads(builder, entry, projection)
            if entry is not None and in_loop:
                reads.append(Read(len(summed), is_sum=True))
                summed.append((i, True))
            elif entry is not None:
                reads.append(
                    builder.read(StepRows(Operand("A", 0, cell.entry_width), entry.start), entry.step)
                )
            if products:
                reads.append(Read(len(summed), is_sum=True))
                summed.append((i, False))
            builder.values[node] = tuple(reads)
        elif node.is_leaf and node.op != "constant":
            builder.values[node] = (_leaf(cell, adjoint, builder, node),)
    pointwise = builder.pointwise([(e, (Write(builder.slot(view)),)) for e, view in results])
    sums = tuple(
        (_input_term(builder, stage, i, projection),)
        if of_input and projection is not None
        else tuple(_forward_term(cell, builder, product) for product in stage.preactivations[i].products)
        for i, of_input in summed
    )
    travels = any(o.stage == s for o in cell.travelling)
    return LoweredStage(stage.size, tuple(builder.views), sums, pointwise, travels)


def _bias_reads(builder: _StageBuilder, entry: Rows, projection: InputProjectionShape) -> list[Read]:
    return [
        builder.read(StepRows(bias, entry.start - start), entry.step)
        for bias, (start, count) in zip(_biases(projection), projection.biases, strict=True)
        if start <= entry.start < start + count
    ]


def _input_term(
    builder: _StageBuilder, stage: Stage, i: int, projection: InputProjectionShape
) -> ProductTerm:
    entry = stage.preactivations[i].entry
    place = None if entry is None else projection.matrix_row(entry, stage.size)
    assert entry is not None
    assert place is not None  # as `InputProjectionShape.fits` says
    view = builder.slot(StepRows(Operand("input", 0, projection.inputs)))
    return ProductTerm(
        view, None, projection.inputs, _input_matrix(projection, place[0]), place[1], 0, entry.step
    )


def _forward_term(cell: CellDescription, builder: _StageBuilder, product) -> ProductTerm:
    vector = product.vector
    if vector.kind == "state":
        view, marks = builder.slot(_previous(cell, vector.index)), builder.marks(0)
    else:
        view, marks = builder.slot(StepRows(_output(cell, (vector.stage, vector.index)))), None
    matrix = Operand("matrix", product.matrix, cell.matrices[product.matrix][1])
    depth = cell.size_of(vector)
    return ProductTerm(view, marks, depth, matrix, product.rows.start, product.column, product.rows.step)


# ---- backward


class _GradientRoutes:
    """Where gradients flow besides through matrices, and which matrices each vector's gradient comes through."""

    def __init__(self, cell: CellDescription, adjoint: Adjoint):
        self.cell, self.adjoint = cell, adjoint
        self.delta = Operand("delta", 0, adjoint.width)
        nodes = [node for stage in adjoint.stages for node, _ in stage.leaves]
        states = sorted({node.value[0] for node in nodes if node.op == "state"})  # type: ignore[index]
        outputs = sorted({node.value for node in nodes if node.op == "output"})  # type: ignore[type-var]
        self.carry = {j: Operand("carry", j, cell.states[j]) for j in states}
        self.local = {
            o: Operand("local", i, cell.stages[o[0]].size)  # type: ignore[index]
            for i, o in enumerate(outputs)
        }
        self.products: dict[Vector, list] = {}
        for product in merged_products(adjoint):
            self.products.setdefault(product.vector, []).append(product)
        self.started: set[Operand] = set()

    def terms(self, builder: _StageBuilder, vector: Vector) -> list[ProductTerm]:
        """The gradient of a vector from those of the pre-activations that its products are part of."""
        shift = 1 if vector.kind == "state" else 0
        terms = []
        for product in self.products.get(vector, ()):
            column = product.start
            for segment in product.segments:
                view = builder.slot(StepRows(self.delta, column, shift))
                marks = builder.marks(1) if shift else None
                matrix = Operand("matrix", segment.matrix, self.cell.matrices[segment.matrix][1])
                terms.append(ProductTerm(view, marks, segment.rows, matrix, segment.row, segment.column, 1))
                column += segment.rows
        return terms

    def write(self, builder: _StageBuilder, operand: Operand) -> Write:
        """Store what flows to an operand; whoever comes later adds to it."""
        add = operand in self.started
        self.started.add(operand)
        return Write(builder.slot(StepRows(operand)), add=add)

    def carried(self, builder: _StageBuilder, state: int) -> list[Read]:
        """What pointwise code of the step after passes back to a state."""
        if state not in self.carry:
            return []
        return [builder.read(StepRows(self.carry[state], shift=1), marks=builder.marks(1))]


def _backward_stage(routes: _GradientRoutes, s: int) -> LoweredStage:
    cell, adjoint, builder = routes.cell, routes.adjoint, _StageBuilder()
    stage, formulas = cell.stages[s], adjoint.stages[s]
    columns = [adjoint.columns[s, i] for i in range(len(stage.preactivations))]
    results: list[tuple[Expression, Rows | Operand]] = list(
        zip(formulas.preactivations, columns, strict=True)
    )
    for node, formula in formulas.leaves:
        if node.op == "vector":
            place = adjoint.vector_columns[s, node.value[0]]  # type: ignore[index]
            if place not in columns:
                results.append((formula, place))
        else:
            to = routes.carry[node.value[0]] if node.op == "state" else routes.local[node.value]  # type: ignore
            results.append((formula, to))
    wanted: list[tuple[Vector, ...]] = []
    for node in in_order([e for e, _ in results]):
        if node.op == "gradient":
            (k,) = node.value  # type: ignore[misc]
            builder.values[node] = _gradient_reads(routes, builder, s, k, wanted)
        elif node.is_leaf and node.op != "constant":
            builder.values[node] = (_leaf(cell, adjoint, builder, node),)
    pointwise = builder.pointwise([(e, (_target(routes, builder, to),)) for e, to in results])
    terms = tuple(tuple(t for v in vectors for t in routes.terms(builder, v)) for vectors in wanted)
    travels = any(a.products for a in stage.preactivations)
    return LoweredStage(stage.size, tuple(builder.views), terms, pointwise, travels)


def _target(routes: _GradientRoutes, builder: _StageBuilder, to: Rows | Operand) -> Write:
    if isinstance(to, Operand):
        return routes.write(builder, to)
    return Write(builder.slot(StepRows(routes.delta, to.start)), to.step)


def _gradient_reads(
    routes: _GradientRoutes, builder: _StageBuilder, s: int, k: int, wanted: list[tuple[Vector, ...]]
) -> tuple[Read, ...]:
    """The gradient of an output: through matrices, from outside, from the step after, from later stages."""
    cell = routes.cell
    states = [j for j, o in enumerate(cell.new_states) if tuple(o) == (s, k)]
    vectors = [Vector("output", k, s), *(Vector("state", j) for j in states)]
    vectors = [v for v in vectors if v in routes.products]
    reads = []
    if vectors:
        reads.append(Read(len(wanted), is_sum=True))
        wanted.append(tuple(vectors))
    number = cell.outputs.index(Output(s, k))
    reads.append(builder.read(StepRows(Operand("gradient", number, cell.stages[s].size))))
    for j in states:
        reads += routes.carried(builder, j)
    if (s, k) in routes.local:
        reads.append(builder.read(StepRows(routes.local[s, k])))
    return tuple(reads)


def _first_gradient(routes: _GradientRoutes, state: int) -> LoweredStage:
    """The gradient of a state before the first step."""
    size, builder = routes.cell.states[state], _StageBuilder()
    reads, sums, result = [], (), Expression("constant", value=0.0)
    if Vector("state", state) in routes.products:
        reads.append(Read(0, is_sum=True))
    reads += routes.carried(builder, state)
    if reads:
        result = Expression("state", value=(state,))
        builder.values[result] = tuple(reads)
    target = Operand("first_gradient", state, size)
    pointwise = builder.pointwise([(result, (Write(builder.slot(StepRows(target))),))])
    if Vector("state", state) in routes.products:
        sums = (tuple(routes.terms(builder, Vector("state", state))),)
    return LoweredStage(size, tuple(builder.views), sums, pointwise, travels=False)
