"""The description of a cell, and what its matrices, vectors, entries and masks are computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx

from deeprnn.cells.description import CellDescription, Output, Preactivation, Product, Rows, Stage, Vector
from deeprnn.cells.expressions import Expression, in_order, leaf, replace_all
from deeprnn.cells.tracing.algebra import ordered, rewritten
from deeprnn.cells.tracing.blocks import Index, MatrixVector, State, VectorPart
from deeprnn.cells.tracing.products import chosen
from deeprnn.cells.tracing.staging import PreactivationSum, Signed, StageAssignment, StageKey

aten = torch.ops.aten


@dataclass
class Entry:
    """Columns of A: signed pieces of what comes from x and from parameters."""

    rows: tuple[Signed, ...]
    fixed: tuple[Signed, ...]
    size: int


@dataclass
class WrittenCell:
    """A description, and for each of its matrices, vectors, masks and entries where it comes from."""

    staging: StageAssignment
    cell: CellDescription = None  # type: ignore[assignment]
    matrices: list[fx.Node] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)  # numbers of pieces
    masks: list[int] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    outputs: list[list[Expression]] = field(default_factory=list)  # of each stage, before leaves are numbered

    def write(self) -> None:
        """Write the description down."""
        staging = self.staging
        self.outputs = [self._outputs(stage) for stage in staging.order]
        self.places = {e: Output(s, k) for s, roots in enumerate(self.outputs) for k, e in enumerate(roots)}
        drafts = [self._draft(s, stage) for s, stage in enumerate(staging.order)]
        self._number_matrices(drafts)
        self._order_entries(drafts)
        stages = [self._stage(draft) for draft in drafts]
        state_parts = staging.expressions.columns.state_parts
        self.cell = CellDescription(
            states=tuple(state_part.width for state_part in state_parts),
            stages=tuple(stages),
            new_states=tuple(self.places[e] for e in staging.states),
            matrices=tuple(m.meta["shape"] for m in self.matrices),
            entry_width=sum(e.size for e in self.entries),
            vectors=tuple(len(staging.expressions.pieces[n][1]) for n in self.vectors),
            masks=tuple(len(staging.expressions.pieces[n][1]) for n in self.masks),
        )

    def _outputs(self, stage: StageKey) -> list[Expression]:
        """New states first, then what travels, then what later stages read."""
        roots = self.staging.stages[stage]
        rank = {
            e: k for k, e in reversed(list(enumerate([*self.staging.states, *self.staging.vectors.values()])))
        }
        return sorted(roots, key=lambda e: rank.get(e, len(rank) + roots.index(e)))

    def _draft(self, s: int, stage: StageKey) -> Draft:
        earlier = {e: leaf("output", *place) for e, place in self.places.items() if place.stage < s}
        outputs = replace_all(self.outputs[s], earlier)
        sums = [n for n in in_order(outputs) if n.op == "sum"]
        draft = Draft(stage, outputs, {})
        for n in sums:
            added = self.staging.sums[n.value[0]]  # type: ignore[index]
            terms = [t for sign, piece in added.products for t in self._terms(sign, piece)]
            draft.sums[n] = added, sorted(self._merged(terms, stage.size), key=_latest_first)
        return draft

    def _terms(self, sign: int, piece: int) -> list[ProductDraft]:
        """The products of a piece of a product: one for each part of its vector."""
        staging = self.staging
        block, rows = staging.expressions.pieces[piece]
        assert isinstance(block, MatrixVector)
        found = []
        for i, part in enumerate(block.parts):
            size = part.block.width if isinstance(part.block, State) else len(part.index)
            if isinstance(part.block, State):
                vector = Vector("state", staging.expressions.columns.state_parts.index(part.block))
            elif (e := staging.vectors[block, i]).op == "state":
                vector = Vector("state", e.value[0])  # type: ignore[index]
            else:
                place = self.places[e]
                vector = Vector("output", place.index, place.stage)
            matrix, column = self._matrix(block, part, size)
            found.append(self._rows_of(sign, matrix, rows, vector, column))
        return found

    def _merged(self, terms: list[ProductDraft], units: int) -> list[ProductDraft]:
        """Products of one vector in one sum as one product, whose matrix is the sum of theirs."""
        by_vector: dict[Vector, list[ProductDraft]] = {}
        for term in terms:
            by_vector.setdefault(term.vector, []).append(term)
        return [t[0] if len(t) == 1 else self._added(t, units) for t in by_vector.values()]

    def _added(self, terms: list[ProductDraft], units: int) -> ProductDraft:
        columns, vector = self.staging.expressions.columns, terms[0].vector
        size = self._size(vector)
        total: fx.Node | None = None
        for term in terms:
            rows = np.arange(units) * term.rows.step + term.rows.start
            matrix = chosen(columns, term.matrix, rows, 0)
            matrix = chosen(columns, matrix, np.arange(term.column, term.column + size), 1)
            shape = (units, size)
            total = matrix if total is None else columns.new_node(aten.add.Tensor, (total, matrix), shape)
        assert total is not None
        return ProductDraft(total, vector, Rows(0), 0)

    def _size(self, vector: Vector) -> int:
        """How long a vector is."""
        if vector.kind == "state":
            return self.staging.expressions.columns.state_parts[vector.index].width
        return self.staging.order[vector.stage].size

    def _matrix(self, block: MatrixVector, part: VectorPart, size: int) -> tuple[fx.Node, int]:
        """The matrix whose columns from a first one on multiply the whole vector."""
        columns, matrix, width = self.staging.expressions.columns, block.matrix, block.matrix.meta["shape"][1]
        whole = not isinstance(part.block, State) or _is_range(part.index, size)
        if whole and _is_range(part.columns - part.columns[0], size):
            return matrix, int(part.columns[0])
        taken = chosen(columns, matrix, part.columns, 1)
        if whole:
            return taken, 0
        spread = torch.zeros(len(part.index), size, dtype=matrix.meta["dtype"])
        spread[torch.arange(len(part.index)), torch.from_numpy(part.index)] = 1.0
        shape = (matrix.meta["shape"][0], size)
        assert width >= len(part.columns)
        return columns.new_node(aten.mm.default, (taken, columns.constant(spread)), shape), 0

    def _rows_of(self, sign: int, matrix: fx.Node, rows: Index, vector: Vector, column: int) -> ProductDraft:
        columns = self.staging.expressions.columns
        if sign < 0:
            matrix = columns.new_node(aten.neg.default, (matrix,), matrix.meta["shape"])
        steps = np.unique(np.diff(rows))
        if len(rows) == 1:
            steps = np.array([1])
        if len(steps) == 1 and steps[0] > 0:
            return ProductDraft(matrix, vector, Rows(int(rows[0]), int(steps[0])), column)
        return ProductDraft(chosen(columns, matrix, rows, 0), vector, Rows(0), column)

    def _number_matrices(self, drafts: list[Draft]) -> None:
        """All that multiply the vector of the stage before first, as in a transition with shortcuts."""
        for draft in drafts:
            order = sorted(draft.sums, key=lambda n: [_row_key(t) for t in draft.sums[n][1]] or [(1 << 30,)])
            draft.sums = {n: draft.sums[n] for n in order}
        most = max((len(terms) for d in drafts for _, terms in d.sums.values()), default=0)
        for position in range(most):
            for draft in drafts:
                for _, terms in draft.sums.values():
                    if position < len(terms) and terms[position].matrix not in self.matrices:
                        self.matrices.append(terms[position].matrix)

    def _stage(self, draft: Draft) -> Stage:
        leaves: dict[Expression, Expression] = {}
        preactivations = []
        for i, (node, (_, terms)) in enumerate(draft.sums.items()):
            leaves[node] = leaf("preactivation", i)
            products = tuple(
                Product(self.matrices.index(t.matrix), t.vector, t.rows, t.column) for t in terms
            )
            preactivations.append(Preactivation(products, draft.entries.get(node)))
        for node in in_order(draft.outputs):
            if node.op in ("fixed", "drawn"):
                kind, known = ("vector", self.vectors) if node.op == "fixed" else ("mask", self.masks)
                number: int = node.value[0]  # type: ignore[index]
                if number not in known:
                    known.append(number)
                leaves[node] = leaf(kind, known.index(number))
        outputs = replace_all(draft.outputs, leaves)
        sorted_args = rewritten(outputs, ordered)
        return Stage(draft.stage.size, tuple(preactivations), tuple(sorted_args[e] for e in outputs))

    def _order_entries(self, drafts: list[Draft]) -> None:
        """Columns of A: rows of one matrix in their own order, so that it is used as it is."""
        found = [
            (draft, node, Entry(added.rows, added.fixed, draft.stage.size))
            for draft in drafts
            for node, (added, _) in draft.sums.items()
            if added.rows
        ]
        pieces = [self.staging.expressions.pieces[entry.rows[0][1]] for _, _, entry in found]
        first: dict[int, int] = {}
        for k, (block, _) in enumerate(pieces):
            first.setdefault(id(block), k)
        order = sorted(range(len(found)), key=lambda k: (first[id(pieces[k][0])], int(pieces[k][1][0])))
        start = 0
        for draft, node, entry in (found[k] for k in order):
            draft.entries[node] = Rows(start)
            self.entries.append(entry)
            start += entry.size


@dataclass
class ProductDraft:
    """A product whose matrix has no number yet."""

    matrix: fx.Node
    vector: Vector
    rows: Rows
    column: int


@dataclass
class Draft:
    """A stage whose leaves have no numbers yet."""

    stage: StageKey
    outputs: list[Expression]
    sums: dict[Expression, tuple[PreactivationSum, list[ProductDraft]]]
    entries: dict[Expression, Rows] = field(default_factory=dict)


def _is_range(index: Index, size: int) -> bool:
    return len(index) == size and bool((index == np.arange(size)).all())


def _latest_first(term: ProductDraft) -> tuple[int, int]:
    """Outputs of the latest stage first, states last."""
    return (-term.vector.stage, term.vector.index) if term.vector.kind == "output" else (1, term.vector.index)


def _row_key(term: ProductDraft) -> tuple[int, ...]:
    return (0, term.rows.start)
