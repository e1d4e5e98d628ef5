"""What leaves the loop: graphs that compute matrices, vectors, entries and masks before the first step.

Three of them: `fixed`, from parameters alone; `rows`, from x and random draws of all steps at once; and `sequence`,
from random draws that hold for a whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn

from deeprnn.cells.tracing.blocks import BATCH, Index, Precomputed
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.operations import name_of
from deeprnn.cells.tracing.products import chosen
from deeprnn.cells.tracing.staging import Signed
from deeprnn.cells.tracing.writing import Entry, WrittenCell

aten = torch.ops.aten


class ProjectedEntry(NamedTuple):
    """An entry that is a product of rows with a matrix: rows `index` of it, and signed pieces of the bias."""

    source: fx.Node
    matrix: fx.Node
    index: Index
    sign: int
    bias: tuple[tuple[int, fx.Node, Index], ...]  # (sign, parameter, places)


@dataclass
class HoistedNodes:
    """Nodes to be computed, and the graphs that do so.

    Where all entries are products of the same rows, `entering` is those rows, and `U` and `b` are computed with the
    matrices; else `entering` is A itself.
    """

    written: WrittenCell
    entering: fx.Node | None = None  # None: no entry at all
    U: list[fx.Node] = field(default_factory=list)
    b: list[fx.Node] = field(default_factory=list)
    vectors: list[fx.Node] = field(default_factory=list)
    masks: list[tuple[fx.Node, bool]] = field(default_factory=list)  # (node, whether one a sequence)

    @property
    def columns(self) -> Columns:
        """The reading that nodes belong to."""
        return self.written.staging.expressions.columns

    def hoist(self) -> None:
        """Find everything."""
        self.vectors = [self._vector(n) for n in self.written.vectors]
        for n in self.written.masks:
            block, index = self.written.staging.expressions.pieces[n]
            assert isinstance(block, Precomputed)
            node = chosen(self.columns, self.columns.as_rows(block), index, 1)
            self.masks.append((node, self.columns.sources[block.node] == {"sequence"}))
        entries = self.written.entries
        if not entries:
            return
        linear = [self._linear(e) for e in entries]
        if all(l is not None and l.source is linear[0].source for l in linear):  # type: ignore[union-attr]
            self.entering = linear[0].source  # type: ignore[union-attr]
            for group in _runs(linear):  # type: ignore[arg-type]
                self.U.append(self._matrix(group))
                self.b.append(self._bias(group))
            if all(b is None for b in self.b):
                self.b = []
            self.b = [self._zeros(u) if b is None else b for u, b in zip(self.U, self.b, strict=False)]
            return
        parts: list[fx.Node] = []
        for source, run in groupby(zip(entries, linear, strict=True), lambda e: e[1] and e[1].source):
            both = list(run)
            if source is None:
                parts += self._others([entry for entry, _ in both])
            else:
                parts += self._products([projected for _, projected in both if projected is not None])
        width = sum(e.size for e in entries)
        self.entering = (
            parts[0] if len(parts) == 1 else self._new(aten.cat.default, (parts, 1), (BATCH, width), (0,))
        )

    def _new(
        self, target: Any, args: tuple[Any, ...], shape: Sequence[int], batch: tuple[int, ...] = ()
    ) -> fx.Node:
        return self.columns.new_node(target, args, shape, batch)

    def _vector(self, piece: int) -> fx.Node:
        block, index = self.written.staging.expressions.pieces[piece]
        assert isinstance(block, Precomputed)
        return self._places(block.node, index)

    def _places(self, node: fx.Node, index: Index) -> fx.Node:
        """Numbers of a parameter as a vector."""
        shape = node.meta["shape"]
        if len(shape) != 1:
            node = self._new(aten.reshape.default, (node, [-1]), (int(np.prod(shape, dtype=int)),))
        return chosen(self.columns, node, index, 0)

    # ---- entries

    def _known(self, signed: Signed) -> tuple[int, Precomputed, Index]:
        sign, piece = signed
        block, index = self.written.staging.expressions.pieces[piece]
        assert isinstance(block, Precomputed)
        return sign, block, index

    def _linear(self, entry: Entry) -> ProjectedEntry | None:
        """The entry as a product with rows, where it is one."""
        if len(entry.rows) != 1:
            return None
        sign, block, index = self._known(entry.rows[0])
        node, kinds = block.node, self.columns.kinds
        if name_of(node) not in ("mm", "addmm") or node.kwargs:
            return None
        source, q = node.args[-2:]
        if kinds[source] != "row" or source.meta["batch"] != (0,):  # type: ignore[index,union-attr]
            return None
        bias = [(s, b.node, i) for s, b, i in map(self._known, entry.fixed)]
        if name_of(node) == "addmm":
            first = node.args[0]
            width = node.meta["shape"][1]
            if kinds[first] != "fixed" or tuple(first.meta["shape"]) not in ((width,), (1, width)):  # type: ignore[index,union-attr]
                return None
            bias.insert(0, (sign, first, index))  # type: ignore[arg-type]
        return ProjectedEntry(source, self.columns.transposed(q), index, sign, tuple(bias))  # type: ignore[arg-type]

    def _matrix(self, group: list[ProjectedEntry]) -> fx.Node:
        """The rows of a run of entries as one matrix."""
        matrix = chosen(self.columns, group[0].matrix, np.concatenate([l.index for l in group]), 0)
        return matrix if group[0].sign > 0 else self._new(aten.neg.default, (matrix,), matrix.meta["shape"])

    def _bias(self, group: list[ProjectedEntry]) -> Any:
        """The bias of a run of entries, None where there is none."""
        if not any(l.bias for l in group):
            return None
        runs: list[list[ProjectedEntry]] = []
        for l in group:
            same = runs and [t[:2] for t in runs[-1][-1].bias] == [t[:2] for t in l.bias]
            runs[-1].append(l) if same else runs.append([l])
        parts = []
        for run in runs:
            size = sum(len(l.index) for l in run)
            pieces = [
                (sign, self._places(node, np.concatenate([l.bias[k][2] for l in run])))
                for k, (sign, node, _) in enumerate(run[0].bias)
            ]
            parts.append(self._added(pieces, (size,)) if pieces else self._zeros(self._matrix(run)))
        total = sum(len(l.index) for l in group)
        return parts[0] if len(parts) == 1 else self._new(aten.cat.default, (parts, 0), (total,))

    def _added(
        self, pieces: list[tuple[int, fx.Node]], shape: Sequence[int], batch: tuple[int, ...] = ()
    ) -> fx.Node:
        (sign, node), *rest = sorted(pieces, key=lambda p: -p[0])
        node = node if sign > 0 else self._new(aten.neg.default, (node,), shape, node.meta["batch"])
        for sign, other in rest:
            node = self._new(aten.add.Tensor if sign > 0 else aten.sub.Tensor, (node, other), shape, batch)
        return node

    def _zeros(self, matrix: fx.Node) -> fx.Node:
        rows = matrix.meta["shape"][0]
        return self._new(aten.new_zeros.default, (matrix, [rows]), (rows,))

    def _products(self, pending: list[ProjectedEntry]) -> list[fx.Node]:
        """Runs of entries that are products of the same rows, as one product."""
        groups = _runs(pending)
        rows = [self._matrix(g) for g in groups]
        width = sum(r.meta["shape"][0] for r in rows)
        q = (
            rows[0]
            if len(rows) == 1
            else self._new(aten.cat.default, (rows, 0), (width, rows[0].meta["shape"][1]))
        )
        biases = [self._bias(g) for g in groups]
        source, turned = pending[0].source, self.columns.transposed(q)
        if all(b is None for b in biases):
            return [self._new(aten.mm.default, (source, turned), (BATCH, width), (0,))]
        whole = [self._zeros(u) if b is None else b for u, b in zip(rows, biases, strict=True)]
        bias = whole[0] if len(whole) == 1 else self._new(aten.cat.default, (whole, 0), (width,))
        return [self._new(aten.addmm.default, (bias, source, turned), (BATCH, width), (0,))]

    def _others(self, entries: list[Entry]) -> list[fx.Node]:
        """Entries of any kind; neighbours that are places of one value are taken from it together."""
        parts = []
        for whole, run in groupby(entries, self._only_source):
            neighbours = list(run)
            if whole is None:
                parts += [self._sum(entry) for entry in neighbours]
                continue
            known = [self._known(entry.rows[0]) for entry in neighbours]
            places = np.concatenate([index for _, _, index in known])
            parts.append(chosen(self.columns, self.columns.as_rows(known[0][1]), places, 1))
        return parts

    def _only_source(self, entry: Entry) -> int | None:
        """The value whose places an entry is; None where it is a sum or a difference."""
        sign, block, _ = self._known(entry.rows[0])
        return id(block) if len(entry.rows) == 1 and not entry.fixed and sign > 0 else None

    def _sum(self, entry: Entry) -> fx.Node:
        """A sum of values and parameters as an entry."""
        pieces = []
        for sign, block, index in map(self._known, entry.rows):
            pieces.append((sign, chosen(self.columns, self.columns.as_rows(block), index, 1)))
        for sign, block, index in map(self._known, entry.fixed):
            pieces.append((sign, self._places(block.node, index)))
        return self._added(pieces, (BATCH, entry.size), (0,))


def _runs(linear: list[ProjectedEntry]) -> list[list[ProjectedEntry]]:
    """Neighbours that are rows of the same matrix, one run after the other."""
    runs: list[list[ProjectedEntry]] = []
    for l in linear:
        same = runs and (runs[-1][-1].matrix, runs[-1][-1].sign) == (l.matrix, l.sign)
        runs[-1].append(l) if same else runs.append([l])
    return runs


def extract(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    constants: dict[str, Tensor],
    device: Any,
) -> fx.GraphModule:
    """The part of a graph that computes the outputs from the inputs, for tensors on a device."""
    new, env = fx.Graph(), {}
    for k, node in enumerate(inputs):
        env[node] = new.placeholder(f"in_{k}")
    needed = set(inputs)
    stack = [n for n in outputs if n not in needed]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    root = nn.Module()
    for node in _sorted(graph, needed - set(inputs)):
        if node.op == "get_attr":
            root.register_buffer(str(node.target), constants[str(node.target)].to(device))
        elif node.op == "placeholder":
            raise AssertionError(f"{node.name} is no input")
        copy = env[node] = new.node_copy(node, lambda n: env[n])
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(a.name == "device" for a in schema.arguments):
            copy.kwargs = {**copy.kwargs, "device": device}
    new.output(tuple(env[n] for n in outputs))
    return fx.GraphModule(root, new)


def _sorted(graph: fx.Graph, needed: set[fx.Node]) -> list[fx.Node]:
    """Arguments before what uses them: nodes of our own may stand behind their users."""
    done: dict[fx.Node, None] = {}
    stack = [(n, False) for n in reversed([n for n in graph.nodes if n in needed])]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done[node] = None
        else:
            stack.append((node, True))
            stack += [(a, False) for a in node.all_input_nodes if a in needed]
    return list(done)
