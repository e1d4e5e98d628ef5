"""A cell as the kernels run it, in one direction: stages in order, the vectors between them, the matrices they meet.

Forward, a stage adds up its pre-activations, applies the stage's pointwise code and sends the output that a product
needs. Backward, the stages run in reverse: a stage adds up what comes back to its output, applies the derived code and
sends the gradients of its pre-activations. Either way a stage has `gates` sums a unit and sends `sent` numbers a unit;
what it sends is a *vector*, which every block of a kernel receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from deeprnn.cells.adjoint import chain_rule
from deeprnn.cells.description import CellDescription, Output, Rows, Vector
from deeprnn.cells.expressions import Expression, constant, leaf, leaves_of, replace


class MatrixSlice(NamedTuple):
    """Part of a matrix parameter: rows, and its first column."""

    matrix: int
    rows: Rows
    column: int


class Matrix(NamedTuple):
    """All weights between one vector and the sums of one stage."""

    stage: int
    source: int
    """stage whose vector it multiplies"""
    delayed: bool
    """whether that is the vector of the step before"""
    pieces: tuple[MatrixSlice | None, ...]
    """forward one for each sum of the stage, backward one for each number a unit of the vector; None: zeros"""


class KernelStage(NamedTuple):
    """One stage."""

    cell_stage: int
    """which of the cell's stages it computes"""
    size: int
    gates: int
    sent: int


class NotScheduled(Exception):
    """A cell that the persistent kernels cannot run; the message says why."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """One direction of a cell. `schedule` makes each once, so that they compare by identity."""

    cell: CellDescription
    backward: bool
    stages: tuple[KernelStage, ...]
    matrices: tuple[Matrix, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units of each stage."""
        return tuple(stage.size for stage in self.stages)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers in the vector of each stage."""
        return tuple(stage.size * stage.sent for stage in self.stages)

    @property
    def sum_counts(self) -> tuple[int, ...]:
        """Sums of each stage."""
        return tuple(stage.size * stage.gates for stage in self.stages)

    def is_critical(self, matrix: Matrix) -> bool:
        """Whether it multiplies the vector that its stage waits for: that of the stage before it."""
        return matrix.source == (matrix.stage - 1) % len(self.stages) and matrix.delayed == (
            matrix.stage == 0
        )

    @cached_property
    def critical(self) -> tuple[bool, ...]:
        """`is_critical` of each matrix."""
        return tuple(map(self.is_critical, self.matrices))


class Inlining(NamedTuple):
    """Which stages are inlined, for they have no pre-activation, and what of each state is exchanged instead.

    `sent_as[i]` is what of state i travels: a function of the state (and of masks and vectors) that products
    multiply in its place.
    """

    inlined: tuple[int, ...]
    """stages of the cell that are computed where their inputs are"""
    sent_as: tuple[Expression, ...]


@lru_cache(maxsize=512)
def inline_stages(cell: CellDescription) -> Inlining:
    """Take out stages without pre-activations: dropout masks on the state, for one."""
    inlined = tuple(s for s, stage in enumerate(cell.stages) if not stage.preactivations)
    formulas = {leaf("output", s, k): e for s in inlined for k, e in enumerate(cell.stages[s].outputs)}
    for formula in formulas.values():
        if len(leaves_of([formula], "state")) != 1 or leaves_of([formula], "output", "vector"):
            raise NotScheduled("a stage without pre-activation is no function of one state and of masks")
    sent: dict[int, Expression] = {}
    for _, _, product in cell.products:
        v = product.vector
        if v.kind == "state":
            formula, state = leaf("state", v.index), v.index
        elif v.stage in inlined:
            formula = formulas[v.leaf]
            (node,) = leaves_of([formula], "state")
            (state,) = node.value  # type: ignore[misc]
            if not _vanishes(formula, node):
                raise NotScheduled("what travels of a state that was reset is not zero")
        else:
            continue
        if sent.setdefault(state, formula) != formula:
            raise NotScheduled(f"products multiply two different functions of state {state}")
    return Inlining(inlined, tuple(sent.get(i, leaf("state", i)) for i in range(len(cell.states))))


def _vanishes(formula: Expression, state: Expression) -> bool:
    """Whether it is zero where the state is: a product with it."""
    if formula == state:
        return True
    return formula.op == "multiply" and any(_vanishes(a, state) for a in formula.args)


@lru_cache(maxsize=1024)
def schedule(cell: CellDescription, backward: bool, strict: bool = True) -> Schedule:
    """The stages of one direction, or `NotScheduled`. `strict`: every stage takes a product and gives one."""
    inlining = inline_stages(cell)
    kernel_stages = [s for s in range(len(cell.stages)) if s not in inlining.inlined]
    read = {node.value[0] for s in kernel_stages for node in leaves_of(cell.stages[s].outputs, "output")}  # type: ignore[index]
    if read & set(inlining.inlined):
        raise NotScheduled("pointwise code reads a stage that has no pre-activation")
    travelling = [_travelling(cell, s) for s in kernel_stages]
    order = list(reversed(kernel_stages)) if backward else kernel_stages
    stages = []
    for s in order:
        stage = cell.stages[s]
        summed = stage.summed
        sends = travelling[kernel_stages.index(s)] is not None
        gates, sent = (int(sends), len(summed)) if backward else (len(summed), int(sends))
        stages.append(KernelStage(s, stage.size, gates, sent))
    if strict and any(stage.sent == 0 or stage.gates == 0 for stage in stages):
        raise NotScheduled("a stage of the cell takes no product or gives none")
    _check_order(cell, kernel_stages)
    matrices = _matrices(cell, order, backward)
    return Schedule(cell, backward, tuple(stages), tuple(matrices))


def _check_order(cell: CellDescription, stages: list[int]) -> None:
    """A state's old value must not be read after its new one is there: a unit has one place for it."""
    for s in stages:
        for node in leaves_of(cell.stages[s].outputs, "state"):
            (i,) = node.value  # type: ignore[misc]
            if s > cell.new_states[i].stage:
                raise NotScheduled(
                    f"stage {s} reads state {i} after stage {cell.new_states[i].stage} replaced it"
                )


