"""The gradients of a layer's parameters: sums over all steps and rows, each written where it belongs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from deeprnn.backends.cpu.jit import machine, outer_sums
from deeprnn.backends.cpu.jit.number import NUMBERS
from deeprnn.backends.cpu.jit.run import MOST_CALLS, execute, zeros_address
from deeprnn.backends.cpu.jit.sharing import share_freely
from deeprnn.backends.cpu.jit.tables import Call, OuterSum
from deeprnn.backends.gradients import merged_products, tiles_matrices_exactly
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import adjoint_of


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
    parameter: int
    start: int
    """numbers before it in the parameter"""
    width: int
    """columns of the parameter"""


def serves(wiring: Wiring) -> bool:
    """Whether each number of each parameter has its gradient in one sum."""
    adjoint = adjoint_of(wiring.cell)
    steps = [rows.step for rows in adjoint.vector_columns.values()]
    return (
        wiring.uses_all_once
        and tiles_matrices_exactly(adjoint)
        and len(steps) == len(wiring.vectors)
        and steps == [1] * len(steps)
    )


class WeightSums:
    """The gradients of all parameters of a wiring."""

    def __init__(self, wiring: Wiring, inputs: int, dtype: torch.dtype):
        self.wiring, self.inputs, self.number = wiring, inputs, NUMBERS[dtype]
        self.cell, self.adjoint = wiring.cell, adjoint_of(wiring.cell)
        self.sums = [*self._of_matrices(), *self._of_inputs(), *self._of_vectors()]
        self.multiplications = sum(x.rows * self._width(x.right) for x in self.sums)
        self._tables: dict[tuple, tuple[Any, list[tuple[int, int, int]]]] = {}
        self._function = outer_sums.run(self.number, machine.machine())

    def _of_matrices(self) -> Iterator[Sum]:
        for shared in merged_products(self.adjoint):
            at, vector = shared.start, shared.vector
            output = vector.kind == "output"
            index = self.cell.outputs.index((vector.stage, vector.index)) if output else vector.index
            for segment in shared.segments:
                width = self.cell.matrices[segment.matrix][1]
                parameter, start = self.wiring.matrices[segment.matrix], segment.row * width + segment.column
                yield Sum(at, segment.rows, Right(vector.kind, index), parameter, start, width)
                at += segment.rows

    def _of_inputs(self) -> Iterator[Sum]:
        column = 0
        for parameter in self.wiring.U:
            height = self.wiring.shapes[parameter][0]
            yield Sum(column, height, Right("input"), parameter, 0, self.inputs)
            column += height

    def _of_vectors(self) -> Iterator[Sum]:
        for parameter, start, count, column in self.wiring.biases:
            yield Sum(column, count, Right("ones"), parameter, start, 1)
        for (_, number), rows in self.adjoint.vector_columns.items():
            parameter, start, count, _ = self.wiring.vectors[number]
            yield Sum(rows.start, count, Right("ones"), parameter, start, 1)

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
        fields |= {word.LEFT_ROW: self.adjoint.width * size, word.ROWS: x.rows}
        if x.right.kind != "ones":
            fields |= outer_sums.tile_words(self.number, x.rows, columns)
            fields |= {word.COLUMNS: columns, word.RIGHT_ROW: columns * size, word.OUT_ROW: x.width * size}
        return [fields[w] for w in word]

    def run(
        self, delta: int, x: int, states: Sequence[int | None], outputs: Sequence[int], marks: int | None,
        gradients: Sequence[int], steps: int, batch: int,
    ) -> None:  # fmt: skip
        """Fill `gradients`, one of each parameter; all are addresses of contiguous tensors, None for zeros."""
        key = steps, batch, tuple([h is None for h in states])
        if (known := self._tables.get(key)) is None:
            if len(self._tables) >= MOST_CALLS:  # sequences of ever new lengths
                self._tables.clear()
            known = self._tables[key] = self._table(*key)
        table, places = known
        call = type(table).from_buffer_copy(table)
        given = [delta, x, marks or 0, *states, *outputs, *gradients]
        for word, number, offset in places:
            call[word] = given[number] + offset
        work = steps * batch * self.multiplications
        share_freely(work, lambda parts: execute(call, self._function, parts))

    def _table(
        self, steps: int, batch: int, absent: Sequence[bool]
    ) -> tuple[Any, list[tuple[int, int, int]]]:
        """A call's table without addresses, and where they belong: (word, number of what is given, bytes behind it)."""
        word, size, at = OuterSum, self.number.size, Call.size()
        call: Any = (ctypes.c_int64 * (at + word.size() * len(self.sums)))()
        call[Call.PARTS], call[Call.STEPS] = 1, len(self.sums)
        delta, x, marks, first_state = range(4)
        first_output = first_state + len(self.cell.states)
        first_gradient = first_output + len(self.cell.outputs)
        places: list[tuple[int, int, int]] = []
        for one in self.sums:
            call[at : at + word.size()] = self._words(one)
            call[at + word.COUNT] = steps * batch
            places.append((at + word.LEFT, delta, one.column * size))
            places.append((at + word.OUT, first_gradient + one.parameter, one.start * size))
            kind, index = one.right
            if kind == "state":
                row, before = call[at + word.RIGHT_ROW], self.cell.new_states[index]
                places.append((at + word.RIGHT, first_output + self.cell.outputs.index(before), 0))
                places.append((at + word.MARKS, marks, 0))
                call[at + word.HEAD_COUNT] = batch
                if absent[index]:
                    call[at + word.HEAD] = zeros_address(row)
                else:
                    call[at + word.HEAD_ROW] = row
                    places.append((at + word.HEAD, first_state + index, 0))
            elif kind != "ones":
                right = x if kind == "input" else first_output + index
                places += [(at + word.RIGHT, right, 0), (at + word.HEAD, right, 0)]
            at += word.size()
        return call, places
