"""Gradients of a cell's weights: single matrix products over all steps, after the backward pass through time.

With delta(t), the gradients of the pre-activations, a matrix that multiplies the vector v has the gradient

    dW = Σ_t delta(t)ᵀ v(t).

Matrices that multiply the same vector and lie side by side in delta share one product. Everything here is
differentiable, so that a second backward pass may go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Inputs
from deeprnn.cells.adjoint import Adjoint
from deeprnn.cells.description import CellDescription, Vector
from deeprnn.cells.step_graph import columns


class Segment(NamedTuple):
    """Rows of a matrix, and its columns that multiply one vector."""

    matrix: int
    row: int
    rows: int
    column: int


class MergedProduct(NamedTuple):
    """Columns of delta, side by side, whose matrices multiply the same vector."""

    vector: Vector
    start: int
    width: int
    segments: tuple[Segment, ...]


@lru_cache(maxsize=1024)
def merged_products(adjoint: Adjoint) -> tuple[MergedProduct, ...]:
    """All products that the gradients of a cell's matrices are made of."""
    cell = adjoint.cell
    rows: dict[Vector, list[tuple[int, int, int, int]]] = {}  # (column of delta, matrix, its row, its column)
    for s, i, product in cell.products:
        place = adjoint.columns[s, i]
        rows.setdefault(product.vector, []).extend(
            (
                place.start + unit * place.step,
                product.matrix,
                product.rows.start + unit * product.rows.step,
                product.column,
            )
            for unit in range(cell.stages[s].size)
        )
    products = []
    for vector, entries in rows.items():
        run: list[tuple[int, int, int, int]] = []
        for entry in sorted(entries):
            if run and entry[0] != run[-1][0] + 1:
                products.append(_merged(vector, run))
                run = []
            run.append(entry)
        products.append(_merged(vector, run))
    return tuple(products)


def _merged(vector: Vector, run: list[tuple[int, int, int, int]]) -> MergedProduct:
    segments: list[Segment] = []
    for _, matrix, row, column in run:
        last = segments[-1] if segments else None
        if last and (matrix, row, column) == (last.matrix, last.row + last.rows, last.column):
            segments[-1] = last._replace(rows=last.rows + 1)
        else:
            segments.append(Segment(matrix, row, 1, column))
    return MergedProduct(vector, run[0][0], len(run), tuple(segments))


@lru_cache(maxsize=1024)
def tiles_matrices_exactly(adjoint: Adjoint) -> bool:
    """Whether every number of every matrix has its gradient in one product: then each may be written to its place."""
    seen: set[tuple[int, int, int]] = set()
    areas = [0] * len(adjoint.cell.matrices)
    for product in merged_products(adjoint):
        for segment in product.segments:
            areas[segment.matrix] += segment.rows * adjoint.cell.size_of(product.vector)
            rows = {(segment.matrix, segment.row + i, segment.column) for i in range(segment.rows)}
            if rows & seen:
                return False
            seen |= rows
    return areas == [rows * columns for rows, columns in adjoint.cell.matrices]


def matrix_gradients(
    adjoint: Adjoint, delta: Tensor, stored: Sequence[Tensor], inputs: Inputs
) -> list[Tensor]:
    """The gradient of every matrix; a leading population dimension is carried along."""
    if inputs.members is not None and delta.device.type == "cpu":
        # One product per member: the same call, hence the same bits, as for that member alone.
        each = [
            matrix_gradients(
                adjoint, aligned(delta[p]), [aligned(x[p]) for x in stored], aligned_member(inputs, p)
            )
            for p in range(inputs.members)
        ]
        return [torch.stack(members) for members in zip(*each, strict=True)]
    sums = [
        _weight_gradient(
            adjoint, delta.narrow(-1, product.start, product.width), product.vector, stored, inputs
        )
        for product in merged_products(adjoint)
    ]
    return scatter_to_matrices(adjoint, sums)


