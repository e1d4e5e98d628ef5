"""The gradients of a layer's parameters: sums over all steps and rows, each written where it belongs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cpu.jit import machine, outer_sums
from deeprnn.backends.cpu.jit.number import NUMBERS
from deeprnn.backends.cpu.jit.run import execute, zeros_address
from deeprnn.backends.cpu.jit.sharing import share_freely
from deeprnn.backends.cpu.jit.tables import Call, OuterSum
from deeprnn.backends.gradients import covered_once, shared_products
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import adjoint


class Right(NamedTuple):
    """What delta's rows are multiplied with."""

    kind: str
    """"output" (of this step), "state" (of the step before), "input", or "ones" """
    index: int = 0


class Sum(NamedTuple):
    """A part of a parameter's gradient."""

    column: int
    """of delta, the first"""
    rows: int
    right: Right
    target: int
    """numbers before it in the gradients"""
    width: int
    """columns of the parameter"""


def serves(wiring: Wiring) -> bool:
    """Whether each number of each parameter has its gradient in one sum."""
    own = adjoint(wiring.cell)
    steps = [rows.step for rows in own.vector_columns.values()]
    return (
        wiring.uses_all_once
        and covered_once(own)
        and len(steps) == len(wiring.vectors)
        and steps == [1] * len(steps)
    )


class WeightSums:
    """The gradients of all parameters of a wiring, one behind the other in one tensor."""

    def __init__(self, wiring: Wiring, inputs: int, dtype: torch.dtype):
        self.wiring, self.inputs, self.number, self.dtype = wiring, inputs, NUMBERS[dtype], dtype
        self.cell, self.own = wiring.cell, adjoint(wiring.cell)
        sizes = [torch.Size(shape).numel() for shape in wiring.shapes]
        self.starts = [0, *accumulate(sizes)]
        self.sums = [*self._of_matrices(), *self._of_inputs(), *self._of_vectors()]
        self.multiplications = sum(x.rows * self._width(x.right) for x in self.sums)
        self.table = [word for x in self.sums for word in self._words(x)]

    def _of_matrices(self) -> Iterator[Sum]:
        for shared in shared_products(self.own):
            at, vector = shared.start, shared.vector
            output = vector.kind == "output"
            index = self.cell.outputs.index((vector.stage, vector.index)) if output else vector.index
            for segment in shared.segments:
                width = self.cell.matrices[segment.matrix][1]
                start = self.starts[self.wiring.matrices[segment.matrix]]
                start += segment.row * width + segment.column
                yield Sum(at, segment.rows, Right(vector.kind, index), start, width)
                at += segment.rows

    def _of_inputs(self) -> Iterator[Sum]:
        column = 0
        for parameter in self.wiring.U:
            height = self.wiring.shapes[parameter][0]
            yield Sum(column, height, Right("input"), self.starts[parameter], self.inputs)
            column += height

    def _of_vectors(self) -> Iterator[Sum]:
        for parameter, start, count, column in self.wiring.biases:
            yield Sum(column, count, Right("ones"), self.starts[parameter] + start, 1)
        for (_, number), rows in self.own.vector_columns.items():
            parameter, start, count, _ = self.wiring.vectors[number]
            yield Sum(rows.start, count, Right("ones"), self.starts[parameter] + start, 1)

    def _width(self, right: Right) -> int:
        if right.kind == "state":
            return self.cell.states[right.index]
        if right.kind == "output":
            return self.cell.stages[self.cell.outputs[right.index].stage].size
        return self.inputs if right.kind == "input" else 1

    def _words(self, x: Sum) -> list[int]:
        """A sum's entry in the table, without addresses and counts."""
        word, size, columns = OuterSum, self.number.size, self._width(x.right)
        fields: dict[OuterSum, int] = dict.fromkeys(word, 0)
        fields |= {word.LEFT_ROW: self.own.width * size, word.ROWS: x.rows}
        if x.right.kind != "ones":
            fields |= outer_sums.tile_words(self.number, x.rows, columns)
            fields |= {word.COLUMNS: columns, word.RIGHT_ROW: columns * size, word.OUT_ROW: x.width * size}
        return [fields[w] for w in word]

    def run(
        self, delta: int, x: int, states: Sequence[int | None], outputs: Sequence[int], marks: int | None,
        steps: int, batch: int,
    ) -> Tensor:  # fmt: skip
        """All gradients: what is given are addresses of contiguous tensors, None for states that are zeros."""
        word, size, count = OuterSum, self.number.size, steps * batch
        gradients = torch.empty(self.starts[-1], dtype=self.dtype)
        out, at = gradients.data_ptr(), Call.size()
        call: Any = (ctypes.c_int64 * (at + len(self.table)))()
        call[Call.PARTS], call[Call.STEPS] = 1, len(self.sums)
        call[at : at + len(self.table)] = self.table
        for one in self.sums:
            call[at + word.LEFT], call[at + word.COUNT] = delta + one.column * size, count
            call[at + word.OUT] = out + one.target * size
            kind, index = one.right
            if kind == "state":
                first, row = states[index], call[at + word.RIGHT_ROW]
                call[at + word.RIGHT] = outputs[self.cell.outputs.index(self.cell.new_states[index])]
                call[at + word.HEAD] = zeros_address(row) if first is None else first
                call[at + word.HEAD_ROW], call[at + word.HEAD_COUNT] = (0 if first is None else row), batch
                call[at + word.MARKS] = marks or 0
            elif kind != "ones":
                call[at + word.RIGHT] = call[at + word.HEAD] = x if kind == "input" else outputs[index]
            at += word.size()
        function = outer_sums.run(self.number, machine.machine())
        share_freely(count * self.multiplications, lambda parts: execute(call, function, parts))
        return gradients
