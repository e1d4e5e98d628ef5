"""Packing: a matrix copied into the panels that a tile reads from first to last."""

from __future__ import annotations

from typing import Any

from deeprnn.backends.cpu.jit import machine
from deeprnn.backends.cpu.jit.builder import I64, POINTER
from deeprnn.backends.cpu.jit.emitter import Emitter
from deeprnn.backends.cpu.jit.number import FLOAT, Number
from deeprnn.backends.cpu.jit.tables import Packing

ARGUMENTS = (POINTER, POINTER, POINTER, I64, I64)
"""matrix, packed weights, the packing's table, first panel, one past the last"""


def packing(number: Number, transposed: bool) -> int:
    """The address of the function that copies panels: panel, k, column; columns past the end become zero.

    `transposed` reads a matrix (columns, k), else (k, columns).
    """
    lanes = machine.machine().vector_bytes // number.size
    program = (number is FLOAT, lanes, transposed)
    return machine.address("pack", program, lambda name: _write(name, number, lanes, transposed))


def _write(name: str, number: Number, lanes: int, transposed: bool) -> str:
    e = Emitter(name, ARGUMENTS, number, lanes)
    matrix, packed, table, first, last = e.arguments
    fields = {word: e.word(table, word) for word in Packing}
    width, wide = fields[Packing.WIDTH], fields[Packing.WIDE]
    source, target = e.offset(matrix, fields[Packing.OFFSET]), e.offset(packed, fields[Packing.TARGET])

    def panel(p: Any) -> None:
        vectors = e.add(width, e.b.zext(e.less(p, wide), I64))
        start = e.add(e.mul(p, width), e.minimum_of(p, wide))
        row = e.mul(vectors, lanes)
        base = e.add(e.mul(e.mul(start, fields[Packing.SUM_DEPTH]), lanes), e.mul(fields[Packing.ABOVE], row))

        if not transposed:
            _straight(e, fields, source, e.at(target, base), start, vectors)
            return

        def vector(v: Any) -> None:
            out = e.at(target, e.add(base, e.mul(v, lanes)))
            _transposed(e, fields, source, out, e.mul(e.add(start, v), lanes), row)

        e.loop(0, vectors, vector)

    e.loop(first, last, panel)
    e.b.ret_void()
    return e.text


def _straight(e: Emitter, fields: dict, source: Any, out: Any, start: Any, vectors: Any) -> None:
    def line(k: Any) -> None:
        place = e.offset(source, e.mul(k, fields[Packing.STRIDE]))

        def vector(v: Any) -> None:
            column = e.mul(e.add(start, v), e.lanes)
            mask = e.lanes_below(e.b.sub(fields[Packing.SIZE], column))
            number = e.mul(e.add(e.mul(k, vectors), v), e.lanes)
            e.store(e.load(e.at(place, column), mask), e.at(out, number))

        e.loop(0, vectors, vector)

    e.loop(0, fields[Packing.DEPTH], line)


def _transposed(e: Emitter, fields: dict, source: Any, out: Any, column: Any, row: Any) -> None:
    depth = fields[Packing.DEPTH]
    whole = e.b.and_(depth, e.index(-e.lanes))

    def square(k: Any, mask: Any) -> list[Any]:
        lines = []
        for i in range(e.lanes):
            place = e.add(column, i)
            inside = e.less(place, fields[Packing.SIZE])
            start = e.offset(source, e.mul(e.b.select(inside, place, e.index(0)), fields[Packing.STRIDE]))
            lines.append(e.b.select(inside, e.load(e.at(start, k), mask), e.zero()))
        return e.transpose(lines)

    def block(k: Any) -> None:
        for i, value in enumerate(square(k, None)):
            e.store(value, e.at(out, e.mul(e.add(k, i), row)))

    e.loop(0, whole, block, step=e.lanes)
    with e.b.if_then(e.less(whole, depth)):
        for i, value in enumerate(square(whole, e.lanes_below(e.b.sub(depth, whole)))):
            k = e.add(whole, i)
            with e.b.if_then(e.less(k, depth)):
                e.store(value, e.at(out, e.mul(k, row)))
