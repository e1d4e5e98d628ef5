"""One step of a cell, forward or backward, as a torch.fx module: what autograd, vmap and compilers can follow."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import CellDescription, Rows
from deeprnn.cells.expressions import Expression, fold
from deeprnn.cells.functions import FUNCTIONS


def columns(x: Any, rows: Rows, size: int) -> Any:
    """Those columns of a tensor, one for each of `size` units."""
    return x[..., rows.start : rows.start + (size - 1) * rows.step + 1 : rows.step]


@lru_cache(maxsize=1024)
def product_blocks(cell: CellDescription) -> tuple[tuple[int, int, int, int, int, int], ...]:
    """For each product: its matrix, the first row, one past the last, their step, first column, one past the last."""
    found = []
    for s, _, product in cell.products:
        start, step = product.rows
        end = start + (cell.stages[s].size - 1) * step + 1
        columns = product.column, product.column + cell.size_of(product.vector)
        found.append((product.matrix, start, end, step, *columns))
    return tuple(found)


def block_of(
    matrices: Sequence[Tensor], matrix: int, start: int, end: int, step: int, left: int, right: int
) -> Tensor:
    """The part of its matrix that a product multiplies by, (units, length of the vector)."""
    return matrices[matrix][..., start:end:step, left:right]


class _Writer:
    """A graph that is being written: inputs by name, functions applied."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.tracer = GraphAppendingTracer(self.graph)

    def input(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def inputs(self, name: str, count: int) -> list[fx.Node]:
        return [self.input(f"{name}_{k}") for k in range(count)]

    def call(self, function: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(function, args)

    def evaluate(self, roots: Sequence[Expression], value: Any) -> list[Any]:
        """Expressions from the values of their leaves."""

        def leaf_value(node: Expression) -> Any:
            return node.value if node.op == "constant" else value(node)

        def applied(name: str, args: list[Any]) -> Any:  # by proxies: a function may be several operations
            if not any(isinstance(x, fx.Node) for x in args):
                return float(FUNCTIONS[name].torch(*(torch.tensor(x, dtype=torch.float64) for x in args)))
            given = [fx.Proxy(x, self.tracer) if isinstance(x, fx.Node) else x for x in args]
            result = FUNCTIONS[name].torch(*given)
            return result.node if isinstance(result, fx.Proxy) else result

        return fold(roots, leaf_value, applied)

    def module(self, results: Sequence[Any]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        return fx.GraphModule({}, self.graph)


def interleaved(*parts: Tensor) -> Tensor:
    """Columns of several tensors in turns; autograd's own vmap has a rule for `reshape` and none for `flatten`."""
    *lead, width = parts[0].shape
    return torch.stack(parts, -1).reshape(*lead, width * len(parts))


def filled(like: Tensor, size: int, value: float) -> Tensor:
    """A constant for each of `size` units, in as many rows as another tensor has."""
    return like.new_full((*like.shape[:-1], size), value)


@lru_cache(maxsize=512)
def forward_step(cell: CellDescription, keep: bool) -> fx.GraphModule:
    """(entered, states, blocks transposed, vectors, masks) -> every output, and with `keep` what backward needs.

    States are those of the step before; everything is (…, B, n) but for blocks, (…, length, units), and vectors,
    (…, 1, n).
    """
    w = _Writer()
    entered = w.input("entered")
    states, parts = w.inputs("state", len(cell.states)), w.inputs("block", len(cell.products))
    vectors, masks = w.inputs("vector", len(cell.vectors)), w.inputs("mask", len(cell.masks))
    outputs: dict[tuple[int, ...], fx.Node] = {}
    given = {"state": states, "vector": vectors, "mask": masks}
    by_product = dict(zip(cell.products, parts, strict=True))
    kept = []

    def known(node: Expression) -> fx.Node:
        return outputs[node.value] if node.op == "output" else given[node.op][node.value[0]]  # type: ignore[index]

    for s, stage in enumerate(cell.stages):
        pre = []
        for i, a in enumerate(stage.preactivations):
            rows = a.entry
            total = None
            if rows is not None:
                index = slice(rows.start, rows.start + (stage.size - 1) * rows.step + 1, rows.step)
                total = w.call(operator.getitem, entered, (Ellipsis, index))
            for product in a.products:
                term = w.call(torch.matmul, known(product.vector.leaf), by_product[s, i, product])
                total = term if total is None else w.call(operator.add, total, term)
            pre.append(total)

        def value(node: Expression, pre: list = pre) -> fx.Node:
            return pre[node.value[0]] if node.op == "preactivation" else known(node)  # type: ignore[index]

        saved = adjoint_of(cell).stages[s].saved if keep else ()
        computed = w.evaluate([*stage.outputs, *saved], value)
        for k in range(len(stage.outputs)):
            constant = not isinstance(computed[k], fx.Node)
            outputs[s, k] = w.call(filled, states[0], stage.size, computed[k]) if constant else computed[k]
        kept += computed[len(stage.outputs) :]
    return w.module([*(outputs[tuple(o)] for o in cell.outputs), *kept])


@lru_cache(maxsize=512)
def backward_step(cell: CellDescription, given: tuple[bool, ...]) -> fx.GraphModule:
    """(gradients, carried, states, outputs, saved, blocks, vectors, masks) -> (delta, gradients of the states).

    `given` says which outputs have gradients from outside; `carried` are those of the new states from the next step.
    """
    w, adjoint = _Writer(), adjoint_of(cell)
    gradients = w.inputs("gradient", sum(given))
    carried, states = w.inputs("carried", len(cell.states)), w.inputs("state", len(cell.states))
    stored, saved = w.inputs("output", len(cell.outputs)), w.inputs("saved", len(adjoint.saved))
    parts = w.inputs("block", len(cell.products))
    known = {"vector": w.inputs("vector", len(cell.vectors)), "mask": w.inputs("mask", len(cell.masks))}
    known["state"] = states
    outputs = dict(zip(map(tuple, cell.outputs), stored, strict=True))
    kept = dict(zip(adjoint.saved, saved, strict=True))
    by_product = dict(zip(cell.products, parts, strict=True))
    flow: dict[tuple[str, tuple[int, ...]], Any] = {}

    def flows(kind: str, index: tuple[int, ...], gradient: Any) -> None:
        before = flow.get((kind, index))
        flow[kind, index] = gradient if before is None else w.call(operator.add, before, gradient)

    outer = iter(gradients)
    for output, has in zip(cell.outputs, given, strict=True):
        if has:
            flows("output", tuple(output), next(outer))
    for output, gradient in zip(cell.new_states, carried, strict=True):
        flows("output", tuple(output), gradient)

    row: list[tuple[Rows, Any]] = []
    for s in range(len(cell.stages) - 1, -1, -1):
        stage, formulas = cell.stages[s], adjoint.stages[s]
        zero = w.call(torch.zeros_like, outputs[s, 0])

        def value(node: Expression, s: int = s, zero: Any = zero) -> Any:
            index: Any = node.value
            if node.op == "gradient":
                return flow.get(("output", (s, *index)), zero)
            if node.op == "saved":
                return kept[index]
            return outputs[index] if node.op == "output" else known[node.op][index[0]]

        roots = [*formulas.preactivations, *(formula for _, formula in formulas.leaves)]
        values = [w.call(operator.add, zero, x) for x in w.evaluate(roots, value)]  # constants become tensors
        for i, a in enumerate(stage.preactivations):
            row.append((adjoint.columns[s, i], values[i]))
            for product in a.products:
                back = w.call(torch.matmul, values[i], by_product[s, i, product])
                leaf = product.vector.leaf
                flows(leaf.op, leaf.value, back)  # type: ignore[arg-type]
        for (node, _), gradient in zip(formulas.leaves, values[len(stage.preactivations) :], strict=True):
            if node.op != "vector":
                flows(node.op, node.value, gradient)  # type: ignore[arg-type]
            elif (place := adjoint.vector_columns[s, node.value[0]]) not in adjoint.columns.values():  # type: ignore[index]
                row.append((place, gradient))
    delta = _assembled(w, row, adjoint.width)
    back = [flow.get(("state", (k,))) for k in range(len(cell.states))]
    return w.module(
        [delta, *(w.call(torch.zeros_like, states[k]) if x is None else x for k, x in enumerate(back))]
    )


def _assembled(w: _Writer, row: list[tuple[Rows, Any]], width: int) -> Any:
    """The columns of delta from parts that stand side by side or are interleaved."""
    row = sorted(row, key=lambda part: part[0].start)
    if all(rows.step == 1 for rows, _ in row):
        return w.call(torch.cat, [x for _, x in row], -1) if len(row) > 1 else row[0][1]
    joined = []
    while row:
        rows = row[0][0]
        group, row = row[: rows.step], row[rows.step :]  # the members of a pool lie next to each other
        if rows.step == 1:
            joined.append(group[0][1])
        else:
            joined.append(w.call(interleaved, *(x for _, x in group)))
    return w.call(torch.cat, joined, -1)
