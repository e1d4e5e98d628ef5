"""Reductions over units of a recorded step: sums are products with ones; means, norms and variances are made of sums.

A sum of units that are themselves sums of products needs no product of its own: rows of the matrices are added before
the loop. So what layer normalisation subtracts from `W(h) + U(x)` costs nothing in the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from deeprnn.cells.expressions import Expression, apply, leaf
from deeprnn.cells.tracing.algebra import SUMS, flattened
from deeprnn.cells.tracing.blocks import BATCH, ROWS, Block, Elementwise, Index, MatrixVector, Precomputed
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.operations import batch_dimension, name_of
from deeprnn.cells.tracing.products import chosen, times_matrix
from deeprnn.cells.tracing.recording import Undescribable, where

aten = torch.ops.aten
FEW = 16
"""numbers that are added or compared one by one, in pointwise code, and not by a product"""
MOST_TERMS = 64
"""of a sum that is taken apart"""


def read(columns: Columns, node: fx.Node) -> tuple[Tensor, ...] | None:
    """The names of the numbers of each result of a reduction, None for any other operation."""
    reader = _READERS.get(name_of(node))
    return None if reader is None else reader(columns, node)


# ---- numbers in groups


@dataclass
class Groups:
    """The numbers of a value in groups, each of which is to be reduced to one number."""

    columns: Columns
    node: fx.Node
    names: Tensor  # (B, count, size)
    order: list[
        int
    ]  # how the value's dimensions were permuted: batch, those that stay, those that are reduced
    shape: list[int]  # of the permuted value
    reduced: int  # how many dimensions are reduced

    @classmethod
    def of(cls, columns: Columns, node: fx.Node, names: Tensor, dims: Sequence[int]) -> Groups:
        """The numbers along some dimensions of a value, for each place along the others."""
        over = sorted({d % names.dim() for d in dims})
        batch = batch_dimension(names, ROWS)
        if batch is None or batch in over:
            raise Undescribable(f"{name_of(node)} mixes the rows of a batch{where(node)}")
        order = [batch, *(d for d in range(names.dim()) if d != batch and d not in over), *over]
        permuted = names.permute(order)
        size = math.prod(names.shape[d] for d in over)
        return cls(
            columns, node, permuted.reshape(BATCH, -1, size), order, list(permuted.shape), len(over)
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many groups."""
        return self.names.shape[1]

    @property
    def size(self) -> int:
        """How many numbers each has."""
        return self.names.shape[2]

    def result(self, names: Tensor, keepdim: bool) -> Tensor:
        """One number for each group, (B, count), in the shape of torch's result."""
        stay = len(self.shape) - self.reduced
        out = names.reshape(self.shape[:stay] + [1] * self.reduced).permute(*np.argsort(self.order).tolist())
        for d in () if keepdim else sorted(self.order[stay:], reverse=True):
            out = out.squeeze(d)
        return out

    def whole(self, names: Tensor) -> Tensor:
        """All numbers, (B, count, size), in the shape of the value."""
        return names.reshape(self.shape).permute(*np.argsort(self.order).tolist())

    def compute(self, build: Callable[..., Expression], *names: Tensor) -> Tensor:
        """An element-wise function of numbers."""
        shape = torch.broadcast_shapes(*(n.shape for n in names))
        return self.columns.compute(build, names, self.node, shape)

    def few(self) -> list[Tensor]:
        """The first number of each group, the second, …: each (B, count)."""
        return list(self.names.unbind(2))

    # ---- sums and what is left without the mean

    def total(self, scale: float = 1.0, names: Tensor | None = None) -> Tensor:
        """The sum of each group (or of as many other numbers) times a constant: (B, count)."""
        numbers = self.names if names is None else names
        if self.size <= min(FEW, self.count):
            return self.compute(lambda *a: _scaled(_added(a), scale), *numbers.unbind(2))
        flat = numbers.reshape(BATCH, -1)
        terms = _linear_terms(self.columns, flat)
        if any(isinstance(t.block, MatrixVector) for t in terms):
            parts = [self._total_of(t, scale) for t in terms]
            return self.compute(lambda *a: _added(a), *parts)
        return self._product(flat, scale)

    def _product(self, flat: Tensor, scale: float) -> Tensor:
        """Sums as a product with a matrix of ones and zeros.

        Of several numbers for each unit of a state, as gates are, those of a unit are added first.
        """
        widths = {n.meta["shape"][1] for n in self.columns.recording.states}
        widths = {w for w in widths if self.size % w == 0 and 1 < self.size // w <= FEW}
        width = max(widths, default=self.size)
        if width < self.size:
            several = flat.reshape(BATCH, self.count, self.size // width, width)
            flat = self.compute(lambda *a: _added(a), *several.unbind(2)).reshape(BATCH, -1)
        dtype = self.columns.recording.states[0].meta["dtype"]
        ones = torch.eye(self.count, dtype=dtype).repeat_interleave(width, 0) * scale
        return times_matrix(self.columns, self.node, flat, self.columns.constant(ones))

    def _total_of(self, term: LinearTerm, scale: float) -> Tensor:
        """The sums of one term: of its matrix's rows, where it is a product."""
        if isinstance(term.block, MatrixVector):
            matrix = self._summed_rows(term.rows(self.columns), scale * term.factor)
            return term.product(self.columns, matrix)
        return self._product(term.names(), scale * term.factor)

    def _summed_rows(self, matrix: fx.Node, scale: float) -> fx.Node:
        new, columns = self.columns.new_node, matrix.meta["shape"][1]
        shape = (self.count, self.size, columns)
        grouped = new(aten.reshape.default, (matrix, list(shape)), shape)
        summed = new(aten.sum.dim_IntList, (grouped, [1]), (self.count, columns))
        return summed if scale == 1 else new(aten.mul.Tensor, (summed, scale), (self.count, columns))

    def centred(self) -> Tensor:
        """Every number without the mean of its group: (B, count, size)."""
        terms = _linear_terms(self.columns, self.names.reshape(BATCH, -1))
        if not any(isinstance(t.block, MatrixVector) for t in terms):
            mean = self.total(1 / self.size)
            return self.compute(lambda a, m: a - m, self.names, mean.unsqueeze(2))
        parts = [self._centred_term(t) for t in terms]
        return self.compute(lambda *a: _added(a), *parts)

    def _centred_term(self, term: LinearTerm) -> Tensor:
        """One term without its mean: a product by the rows of its matrix without theirs."""
        shape = self.names.shape
        if isinstance(term.block, MatrixVector):
            matrix = self._without_mean(term.rows(self.columns), 0)
            return _times(self, term.product(self.columns, matrix).reshape(shape), term.factor)
        if isinstance(term.block, Precomputed) and (known := self._centred_outside(term)) is not None:
            return _times(self, known.expand(BATCH, -1).reshape(shape), term.factor)
        names = term.names().reshape(shape)
        mean = self.total(term.factor / self.size, names)
        return self.compute(lambda a, m: a * term.factor - m, names, mean.unsqueeze(2))

    def _centred_outside(self, term: LinearTerm) -> Tensor | None:
        """The same for what is known before the loop; a product of the input stays one."""
        columns, block = self.columns, term.block
        assert isinstance(block, Precomputed)
        if block.kind == "fixed":
            flat = columns.new_node(aten.reshape.default, (block.node, [-1]), (block.width,))
            return columns.names(self._without_mean(chosen(columns, flat, term.index, 0), 0))
        if block.kind != "row":
            return None
        projected = self._centred_projection(block.node, term.index)
        if projected is not None:
            return columns.names(projected)
        rows = chosen(columns, columns.as_rows(block), term.index, 1)
        return columns.names(self._without_mean(rows, 1))

    def _centred_projection(self, node: fx.Node, index: Index) -> fx.Node | None:
        """Columns of a product of the input without their mean, as a product; None for anything else."""
        columns, shape = self.columns, (BATCH, len(index))
        if name_of(node) not in ("mm", "addmm") or node.kwargs:
            return None
        *bias, source, q = node.args
        if columns.kinds[q] != "fixed" or any(not _is_vector(columns, b, q.meta["shape"][1]) for b in bias):  # type: ignore[index,union-attr]
            return None
        centred = self._without_mean(chosen(columns, q, index, 1), 1)  # type: ignore[arg-type]
        if not bias:
            return columns.new_node(aten.mm.default, (source, centred), shape, (0,))
        b = self._without_mean(chosen(columns, bias[0], index, 0), 0)  # type: ignore[arg-type]
        return columns.new_node(aten.addmm.default, (b, source, centred), shape, (0,))

    def _without_mean(self, node: fx.Node, dim: int) -> fx.Node:
        """A tensor without the means of its groups along a dimension."""
        new, batch = self.columns.new_node, node.meta["batch"]
        shape: list[Any] = list(node.meta["shape"])
        size: list[Any] = [self.columns.recording.rows if d in batch else n for d, n in enumerate(shape)]
        grouped = [*shape[:dim], self.count, self.size, *shape[dim + 1 :]]
        target = [*size[:dim], self.count, self.size, *size[dim + 1 :]]
        parts = new(aten.reshape.default, (node, target), grouped, batch)
        means = new(
            aten.mean.dim, (parts, [dim + 1], True), [*grouped[: dim + 1], 1, *grouped[dim + 2 :]], batch
        )
        left = new(aten.sub.Tensor, (parts, means), grouped, batch)
        return new(aten.reshape.default, (left, size), shape, batch)


def _is_vector(columns: Columns, node: Any, width: int) -> bool:
    return columns.kinds[node] == "fixed" and tuple(node.meta["shape"]) == (width,)


def _added(terms: Sequence[Expression]) -> Expression:
    """A sum, by halves: pointwise code of few operations one after the other."""
    if len(terms) == 1:
        return terms[0]
    middle = (len(terms) + 1) // 2
    return _added(terms[:middle]) + _added(terms[middle:])


def _scaled(e: Expression, factor: float) -> Expression:
    return e if factor == 1 else e * factor


def _times(groups: Groups, names: Tensor, factor: float) -> Tensor:
    return names if factor == 1 else groups.compute(lambda a: a * factor, names)


# ---- sums taken apart


class LinearTerm(NamedTuple):
    """A constant times numbers of a block."""

    factor: float
    block: Block
    index: Index

    def names(self) -> Tensor:
        """The names of the numbers: (B, width)."""
        numbers = torch.from_numpy(self.block.start + self.index) * ROWS
        return numbers + 1 + torch.arange(BATCH)[:, None]

    def rows(self, columns: Columns) -> fx.Node:
        """Those rows of the matrix that the block is a product with."""
        assert isinstance(self.block, MatrixVector)
        return chosen(columns, self.block.matrix, self.index, 0)

    def product(self, columns: Columns, matrix: fx.Node) -> Tensor:
        """Another matrix times the same vector: names (B, rows)."""
        assert isinstance(self.block, MatrixVector)
        rows = matrix.meta["shape"][0]
        block = columns.add(MatrixVector, rows, self.block.parts, matrix, self.block.node)
        return columns.name_rows(block, (BATCH, rows), 0)


def _linear_terms(columns: Columns, names: Tensor) -> list[LinearTerm]:
    """Numbers (B, n) as a sum of constants times numbers of blocks; nothing where they do not belong together."""
    numbers = (names // ROWS).numpy()
    if batch_dimension(names, ROWS) != 0 or (numbers != numbers[:1]).any():
        return []
    groups = columns.grouped([numbers[0]])
    if len(groups) > 1:
        return []
    (block,), _ = groups[0]
    done: list[LinearTerm] = []
    waiting = [LinearTerm(1.0, block, numbers[0] - block.start)]
    while waiting:
        if len(done) + len(waiting) > MOST_TERMS:
            return []
        term = waiting.pop()
        opened = _opened(term)
        if opened is None:
            done.append(term)
        else:
            waiting += opened[::-1]
    return done


def _opened(term: LinearTerm) -> list[LinearTerm] | None:
    """The terms of a sum or of a multiple by a constant, None for what is neither."""
    block = term.block
    if not isinstance(block, Elementwise):
        return None
    try:
        e = block.build(*(leaf("operand", i) for i in range(len(block.operands))))
    except (NotImplementedError, ArithmeticError, ValueError):  # said where the block itself is pulled
        return None
    found = []
    for sign, inner in flattened(e, lambda _: True):
        factor = term.factor * sign
        if inner.op == "multiply" and (constants := [a for a in inner.args if a.op == "constant"]):
            factor *= float(constants[0].value)  # type: ignore[arg-type]
            inner = next((a for a in inner.args if a is not constants[0]), inner)
        if inner.op != "operand":
            return None
        operand, index = block.operands[inner.value[0]]  # type: ignore[index]
        found.append(LinearTerm(factor, operand, index[term.index]))
    changes = e.op in SUMS or len(found) != 1 or found[0].factor != term.factor or e.op == "operand"
    return found if changes else None


# ---- torch's operations


def _arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an operation by name."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments}
    values |= dict(zip([a.name for a in schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    if values.get("dtype") not in (None, node.meta.get("dtype")):
        raise Undescribable(f"{name_of(node)} changes the type{where(node)}")
    return values


def _groups(columns: Columns, node: fx.Node, args: dict[str, Any]) -> Groups:
    names = columns.names(args["self"] if "self" in args else args["input"])
    dim = args.get("dim")
    dims = range(names.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return Groups.of(columns, node, names, list(dims))


def _sum(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    args = _arguments(node)
    groups = _groups(columns, node, args)
    return (groups.result(groups.total(), args.get("keepdim", False)),)


def _mean(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    args = _arguments(node)
    groups = _groups(columns, node, args)
    return (groups.result(groups.total(1 / groups.size), args.get("keepdim", False)),)


def _root(e: Expression) -> Expression:
    """A square root whose slope at 0 is 0, as torch has it for norms and deviations."""
    zero = apply("equal", e, 0.0)
    return apply("select", zero, 0.0, apply("sqrt", apply("select", zero, 1.0, e)))


def _variance(columns: Columns, node: fx.Node, root: bool, with_mean: bool) -> tuple[Tensor, ...]:
    args = _arguments(node)
    groups = _groups(columns, node, args)
    correction = 1 if args["correction"] is None else args["correction"]
    if groups.size <= correction:
        raise Undescribable(f"{name_of(node)} of {groups.size} numbers{where(node)}")
    d = groups.centred()
    squares = groups.compute(lambda a: apply("square", a), d)
    spread = groups.total(1 / (groups.size - correction), squares)
    if root:
        spread = groups.compute(_root, spread)
    out = [groups.result(spread, args["keepdim"])]
    return (*out, groups.result(groups.total(1 / groups.size), args["keepdim"])) if with_mean else (*out,)


def _norm(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    args = _arguments(node)
    order = args.get("ord", args.get("p"))
    order = 2 if order is None else order
    if order not in (1, 2):
        raise Undescribable(f"{name_of(node)} of order {order}{where(node)}")
    groups = _groups(columns, node, args)
    power = "square" if order == 2 else "absolute"
    total = groups.total(1.0, groups.compute(lambda a: apply(power, a), groups.names))
    return (groups.result(groups.compute(_root, total) if order == 2 else total, args.get("keepdim", False)),)


def _normalised(groups: Groups, eps: float) -> Tensor:
    """Numbers with mean 0 and variance 1 in each group: (B, count, size)."""
    d = groups.centred()
    variance = groups.total(1 / groups.size, groups.compute(lambda a: apply("square", a), d))
    scale = groups.compute(lambda v: 1.0 / apply("sqrt", v + eps), variance)
    return groups.compute(lambda a, s: a * s, d, scale.unsqueeze(2))


def _affine(groups: Groups, names: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        names = groups.compute(lambda a, w: a * w, names, weight)
    return names if bias is None else groups.compute(lambda a, b: a + b, names, bias)


def _layer_norm(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    args = _arguments(node)
    names = columns.names(args["input"])
    groups = Groups.of(columns, node, names, list(range(-len(args["normalized_shape"]), 0)))
    given = [None if args[k] is None else columns.names(args[k]) for k in ("weight", "bias")]
    return (_affine(groups, groups.whole(_normalised(groups, args["eps"])), *given),)


def _group_norm(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    args = _arguments(node)
    names = columns.names(args["input"])
    channels, inner = names.shape[1], names.shape[2:]
    apart = names.reshape(BATCH, args["group"], channels // args["group"], *inner)
    groups = Groups.of(columns, node, apart, list(range(2, apart.dim())))
    given = [
        None if args[k] is None else columns.names(args[k]).view(channels, *[1] * len(inner))
        for k in ("weight", "bias")
    ]
    return (_affine(groups, groups.whole(_normalised(groups, args["eps"])).reshape(names.shape), *given),)


def _few(columns: Columns, node: fx.Node) -> tuple[Groups, dict[str, Any]]:
    """Groups of so few numbers that they are compared one by one."""
    args = _arguments(node)
    groups = _groups(columns, node, args)
    if groups.size > FEW:
        raise Undescribable(f"{name_of(node)} over more than {FEW} units of the state{where(node)}")
    return groups, args


def _largest(columns: Columns, node: fx.Node, extremum: str) -> tuple[Tensor]:
    groups, args = _few(columns, node)
    return (groups.result(groups.compute(lambda *a: apply(extremum, *a), *groups.few()), args["keepdim"]),)


def _softmax(columns: Columns, node: fx.Node, logarithm: bool) -> tuple[Tensor]:
    groups, _ = _few(columns, node)
    numbers = groups.few()

    def build(value: Expression, *all_of: Expression) -> Expression:
        highest = apply("detach", apply("maximum", *all_of))
        total = _added([apply("exp", a - highest) for a in all_of])
        return value - highest - apply("log", total) if logarithm else apply("exp", value - highest) / total

    return (
        groups.whole(torch.stack([groups.compute(build, own, *numbers) for own in numbers], 2)),
    )  # fmt: skip


def _logsumexp(columns: Columns, node: fx.Node) -> tuple[Tensor]:
    groups, args = _few(columns, node)

    def build(*all_of: Expression) -> Expression:
        highest = apply("detach", apply("maximum", *all_of))
        return highest + apply("log", _added([apply("exp", a - highest) for a in all_of]))

    return (groups.result(groups.compute(build, *groups.few()), args["keepdim"]),)


_READERS: dict[str, Callable[[Columns, fx.Node], tuple[Tensor, ...]]] = {
    "sum": _sum,
    "mean": _mean,
    "var": lambda columns, node: _variance(columns, node, root=False, with_mean=False),
    "std": lambda columns, node: _variance(columns, node, root=True, with_mean=False),
    "var_mean": lambda columns, node: _variance(columns, node, root=False, with_mean=True),
    "std_mean": lambda columns, node: _variance(columns, node, root=True, with_mean=True),
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "amax": lambda columns, node: _largest(columns, node, "maximum"),
    "amin": lambda columns, node: _largest(columns, node, "minimum"),
    "_softmax": lambda columns, node: _softmax(columns, node, logarithm=False),
    "_log_softmax": lambda columns, node: _softmax(columns, node, logarithm=True),
    "logsumexp": _logsumexp,
}
