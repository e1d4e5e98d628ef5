"""How a cell's tensors are made of a layer's parameters: which are matrices, which slices of them are added where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deeprnn.cells.description import CellDescription


class ParameterSlice(NamedTuple):
    """Numbers of a parameter with one dimension, and the first column of A, or of a vector, to which they belong."""

    parameter: int
    start: int
    count: int
    column: int = 0


@dataclass(frozen=True, eq=False)
class Wiring:
    """A recurrence whose input enters through matrices, in terms of parameters by number.

    A's columns are x U_kᵀ side by side, plus all biases. It compares by identity: made once for a layer.
    """

    cell: CellDescription
    shapes: tuple[tuple[int, ...], ...]
    """of all parameters"""
    U: tuple[int, ...]
    matrices: tuple[int, ...]
    biases: tuple[ParameterSlice, ...]
    vectors: tuple[ParameterSlice, ...] = ()
    """one for each of the cell's"""

    def enter(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """A, by operations that autograd can follow."""
        width = self.cell.entry_width
        bias = None
        for p, start, count, column in self.biases:
            padded = functional.pad(parameters[p][start : start + count], (column, width - column - count))
            bias = padded if bias is None else bias + padded
        return functional.linear(x, torch.cat([parameters[i] for i in self.U]), bias)

    def vector_parameters(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The cell's vectors."""
        return [parameters[p].narrow(0, start, count) for p, start, count, _ in self.vectors]

    @property
    def uses_all_once(self) -> bool:
        """Whether every number of every parameter is used, and in one place: then its gradient is one sum."""
        whole = [*self.U, *self.matrices]
        if len(set(whole)) < len(whole) or any(len(self.shapes[i]) != 2 for i in whole):
            return False
        pieces = sorted((*self.biases, *self.vectors))
        ends = {i: 0 for i in range(len(self.shapes)) if i not in whole}
        for p, start, count, _ in pieces:
            if p not in ends or ends[p] != start:
                return False
            ends[p] = start + count
        return all(self.shapes[p] == (end,) for p, end in ends.items())


@lru_cache(maxsize=1024)
def projection_wiring(cell: CellDescription, heights: tuple[int, ...], biases: int, inputs: int) -> Wiring:
    """That of an `InputProjection`'s U, of these heights, and b, followed by a cell's matrices and vectors."""
    columns, count = [0, *accumulate(heights)], len(heights)
    pieces = [ParameterSlice(count + i, 0, heights[i % count], columns[i % count]) for i in range(biases)]
    shapes: list[tuple[int, ...]] = [(n, inputs) for n in heights]
    shapes += [(piece.count,) for piece in pieces]
    first = len(shapes)
    shapes += [*cell.matrices, *((n,) for n in cell.vectors)]
    matrices = tuple(range(first, first + len(cell.matrices)))
    vectors = tuple(ParameterSlice(first + len(matrices) + i, 0, n) for i, n in enumerate(cell.vectors))
    return Wiring(cell, tuple(shapes), tuple(range(count)), matrices, tuple(pieces), vectors)