def scatter_to_matrices(adjoint: Adjoint, sums: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of whole matrices from the results of `merged_products`."""
    parts: list[list[tuple[Segment, Tensor]]] = [[] for _ in adjoint.cell.matrices]
    for product, whole in zip(merged_products(adjoint), sums, strict=True):
        alone = len(product.segments) == 1
        pieces = [whole] if alone else whole.split([segment.rows for segment in product.segments], -2)
        for segment, piece in zip(product.segments, pieces, strict=True):
            parts[segment.matrix].append((segment, piece))
    return [_joined(shape, of_matrix) for shape, of_matrix in zip(adjoint.cell.matrices, parts, strict=True)]


def _joined(shape: tuple[int, int], parts: list[tuple[Segment, Tensor]]) -> Tensor:
    """One matrix from its parts; rows and columns that multiply nothing have no gradient."""
    if len(parts) == 1 and parts[0][1].shape[-2:] == shape:
        return parts[0][1]
    first = parts[0][1]
    out = first.new_zeros(*first.shape[:-2], *shape)
    for segment, piece in parts:
        rows = slice(segment.row, segment.row + segment.rows)
        out[..., rows, segment.column : segment.column + piece.shape[-1]] += piece
    return out


def gradients_of_outputs(
    cell: CellDescription, steps: int, gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Those of all outputs of a cell, from those of the first state's sequence and of the last states (1, B, n)."""
    of_outputs: list[Tensor | None] = [None] * len(cell.outputs)
    places = [cell.outputs.index(o) for o in cell.new_states]
    of_outputs[places[0]], *of_last = gradients
    for place, g in zip(places, of_last, strict=True):
        if g is not None:
            known = of_outputs[place]
            whole = g.new_zeros((steps, *g.shape[1:])) if known is None else known.clone()
            whole[-1:] += g
            of_outputs[place] = whole
    return of_outputs


def vector_gradients(adjoint: Adjoint, delta: Tensor) -> list[Tensor]:
    """The gradient of every parameter with one number a unit."""
    return _vector_sums(adjoint, delta, lambda part: part.sum((-3, -2)), delta.shape[:-3])


def vector_gradients_of_sums(adjoint: Adjoint, sums: Tensor) -> list[Tensor]:
    """The same from the sums of delta over all rows, ([P,] width)."""
    return _vector_sums(adjoint, sums, lambda part: part, sums.shape[:-1])


def _vector_sums(
    adjoint: Adjoint, x: Tensor, over_rows: Callable[[Tensor], Tensor], lead: Sequence[int]
) -> list[Tensor]:
    """For each vector of the cell the sum of all its columns of x; zeros (*lead, n) where it has none."""
    totals: list[Tensor | None] = [None] * len(adjoint.cell.vectors)
    for (s, number), rows in adjoint.vector_columns.items():
        part, known = over_rows(columns(x, rows, adjoint.cell.stages[s].size)), totals[number]
        totals[number] = part if known is None else known + part
    sizes = adjoint.cell.vectors
    return [x.new_zeros(*lead, n) if total is None else total for total, n in zip(totals, sizes, strict=True)]


def aligned(x: Tensor) -> Tensor:
    """A member's slice of a population, copied unless it begins as freely as a tensor of its own.

    The same matrix product may round otherwise when its operands start in the middle of a cache line.
    """
    return x if x.numel() * x.element_size() % 64 == 0 else x.clone()


def aligned_member(inputs: Inputs, p: int) -> Inputs:
    """One member of a population, every tensor `aligned`."""
    member = inputs.member(p)
    return Inputs(
        None if member.A is None else aligned(member.A),
        *(
            [aligned(x) for x in group]
            for group in (member.states, member.matrices, member.vectors, member.masks)
        ),
        reset=member.reset,
    )


def _weight_gradient(
    adjoint: Adjoint, d: Tensor, vector: Vector, stored: Sequence[Tensor], inputs: Inputs
) -> Tensor:
    """Σ_t d(t)ᵀ v(t)."""
    cell = adjoint.cell
    if vector.kind == "output":
        return _product(d, stored[cell.outputs.index((vector.stage, vector.index))])
    output, first = stored[cell.outputs.index(cell.new_states[vector.index])], inputs.states[vector.index]
    steps = output.shape[-3]
    # A copy of the states is smaller than a product of its own for the first of them, unless there are many rows.
    # For a compiler the copy too: it would compile again for lengths and batches on the other side of the border.
    copied = inputs.reset is not None or torch.compiler.is_compiling()
    if copied or steps < 2 or steps * output.shape[-2] <= 2 * adjoint.width:
        return _product(d, plain.previous(cell, stored, inputs, vector.index))
    started = _product(d.narrow(-3, 0, 1), first.unsqueeze(-3))
    return started + _product(d.narrow(-3, 1, steps - 1), output.narrow(-3, 0, steps - 1))


def _product(d: Tensor, x: Tensor) -> Tensor:
    """dᵀ x over time and batch: ([P,] T, B, M), ([P,] T, B, K) -> ([P,] M, K)."""
    return _rows(d).mT @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    """Time and batch as one dimension; autograd's own vmap has a rule for `reshape` and none for `flatten`."""
    *lead, steps, batch, width = x.shape
    return x.reshape(*lead, steps * batch, width)
