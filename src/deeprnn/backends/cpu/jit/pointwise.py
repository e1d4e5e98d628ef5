"""The pointwise code behind a stage's sums: from sums and memory through expressions to memory, vector by vector.

A `Pointwise` names no cell, no size and no tensor: what it reads and writes are numbered slots, which a plan binds to
views. So stages that compute the same share one function, within a cell and across cells.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from deeprnn.backends.cpu.jit import machine
from deeprnn.backends.cpu.jit.builder import I64, POINTER
from deeprnn.backends.cpu.jit.emitter import Emitter
from deeprnn.backends.cpu.jit.number import FLOAT, Number
from deeprnn.backends.cpu.jit.tables import View
from deeprnn.cells.expressions import Expression, fold, in_order
from deeprnn.cells.functions import FUNCTIONS

ARGUMENTS = (POINTER, POINTER, I64, I64, I64, I64, I64, POINTER, I64)
"""addresses of the stage's views at this step; their table; first row, rows; first unit, units of the stage, vectors
of the panel; the tile's sums, bytes of one of them"""

MOST_INLINE = 24
"""costly functions that are written out where they are used: LLVM takes 10 ms for each, and more than linear time"""


class Read(NamedTuple):
    """A number for each unit, from a sum or from memory."""

    slot: int
    is_sum: bool = False
    step: int = 1
    """distance from unit to unit"""
    marks: int | None = None
    """slot of the reset marks: it counts as zero in rows that are marked"""


class Write(NamedTuple):
    """A result to be stored, or added to what is there."""

    slot: int
    step: int = 1
    add: bool = False


class Pointwise(NamedTuple):
    """Values are sums of what is read; results are expressions of the leaves `value_leaf(n)`."""

    values: tuple[tuple[Read, ...], ...]
    results: tuple[tuple[Expression, tuple[Write, ...]], ...]

    def __str__(self) -> str:
        results = [(expression.digest.hex(), writes) for expression, writes in self.results]
        return f"{self.values} {results}"


def value_leaf(number: int) -> Expression:
    """A leaf that stands for a value by its number."""
    return Expression("mask", value=(number,))


def function(program: Pointwise, number: Number) -> int:
    """The address of a program's machine code."""
    lanes = machine.machine().vector_bytes // number.size
    key = (str(program), number is FLOAT, lanes)
    return machine.address("pointwise", key, lambda name: _Writer(name, program, number, lanes).text)


class _Writer:
    """Writes a program for tiles of any size."""

    def __init__(self, name: str, program: Pointwise, number: Number, lanes: int):
        self.program, self.e = program, Emitter(name, ARGUMENTS, number, lanes)
        e = self.e
        _, _, _, rows, self.column, size, self.vectors, _, _ = e.arguments
        left = e.b.sub(size, self.column)
        # A masked store delays whoever reads it next: only the last vector of a stage, if not whole, is masked.
        self.whole = e.minimum_of(self.vectors, e.b.ashr(left, e.index(lanes.bit_length() - 1)))
        self.last_lanes = e.lanes_below(e.b.sub(left, e.mul(self.whole, lanes)))
        self.starts = {slot: self._start(slot) for slot in self._slots()}

        def row(r: Any) -> None:
            places = {
                slot: e.offset(start, e.mul(r, stride)) for slot, (start, stride) in self.starts.items()
            }
            marked = {slot: e.marked(place) for slot, place in places.items() if slot in self.marks}
            e.loop(0, self.vectors, lambda v: self._vector(r, v, places, marked))

        e.loop(0, rows, row)
        e.b.ret_void()
        self.text = e.text

    def _slots(self) -> list[int]:
        reads = [read for value in self.program.values for read in value]
        self.marks = {x.marks for x in reads if x.marks is not None}
        self.steps = {x.slot: x.step for x in reads if not x.is_sum}
        self.steps |= {x.slot: x.step for _, writes in self.program.results for x in writes}
        return sorted(self.marks | set(self.steps))

    def _start(self, slot: int) -> tuple[Any, Any]:
        """Where a slot's units begin in the tile's first row, and the distance from row to row."""
        e = self.e
        current, views, first = e.arguments[:3]
        stride = e.word(views, slot * View.size() + View.ROW)
        start = e.offset(e.pointer(current, slot), e.mul(first, stride))
        return (start if slot in self.marks else e.at(start, e.mul(self.column, self.steps[slot]))), stride

    def _vector(self, r: Any, v: Any, places: dict, marked: dict) -> None:
        """Compute one vector of units in one row; only memory is accessed in two ways, whole or masked."""
        e = self.e
        is_whole = e.less(v, self.whole)

        def at(x: Read | Write) -> Any:
            return e.at(places[x.slot], e.mul(v, e.lanes * x.step))

        writes = [write for _, some in self.program.results for write in some]
        accessed = list(dict.fromkeys((x.slot, x.step) for x in self._loaded(writes)))
        loaded = e.either(
            is_whole,
            lambda: [e.load(at(Write(*x)), None, x[1]) for x in accessed],
            lambda: [e.load(at(Write(*x)), self.last_lanes, x[1]) for x in accessed],
        )
        memory = dict(zip(accessed, loaded, strict=True))
        results = self._computed(r, v, memory, marked)
        targets = [(at(write), write.step) for write in writes]

        def store(mask: Any) -> list[Any]:
            for value, (place, step) in zip(results, targets, strict=True):
                e.store(value, place, mask, step)
            return []

        e.either(is_whole, lambda: store(None), lambda: store(self.last_lanes))

    def _loaded(self, writes: list[Write]) -> list[Read | Write]:
        """What is read from memory; to what is there already something is added."""
        reads = [x for value in self.program.values for x in value if not x.is_sum]
        return [*reads, *(x for x in writes if x.add)]

    def _computed(self, r: Any, v: Any, memory: dict, marked: dict) -> list[Any]:
        """What is to be written, in order."""
        e = self.e
        sums, tile_bytes = e.arguments[7:]
        spot = e.mul(e.add(e.mul(r, self.vectors), v), e.vector_bytes)

        def read(x: Read) -> Any:
            if x.is_sum:
                return e.load(e.offset(sums, e.add(spot, e.mul(tile_bytes, x.slot))))
            value = memory[x.slot, x.step]
            return value if x.marks is None else e.select(marked[x.marks], e.zero(), value)

        values = [reduce(e.b.fadd, [read(x) for x in parts]) for parts in self.program.values]

        def leaf_value(node: Expression) -> Any:
            return e.splat(node.value) if node.op == "constant" else values[node.value[0]]  # type: ignore[index]

        roots = [expression for expression, _ in self.program.results]
        costly = [n for n in in_order(roots) if n.op in FUNCTIONS and not FUNCTIONS[n.op].cheap]

        def applied(name: str, args: list[Any]) -> Any:
            function = FUNCTIONS[name]
            if function.cheap or len(costly) <= MOST_INLINE:
                return function.llvm(e, *args)
            return e.shared(f"{name}_of_{len(args)}", lambda *x: function.llvm(e, *x), *args)

        computed = fold(roots, leaf_value, applied)
        return [
            e.b.fadd(memory[write.slot, write.step], result) if write.add else result
            for result, (_, writes) in zip(computed, self.program.results, strict=True)
            for write in writes
        ]
