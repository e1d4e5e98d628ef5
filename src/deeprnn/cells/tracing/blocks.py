"""Numbers of a recorded step: blocks of them that are computed alike, and tensors of their names.

A name is an integer that says which number an element of a tensor is, and to which row of the batch it belongs, or to
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from deeprnn.cells.expressions import Expression
from deeprnn.cells.tracing.operations import name_of
from deeprnn.cells.tracing.recording import SIZES, Recording, Undescribable, where

BATCH = SIZES[0]
ROWS = BATCH + 1  # a row's number, or "all rows" as 0
Index = np.ndarray


@dataclass(eq=False)
class Block:
    """Numbers of one row that are computed alike, `width` of them."""

    start: int
    width: int


@dataclass(eq=False)
class State(Block):
    """Places of a state of the step before."""

    state: int
    places: Index


@dataclass(eq=False)
class Precomputed(Block):
    """What can be computed before the loop: `kind` is "fixed" (from parameters), "row" (from x) or "drawn"."""

    node: fx.Node
    kind: str


@dataclass(eq=False)
class Constant(Block):
    """A constant."""

    value: float


@dataclass(eq=False)
class VectorPart:
    """Numbers of a block, in some order, and which columns of a matrix multiply them."""

    block: Block
    index: Index
    columns: Index


@dataclass(eq=False)
class MatrixVector(Block):
    """A matrix (width, ·) times a vector that is made of parts."""

    parts: list[VectorPart]
    matrix: fx.Node
    node: fx.Node


@dataclass(eq=False)
class Elementwise(Block):
    """An element-wise function of numbers of other blocks."""

    build: Callable[..., Expression]
    operands: list[tuple[Block, Index]]
    node: fx.Node


@dataclass
class Blocks:
    """All blocks of a step, and the names of the numbers of its tensors."""

    recording: Recording
    blocks: list[Block] = field(default_factory=list)
    values: dict[fx.Node, Tensor] = field(default_factory=dict)  # names of numbers
    total: int = 0
    _starts: list[int] = field(default_factory=list)

    def add(self, block_type: type, width: int, *fields: Any) -> Any:
        block = block_type(self.total, width, *fields)
        self.blocks.append(block)
        self._starts.append(block.start)
        self.total += width
        return block

    def starts(self) -> Index:
        return np.array(self._starts)

    def grouped(self, numbers: Sequence[Index] | Index) -> list[tuple[tuple[Block, ...], Index]]:
        """Positions at which the same blocks meet, and those blocks."""
        starts = self.starts()
        owners = np.stack([np.searchsorted(starts, n, side="right") - 1 for n in numbers])
        if (owners == owners[:, :1]).all():
            return [(tuple(self.blocks[i] for i in owners[:, 0]), np.arange(owners.shape[1]))]
        unique, inverse = np.unique(owners, axis=1, return_inverse=True)
        first = [int(np.argmax(inverse == k)) for k in range(unique.shape[1])]
        return [
            (tuple(self.blocks[i] for i in unique[:, k]), np.flatnonzero(inverse == k))
            for k in np.argsort(first, kind="stable")
        ]

    def name_rows(self, block: Block, shape: Sequence[int], batch: int) -> Tensor:
        """Names of a block's numbers as a tensor of that shape, whose dimension `batch` is the batch."""
        rest = [n for d, n in enumerate(shape) if d != batch]
        numbers = torch.arange(block.start, block.start + block.width).view(rest)
        rows = [numbers * ROWS + b + 1 for b in range(BATCH)]
        return torch.stack(rows, batch)

    def names(self, node: fx.Node) -> Tensor:
        """The names of a value's numbers; those of a parameter are made when they are first asked for."""
        if node not in self.values:
            shape = node.meta["shape"]
            block = self.add(Precomputed, int(np.prod(shape, dtype=int)), node, "fixed")
            self.values[node] = (torch.arange(block.start, block.start + block.width) * ROWS).view(shape)
        return self.values[node]

    def rows_of(self, names: Sequence[Tensor], node: fx.Node) -> Index:
        """The row that each element belongs to, 0 for all rows; it must be one and the same for all operands."""
        rows = np.zeros(tuple(names[0].shape), dtype=int)
        for operand in names:
            of_operand = (operand % ROWS).numpy()
            if ((rows != of_operand) & (rows != 0) & (of_operand != 0)).any():
                raise Undescribable(f"{name_of(node)} mixes the rows of a batch{where(node)}")
            rows = np.maximum(rows, of_operand)
        return rows.reshape(-1)

    def compute(
        self, build: Callable[..., Expression], names: Sequence[Tensor], node: fx.Node, shape: Any = None
    ) -> Tensor:
        """An element-wise function of numbers: a block for every combination of blocks that meet in it."""
        operands = [x.expand(node.meta["shape"] if shape is None else shape) for x in names]
        rows = self.rows_of(operands, node)
        numbers = [(x // ROWS).reshape(-1).numpy() for x in operands]
        result = np.zeros(rows.shape, dtype=np.int64)
        for row in (0, 1):
            at = np.flatnonzero(rows == row)
            if not len(at):
                continue
            selected = np.stack([n[at] for n in numbers])
            # A constant has one number for all rows of a batch, and so has what is computed from it.
            once, place = selected, np.arange(len(at))
            if not row:
                once, place = np.unique(selected, axis=1, return_inverse=True)
            new = np.zeros(once.shape[1], dtype=np.int64)
            for blocks, positions in self.grouped(once):
                pairs = [(b, n[positions] - b.start) for b, n in zip(blocks, once, strict=True)]
                block = self.add(Elementwise, len(positions), build, pairs, node)
                new[positions] = np.arange(block.start, block.start + block.width)
            result[at] = new[place.reshape(-1)] * ROWS + row
            for other in range(2, ROWS) if row else ():  # the other rows of the batch look the same
                there = np.flatnonzero(rows == other)
                if len(there) != len(at) or any((n[there] != n[at]).any() for n in numbers):
                    raise Undescribable(
                        f"{name_of(node)} treats the rows of a batch differently{where(node)}"
                    )
                result[there] = new * ROWS + other
        return torch.from_numpy(result).view(operands[0].shape)
