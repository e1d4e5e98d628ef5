"""The backward pass of a cell, derived: nobody writes one by hand.

For each stage, the gradients of its pre-activations and of whatever else its pointwise code reads follow from those of
its outputs by the chain rule over the expressions. What these formulas need of the forward pass is read where it is
stored anyway (states and outputs), computed again where that is cheap, and else *saved* by the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import cached_property, lru_cache

from deeprnn.cells.description import CellDescription, Rows, Stage
from deeprnn.cells.expressions import Expression, constant, in_order, leaf, replace_all
from deeprnn.cells.functions import FUNCTIONS

AVAILABLE = ("state", "output", "vector", "mask", "constant")
"""leaves that a backward pass can read"""


@dataclass(frozen=True)
class StageAdjoint:
    """Backward code of one stage.

    Leaves `gradient (k,)` are the gradients of the stage's outputs, `saved (k,)` what `saved` names; the others are
    those of the forward pass, at the same step.
    """

    saved: tuple[Expression, ...]
    """forward expressions whose values the forward pass has to save"""
    preactivations: tuple[Expression, ...]
    """gradients of the pre-activations"""
    leaves: tuple[tuple[Expression, Expression], ...]
    """(leaf, its gradient) for every state, earlier output and vector that the stage reads"""


@dataclass(frozen=True, eq=False)
class Adjoint:
    """Backward code of a cell, stage by stage in the order of the forward pass, and where its results are stored.

    `adjoint_of` makes each once, so that they compare by identity.

    A backward pass fills one tensor `delta` (T, B, width): first, as wide as A and laid out as A is, the gradients of
    the pre-activations that have an entry, then those of the others, then what the vectors' gradients are sums of.
    """

    cell: CellDescription
    stages: tuple[StageAdjoint, ...]

    @cached_property
    def saved(self) -> tuple[tuple[int, int], ...]:
        """What the forward pass saves, as (stage, number)."""
        return tuple((s, k) for s, stage in enumerate(self.stages) for k in range(len(stage.saved)))

    @cached_property
    def columns(self) -> dict[tuple[int, int], Rows]:
        """The columns of delta that hold the gradient of pre-activation (stage, number)."""
        return self._places[0]

    @cached_property
    def vector_columns(self) -> dict[tuple[int, int], Rows]:
        """The columns of delta whose sum over steps and batch is the gradient of (stage, vector)."""
        return self._places[1]

    @cached_property
    def width(self) -> int:
        """Columns of delta."""
        return self._places[2]

    @cached_property
    def _places(self) -> tuple[dict[tuple[int, int], Rows], dict[tuple[int, int], Rows], int]:
        end = self.cell.entry_width
        columns: dict[tuple[int, int], Rows] = {}
        vectors: dict[tuple[int, int], Rows] = {}
        for s, stage in enumerate(self.cell.stages):
            for i, a in enumerate(stage.preactivations):
                columns[s, i] = Rows(end) if a.entry is None else a.entry
                end += stage.size if a.entry is None else 0
        for s, stage in enumerate(self.stages):
            for node, formula in stage.leaves:
                if node.op != "vector":
                    continue
                (number,) = node.value  # type: ignore[misc]
                if formula in stage.preactivations:  # as for a bias: the same number
                    vectors[s, number] = columns[s, stage.preactivations.index(formula)]
                else:
                    vectors[s, number] = Rows(end)
                    end += self.cell.stages[s].size
        return columns, vectors, end


@lru_cache(maxsize=1024)
def with_saved_as_outputs(cell: CellDescription) -> CellDescription:
    """The same cell, in which what a forward pass saves are outputs: then they may have gradients themselves."""
    stages = tuple(
        Stage(stage.size, stage.preactivations, (*stage.outputs, *derived.saved))
        for stage, derived in zip(cell.stages, adjoint_of(cell).stages, strict=True)
    )
    return replace_fields(cell, stages=stages)


@lru_cache(maxsize=1024)
def adjoint_of(cell: CellDescription) -> Adjoint:
    """The backward pass of a cell."""
    return Adjoint(cell, tuple(_stage(cell, s) for s in range(len(cell.stages))))


def _stage(cell: CellDescription, s: int) -> StageAdjoint:
    stage = cell.stages[s]
    gradients = chain_rule(stage.outputs, [leaf("gradient", k) for k in range(len(stage.outputs))])
    count = len(stage.preactivations)
    wanted = [leaf("preactivation", i) for i in range(count)]
    wanted += [node for node in gradients if node.op in ("state", "output", "vector")]
    raw = [gradients.get(node, constant(0.0)) for node in wanted]
    saved, formulas = _read_or_recompute(s, stage.outputs, raw)
    return StageAdjoint(
        saved, tuple(formulas[:count]), tuple(zip(wanted[count:], formulas[count:], strict=True))
    )


def chain_rule(outputs: tuple[Expression, ...], seeds: list[Expression]) -> dict[Expression, Expression]:
    """The gradient of every part of the outputs, from those of the outputs: reverse mode on expressions."""
    found: dict[Expression, Expression] = {}
    for output, seed in zip(outputs, seeds, strict=True):
        found[output] = found[output] + seed if output in found else seed
    for node in reversed(in_order(outputs)):
        if node.is_leaf or node not in found:
            continue
        partials = FUNCTIONS[node.op].partials(node.args, node)
        for arg, slope in zip(node.args, partials, strict=True):
            part = found[node] * slope
            if arg.op != "constant" and not (part.op == "constant" and part.value == 0.0):
                found[arg] = found[arg] + part if arg in found else part
    return found


def _read_or_recompute(
    s: int, outputs: tuple[Expression, ...], formulas: list[Expression]
) -> tuple[tuple[Expression, ...], list[Expression]]:
    """Decide what of the forward pass is saved; the formulas with those parts replaced by leaves.

    An output is read where it is stored. Of the rest either costly functions are saved, or, where those would be more
    numbers, the pre-activations, from which everything is computed again. So it is where the slopes of those functions
    need something else, as that of e^(−a²) needs a: a second derivative goes through what was saved.
    """
    stored = {e: leaf("output", s, k) for k, e in reversed(list(enumerate(outputs))) if e.op not in AVAILABLE}
    costly, inputs = (_saved(stored, formulas, functions) for functions in (True, False))
    chosen = costly
    if costly != inputs and (len(inputs) < len(costly) or not _slopes_are_known(s, outputs, costly)):
        chosen = inputs
    places = stored | {e: leaf("saved", s, k) for k, e in enumerate(chosen)}
    return tuple(chosen), replace_all(formulas, places)


def _slopes_are_known(s: int, outputs: tuple[Expression, ...], saved: list[Expression]) -> bool:
    """Whether what is saved can be differentiated by what is stored then."""
    both = (*outputs, *saved)
    gradients = chain_rule(both, [leaf("gradient", k) for k in range(len(both))])
    formulas = [
        g for node, g in gradients.items() if node.op in ("preactivation", "state", "output", "vector")
    ]
    stored = {e: leaf("output", s, k) for k, e in enumerate(both) if e.op not in AVAILABLE}
    return any(not _saved(stored, formulas, functions) for functions in (True, False))


def _saved(
    stored: dict[Expression, Expression], formulas: list[Expression], functions: bool
) -> list[Expression]:
    """What has to be saved so that the formulas can be computed; `functions`: the values of costly ones too."""
    pure: dict[Expression, bool] = {}  # whether it belongs to the forward pass
    readable: dict[Expression, bool] = {}  # whether it can be had without saving anything
    for node in in_order(formulas):
        pure[node] = node.op != "gradient" and all(pure[a] for a in node.args)
        inner = bool(node.args) and all(readable[a] for a in node.args)
        readable[node] = node in stored or node.op in AVAILABLE or inner
    saved: dict[Expression, None] = {}
    visited, stack = set(), list(reversed(formulas))
    while stack:
        node = stack.pop()
        if node in visited or node in stored or (readable[node] and pure[node]):
            continue
        visited.add(node)
        costly = functions and not node.is_leaf and not FUNCTIONS[node.op].cheap
        if pure[node] and (node.op == "preactivation" or costly):
            saved[node] = None
        else:
            stack += reversed(node.args)
    return list(saved)