def _travelling(cell: CellDescription, s: int) -> int | None:
    """The output of a stage that some product multiplies."""
    outputs = {o.index for o in summed_outputs(cell) if o.stage == s}
    if len(outputs) > 1:
        raise NotScheduled(f"products multiply {len(outputs)} outputs of stage {s}: one can travel")
    return next(iter(outputs), None)


def summed_outputs(cell: CellDescription) -> set[Output]:
    """Outputs that products multiply, themselves or by way of a stage without pre-activations."""
    return {origin(cell, product.vector) for _, _, product in cell.products}


def origin(cell: CellDescription, v: Vector) -> Output:
    """The output, of this step or the one before, that a product's vector is made from."""
    state = state_behind(cell, v)
    return Output(v.stage, v.index) if state is None else cell.new_states[state]


def state_behind(cell: CellDescription, v: Vector) -> int | None:
    """The state that a product's vector is, or is a function of; None where it is an output of this step."""
    if v.kind == "state":
        return v.index
    if v.stage in inline_stages(cell).inlined:
        (node,) = leaves_of([cell.stages[v.stage].outputs[v.index]], "state")
        return node.value[0]  # type: ignore[index]
    return None


def is_delayed(cell: CellDescription, v: Vector) -> bool:
    """Whether a product's vector is of the step before."""
    return state_behind(cell, v) is not None


def _matrices(cell: CellDescription, order: list[int], backward: bool) -> list[Matrix]:
    """All weights, by the stage whose sums they belong to and the stage whose vector they multiply."""
    pieces_of: dict[tuple[int, int, bool], list[MatrixSlice | None]] = {}
    for s, i, product in cell.products:
        summed = cell.stages[s].summed
        here, there = order.index(s), order.index(origin(cell, product.vector).stage)
        delayed = is_delayed(cell, product.vector)
        key = (there, here, delayed) if backward else (here, there, delayed)
        pieces = pieces_of.setdefault(key, [None] * len(summed))
        if not backward and pieces[summed.index(i)] is not None:
            raise NotScheduled(f"a pre-activation of stage {s} multiplies one vector by two matrices")
        pieces[summed.index(i)] = MatrixSlice(product.matrix, product.rows, product.column)
    return [Matrix(*key, tuple(pieces)) for key, pieces in sorted(pieces_of.items())]


@lru_cache(maxsize=512)
def slope_of_sent(cell: CellDescription) -> tuple[Expression, ...]:
    """For each state the slope of what of it travels; leaves `state (i,)` stand for its new value."""
    slopes = []
    for i, formula in enumerate(inline_stages(cell).sent_as):
        gradients = chain_rule((formula,), [constant(1.0)])
        slopes.append(gradients.get(leaf("state", i), constant(1.0)))
    return tuple(slopes)


def with_outputs(formula: Expression, cell: CellDescription, state: int) -> Expression:
    """A function of a state's new value, by the output that it is."""
    return replace(formula, {leaf("state", state): leaf("output", *cell.new_states[state])})


@lru_cache(maxsize=1024)
def sent_states(cell: CellDescription, backward: bool, strict: bool = True) -> dict[int, int]:
    """For each kernel stage whose vector is made of a state: that state."""
    order = {stage.cell_stage: k for k, stage in enumerate(schedule(cell, backward, strict).stages)}
    states = [state_behind(cell, product.vector) for _, _, product in cell.products]
    return {order[cell.new_states[i].stage]: i for i in states if i is not None}
