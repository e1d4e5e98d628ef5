"""Matrix products of a recorded step, in torch's many spellings, as rows of a matrix times vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from deeprnn.cells.expressions import apply
from deeprnn.cells.tracing.blocks import BATCH, ROWS, Constant, Index, MatrixVector, Precomputed, VectorPart
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.operations import batch_dimension, name_of
from deeprnn.cells.tracing.recording import Undescribable, where

aten = torch.ops.aten


def read(columns: Columns, node: fx.Node) -> Tensor:
    """The names of the numbers of a product's result."""
    name = name_of(node)
    if name not in _READERS:
        raise Undescribable(f"{name}{where(node)}")
    return _READERS[name](columns, node)


def _mm(columns: Columns, node: fx.Node) -> Tensor:
    a, b = node.args[-2:]
    return _two(columns, node, a, b)  # type: ignore[arg-type]


def _two(columns: Columns, node: fx.Node, a: fx.Node, b: fx.Node) -> Tensor:
    """(B, k) times (k, m), or (m, k) times (k, B)."""
    _one_in_loop(columns, node, a, b)
    if columns.kinds[a] == "fixed":  # aᵀ comes second: (b'ᵀ a'ᵀ)ᵀ
        return times_matrix(columns, node, columns.names(b).t(), columns.transposed(a)).t()
    return times_matrix(columns, node, columns.names(a), b)


def _addmm(columns: Columns, node: fx.Node) -> Tensor:
    bias, a, b = node.args[:3]
    product = _two(columns, node, a, b)  # type: ignore[arg-type]
    return _plus(columns, node, product, columns.names(bias))  # type: ignore[arg-type]


def _plus(columns: Columns, node: fx.Node, product: Tensor, other: Tensor) -> Tensor:
    """beta · other + alpha · product."""
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    return columns.compute(lambda p, o: p * alpha + o * beta, [product, other], node)  # type: ignore[operator]


def _linear(columns: Columns, node: fx.Node) -> Tensor:
    x, weight, *bias = node.args
    _one_in_loop(columns, node, x, weight)  # type: ignore[arg-type]
    names = columns.names(x)  # type: ignore[arg-type]
    flat = names.reshape(BATCH, -1, names.shape[-1])
    turned = columns.transposed(weight)  # type: ignore[arg-type]
    parts = [times_matrix(columns, node, flat[:, i], turned) for i in range(flat.shape[1])]
    product = torch.stack(parts, 1).view(node.meta["shape"])
    if not bias or bias[0] is None:
        return product
    return columns.compute(lambda p, b: p + b, [product, columns.names(bias[0])], node)  # type: ignore[arg-type]


def _mv(columns: Columns, node: fx.Node) -> Tensor:
    """A matrix with rows of the batch times a vector of parameters."""
    a, b = node.args[-2:]
    _one_in_loop(columns, node, a, b)  # type: ignore[arg-type]
    if columns.kinds[b] == "loop":  # type: ignore[index]
        raise Undescribable(f"{name_of(node)} multiplies a vector that has no batch dimension{where(node)}")
    column = columns.new_node(aten.unsqueeze.default, (b, 1), (*b.meta["shape"], 1))  # type: ignore[union-attr]
    product = times_matrix(columns, node, columns.names(a), column)[:, 0]  # type: ignore[arg-type]
    if name_of(node) == "mv":
        return product
    return _plus(columns, node, product, columns.names(node.args[0]))  # type: ignore[arg-type]


def _bmm(columns: Columns, node: fx.Node) -> Tensor:
    """Several products at once: one for each head, or the same matrix for each row of the batch."""
    a, b = node.args[-2:]
    _one_in_loop(columns, node, a, b)  # type: ignore[arg-type]
    swap = columns.kinds[a] == "fixed"  # type: ignore[index]
    vectors, matrix = (b, a) if swap else (a, b)
    names = columns.names(vectors)  # type: ignore[arg-type]
    names = names.transpose(1, 2) if swap else names  # (g, n, k)
    batch = batch_dimension(names, ROWS)
    if batch == 0 and matrix.meta["batch"] == (0,):  # type: ignore[union-attr]
        q = columns.one_of_batch(matrix, node)  # type: ignore[arg-type]
        q = columns.transposed(q) if swap else q
        out = torch.stack([times_matrix(columns, node, names[:, i], q) for i in range(names.shape[1])], 1)
    elif batch == 1 and not matrix.meta["batch"]:  # type: ignore[union-attr]
        shape = matrix.meta["shape"][1:]  # type: ignore[union-attr]
        parts = []
        for g in range(names.shape[0]):
            q = columns.new_node(aten.select.int, (matrix, 0, g), shape)
            parts.append(times_matrix(columns, node, names[g], columns.transposed(q) if swap else q))
        out = torch.stack(parts)
    else:
        raise Undescribable(f"bmm over the rows of a batch{where(node)}")
    out = out.transpose(1, 2) if swap else out
    return out if name_of(node) == "bmm" else _plus(columns, node, out, columns.names(node.args[0]))  # type: ignore[arg-type]


