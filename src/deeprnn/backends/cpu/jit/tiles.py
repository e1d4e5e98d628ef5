"""Products of a tile: a few rows of a batch times a panel of weights, the results in registers while k runs.

A function for a tile adds up all terms of a sum, k in one fixed order, whatever the size of the tile: neither batch,
nor population, nor threads change a bit of a result.
"""

from __future__ import annotations

from typing import Any

from deeprnn.backends.cpu.jit import machine
from deeprnn.backends.cpu.jit.builder import I64, POINTER
from deeprnn.backends.cpu.jit.emitter import Emitter
from deeprnn.backends.cpu.jit.number import FLOAT, Number
from deeprnn.backends.cpu.jit.tables import TALLEST, TileTerm

ARGUMENTS = (POINTER, POINTER, I64, I64)
"""where results go, row by row; the terms (`TileTerm`); how many; units from the tile's first to the stage's last"""
TERM_WORDS = TileTerm.ROWS + TALLEST
WIDEST = 13
"""vectors of a panel at most"""


def widest_panel(rows: int) -> int:
    """Vectors of a panel for tiles of so many rows: results, one row of weights and one number fit the registers."""
    return max(1, min((machine.machine().registers - 2) // (rows + 1), WIDEST))


def packed_tile(number: Number, rows: int, vectors: int) -> int:
    """The address of the function for tiles of that shape, which reads packed weights."""
    lanes = machine.machine().vector_bytes // number.size
    kind = f"tile{rows}x{vectors}"
    return machine.address(
        kind, (number is FLOAT, lanes), lambda name: _packed(name, number, lanes, rows, vectors)
    )


def unpacked_tile(number: Number, rows: int) -> int:
    """The address of the function for tiles of so many rows and one vector, which reads matrices as they are."""
    lanes = machine.machine().vector_bytes // number.size
    return machine.address(
        f"unpacked{rows}", (number is FLOAT, lanes), lambda name: _unpacked(name, number, lanes, rows)
    )


def _packed(name: str, number: Number, lanes: int, rows: int, vectors: int) -> str:
    e = Emitter(name, ARGUMENTS, number, lanes)
    unroll = 4 if rows * vectors <= 4 else 2

    def multiply(pointers: list[Any], weights: Any, k: Any, tile: list[Any]) -> list[Any]:
        base = e.at(weights, e.mul(k, vectors * lanes))
        loaded = [e.load(e.at(base, v * lanes)) for v in range(vectors)]
        out = []
        for r, row in enumerate(pointers):
            x = e.broadcast(e.number_at(e.at(row, k)))
            out += [e.fma(x, loaded[v], tile[r * vectors + v]) for v in range(vectors)]
        return out

    def term(table: Any, depth: Any, pointers: list[Any], tile: list[Any]) -> list[Any]:
        weights = e.pointer(table, TileTerm.WEIGHTS)

        def several(k: Any, *values: Any) -> list[Any]:
            out = list(values)
            for u in range(unroll):
                out = multiply(pointers, weights, e.add(k, u), out)
            return out

        whole = e.b.and_(depth, e.index(-unroll))
        tile = e.loop(0, whole, several, tile, step=unroll)
        return e.loop(whole, depth, lambda k, *values: multiply(pointers, weights, k, list(values)), tile)

    _tile(e, rows, vectors, term)
    return e.text


def _tile(e: Emitter, rows: int, vectors: int, write_term: Any) -> None:
    """Add up the terms, then store the results row by row."""
    out, terms, count, _ = e.arguments

    def one(i: Any, *tile: Any) -> list[Any]:
        table = e.word_at(terms, e.mul(i, TERM_WORDS))
        pointers = [e.pointer(table, TileTerm.ROWS + r) for r in range(rows)]
        return write_term(table, e.word(table, TileTerm.DEPTH), pointers, list(tile))

    tile = e.loop(0, count, one, [e.zero()] * (rows * vectors))
    for i, value in enumerate(tile):
        e.store(value, e.at(out, i * e.lanes))
    e.b.ret_void()


def _unpacked(name: str, number: Number, lanes: int, rows: int) -> str:
    """Squares of a matrix (units, k) are transposed in registers on the way: cheap, if each is used once."""
    e = Emitter(name, ARGUMENTS, number, lanes)
    units = e.arguments[3]
    tail = e.stack(e.vector, lanes, align=e.vector_bytes)

    def square(lines: list[Any], k: Any, mask: Any) -> list[Any]:
        return e.transpose([e.load(e.at(line, k), mask) for line in lines])

    def multiply(pointers: list[Any], weights: Any, k: Any, tile: list[Any]) -> list[Any]:
        numbers = [e.broadcast(e.number_at(e.at(row, k))) for row in pointers]
        return [e.fma(x, weights, sums) for x, sums in zip(numbers, tile, strict=True)]

    def term(table: Any, depth: Any, pointers: list[Any], tile: list[Any]) -> list[Any]:
        weights, stride = e.pointer(table, TileTerm.WEIGHTS), e.word(table, TileTerm.STRIDE)
        last = e.add(units, -1)  # lanes beyond the last unit repeat it; nobody reads them
        lines = [e.offset(weights, e.mul(e.minimum_of(i, last), stride)) for i in range(lanes)]
        whole = e.b.and_(depth, e.index(-lanes))

        def whole_square(k: Any, *values: Any) -> list[Any]:
            out = list(values)
            for i, column in enumerate(square(lines, k, None)):
                out = multiply(pointers, column, e.add(k, i), out)
            return out

        tile = e.loop(0, whole, whole_square, tile, step=lanes)
        with e.b.if_then(e.less(whole, depth)):
            rest = e.lanes_below(e.b.sub(depth, whole))
            for i, column in enumerate(square(lines, whole, rest)):
                e.store(column, e.at(tail, i * lanes))

        def from_tail(k: Any, *values: Any) -> list[Any]:
            column = e.load(e.at(tail, e.mul(e.b.sub(k, whole), lanes)))
            return multiply(pointers, column, k, list(values))

        return e.loop(whole, depth, from_tail, tile)

    _tile(e, rows, 1, term)
    return e.text
