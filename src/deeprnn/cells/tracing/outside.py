"""Nodes of a recorded step that are known before the loop, and new ones for what is computed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from deeprnn.cells.tracing.blocks import BATCH, ROWS, Blocks, Precomputed
from deeprnn.cells.tracing.operations import name_of
from deeprnn.cells.tracing.recording import Undescribable, where

aten = torch.ops.aten


@dataclass
class Outside(Blocks):
    """What every node depends on, and how new nodes are made."""

    kinds: dict[fx.Node, str] = field(default_factory=dict)  # "size", "fixed", "row" or "loop"
    sources: dict[fx.Node, frozenset[str]] = field(default_factory=dict)  # what a known value depends on
    made: dict[Any, fx.Node] = field(default_factory=dict)  # nodes of our own, by what they compute

    def new_node(
        self, target: Any, args: tuple[Any, ...], shape: Sequence[int], batch: tuple[int, ...] = ()
    ) -> fx.Node:
        """A node behind all others, known before the loop; the same call twice is one node."""
        key = (target, str(args))
        if key in self.made:
            return self.made[key]
        node = self.made[key] = self.recording.graph.call_function(target, args)
        first = next(a for a in node.all_input_nodes if a in self.sources)
        node.meta = {"shape": tuple(shape), "dtype": first.meta["dtype"], "batch": batch, "line": ""}
        known = [self.sources[a] for a in node.all_input_nodes if a in self.sources]
        self.sources[node] = frozenset().union(*known)
        self.kinds[node] = "row" if batch else "fixed"
        if batch:
            self.fresh_row(node)
        return node

    def constant(self, tensor: Tensor) -> fx.Node:
        """A tensor of our own as a node."""
        numbers = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16
        key = (str(tensor.dtype), tuple(tensor.shape), numbers)
        if key in self.made:
            return self.made[key]
        name = f"constant_{len(self.recording.constants)}"
        self.recording.constants[name] = tensor
        node = self.recording.graph.create_node("get_attr", name)
        node.meta = {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "batch": (), "line": ""}
        self.kinds[node], self.sources[node] = "fixed", frozenset()
        self.made[key] = node
        return node

    def transposed(self, node: fx.Node) -> fx.Node:
        """The transpose of a matrix; that of a transpose is the matrix itself."""
        turned = (aten.t.default, aten.transpose.int, aten.permute.default)
        if node.target in turned and len(node.args[0].meta["shape"]) == 2:  # type: ignore[union-attr]
            return node.args[0]  # type: ignore[return-value]
        return self.new_node(aten.t.default, (node,), node.meta["shape"][::-1])

    def as_rows(self, block: Precomputed) -> fx.Node:
        """A value with rows as (rows, width)."""
        node, (batch,) = block.node, block.node.meta["batch"]
        shape = node.meta["shape"]
        if len(shape) == 2 and batch == 0:
            return node
        if batch:
            order = [batch, *(d for d in range(len(shape)) if d != batch)]
            node = self.new_node(aten.permute.default, (node, order), [shape[d] for d in order], (0,))
        size = [self.recording.rows, block.width]
        return self.new_node(aten.reshape.default, (node, size), (BATCH, block.width), (0,))

    def one_of_batch(self, node: fx.Node, of: fx.Node) -> fx.Node:
        """The matrix that a tensor holds once for every row of a batch."""
        numbers = self.names(node)[0] // ROWS
        block = self.blocks[int(np.searchsorted(self.starts(), int(numbers.flatten()[0]), side="right")) - 1]
        numbers = numbers - block.start
        if not isinstance(block, Precomputed) or block.kind != "fixed" or numbers.max() >= block.width:
            raise Undescribable(f"{name_of(of)} multiplies by different matrices in a batch{where(of)}")
        shape, whole = tuple(numbers.shape), torch.arange(block.width)
        if tuple(block.node.meta["shape"])[-2:] == shape and torch.equal(numbers.flatten(), whole):
            return block.node if block.node.meta["shape"] == shape else self._viewed(block, shape)
        if torch.equal(numbers.t().flatten(), whole):
            return self.transposed(self._viewed(block, shape[::-1]))
        places = self.constant(numbers.flatten())
        flat = self.new_node(aten.reshape.default, (block.node, [-1]), (block.width,))
        picked = self.new_node(aten.index_select.default, (flat, 0, places), (numbers.numel(),))
        return self.new_node(aten.view.default, (picked, list(shape)), shape)

    def _viewed(self, block: Precomputed, shape: Sequence[int]) -> fx.Node:
        if tuple(block.node.meta["shape"]) == tuple(shape):
            return block.node
        return self.new_node(aten.reshape.default, (block.node, list(shape)), shape)

    def fresh_row(self, node: fx.Node) -> None:
        """Name the numbers of a value that has one row for each of the batch."""
        shape, batch = node.meta["shape"], node.meta["batch"]
        if len(batch) != 1 or shape[batch[0]] != BATCH:
            raise Undescribable(f"{name_of(node)} mixes the rows of a batch{where(node)}")
        drawn = self.sources[node] <= {"step", "sequence"} and self.sources[node]
        width = int(np.prod(shape, dtype=int)) // BATCH
        block = self.add(Precomputed, width, node, "drawn" if drawn else "row")
        self.values[node] = self.name_rows(block, shape, batch[0])