def _glu(columns: Columns, node: fx.Node) -> Tensor:
    dim = node.args[1] if len(node.args) > 1 else -1
    a, b = columns.names(node.args[0]).chunk(2, dim)  # type: ignore[arg-type]
    return columns.compute(lambda x, y: x * apply("sigmoid", y), [a, b], node)


_READERS = {
    "mm": _mm,
    "addmm": _addmm,
    "linear": _linear,
    "mv": _mv,
    "addmv": _mv,
    "bmm": _bmm,
    "baddbmm": _bmm,
    "glu": _glu,
}


def _one_in_loop(columns: Columns, node: fx.Node, a: fx.Node, b: fx.Node) -> None:
    """A product in the loop has one operand that depends on the state, the other on parameters alone."""
    kinds = {columns.kinds[a], columns.kinds[b]}
    if kinds == {"loop"}:
        raise Undescribable(f"{name_of(node)} multiplies two things that depend on the state{where(node)}")
    if "row" in kinds and "loop" in kinds:
        raise Undescribable(
            f"{name_of(node)} multiplies the state by a matrix that depends on the input{where(node)}"
        )


def times_matrix(columns: Columns, node: fx.Node, names: Tensor, q: fx.Node) -> Tensor:
    """Vectors (B, k), of whatever they are made, times q (k, m): the names of the product's numbers, (B, m)."""
    numbers = (names // ROWS).numpy()
    if batch_dimension(names, ROWS) != 0 or (numbers != numbers[:1]).any():
        raise Undescribable(f"{name_of(node)} mixes the rows of a batch{where(node)}")
    width = q.meta["shape"][1]
    in_loop: list[VectorPart] = []
    total: Tensor | None = None

    def plus(block_names: Tensor) -> None:
        nonlocal total
        block_names = block_names.expand(BATCH, width)
        if total is None:
            total = block_names
        else:
            total = columns.compute(lambda a, b: a + b, [total, block_names], node, (BATCH, width))

    outside: list[tuple[Any, Index, Index]] = []
    for (block,), positions in columns.grouped([numbers[0]]):
        index = numbers[0][positions] - block.start
        if isinstance(block, (Precomputed, Constant)):
            outside.append((block, index, positions))
        else:
            in_loop.append(VectorPart(block, index, positions))
    if in_loop:
        block = columns.add(MatrixVector, width, in_loop, columns.transposed(q), node)
        plus(columns.name_rows(block, (BATCH, width), 0))
    for block, index, positions in outside:
        if isinstance(block, Constant) and block.value == 0.0:
            continue
        plus(_outside(columns, block, index, chosen(columns, q, positions, 0)))
    assert total is not None
    return total


def _outside(columns: Columns, block: Precomputed | Constant, index: Index, q: fx.Node) -> Tensor:
    """The part of a product that is known before the loop."""
    k, m = q.meta["shape"]
    if isinstance(block, Constant):
        summed = columns.new_node(aten.sum.dim_IntList, (q, [0]), (m,))
        return columns.names(columns.new_node(aten.mul.Tensor, (summed, block.value), (m,)))
    if block.kind == "fixed":
        flat = columns.new_node(aten.reshape.default, (block.node, [-1]), (block.width,))
        row = columns.new_node(aten.unsqueeze.default, (chosen(columns, flat, index, 0), 0), (1, k))
        product = columns.new_node(aten.mm.default, (row, q), (1, m))
        return columns.names(columns.new_node(aten.reshape.default, (product, [m]), (m,)))
    x = chosen(columns, columns.as_rows(block), index, 1)
    return columns.names(columns.new_node(aten.mm.default, (x, q), (BATCH, m), (0,)))


def chosen(columns: Columns, node: fx.Node, index: Index, dim: int) -> fx.Node:
    """Those places along a dimension: nothing to do, a slice, or a gather."""
    shape = list(node.meta["shape"])
    if len(index) == shape[dim] and (index == np.arange(len(index))).all():
        return node
    shape[dim] = len(index)
    batch = node.meta["batch"]
    if len(index) and (np.diff(index) == 1).all():
        start = int(index[0])
        return columns.new_node(aten.slice.Tensor, (node, dim, start, start + len(index)), shape, batch)
    places = columns.constant(torch.from_numpy(np.ascontiguousarray(index)))
    return columns.new_node(aten.index_select.default, (node, dim, places), shape, batch)
