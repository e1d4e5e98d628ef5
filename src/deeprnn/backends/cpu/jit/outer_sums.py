"""Sums of outer products over all steps and rows, Σ_k left[k]ᵀ right[k]: the gradients of weights.

A tile of results lives in registers while k runs over a block of rows. The block's left side is copied first, tile by
tile, and its right side into a panel as wide as a tile, which all tiles below each other read: as many as the second
cache holds, block after block, before the next. Blocks are added up in their order, and a tile belongs to one thread:
neither the number of threads nor the other sums of a call change a bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from llvmlite import ir

from deeprnn.backends.cpu.jit import machine
from deeprnn.backends.cpu.jit.builder import I8, I64, POINTER
from deeprnn.backends.cpu.jit.emitter import Emitter
from deeprnn.backends.cpu.jit.number import FLOAT, Number
from deeprnn.backends.cpu.jit.plan import Panels
from deeprnn.backends.cpu.jit.tables import TALLEST, Call, OuterSum
from deeprnn.backends.cpu.jit.tiles import widest_panel

BLOCK = 128
"""rows k of a block: its panel of the right side stays in the first cache"""
CHUNK_BYTES = 2**19
"""bytes of results to which all blocks are added before the next are begun: they stay in the second cache"""
MOST_TILES = 32
"""tiles below each other whose left sides are copied at once"""
CACHE_LINE = 64
"""bytes by which the left sides of tiles are off a power of two, or they would share few places of the first cache"""
TILE = (POINTER, I64, POINTER, I64, POINTER, I64, I64, I64)
"""the tile's first result, bytes of a row of results; left's first number, bytes of a row; the panel; its rows; columns
of the result from the tile's first on; whether results are added to what is there"""
TOGETHER = 4
"""vectors of columns that are summed at once"""


@lru_cache(maxsize=8)
def run(number: Number, processor: machine.Machine) -> int:
    """The address of `run(call, part)`: one thread's share of a call's sums (`OuterSum`, behind the call's words)."""
    lanes = processor.vector_bytes // number.size
    program = (number is FLOAT, lanes)
    return machine.address("outer_sums", program, lambda name: _Run(name, number, lanes).text)


def tile_words(number: Number, rows: int, columns: int) -> dict[OuterSum, int]:
    """The words that say how a result of this size is cut into tiles, and which functions compute them."""
    lanes, word = machine.machine().vector_bytes // number.size, OuterSum
    panels = Panels.of(-(-columns // lanes), 1, widest_panel(TALLEST))
    found = {
        word.PANELS: panels.count,
        word.WIDTH: panels.width,
        word.WIDE: panels.wide,
        word.HEIGHT: TALLEST,
        word.CHUNK: max(1, min(MOST_TILES, CHUNK_BYTES // (TALLEST * columns * number.size))),
    }
    kinds = ((word.TALL_WIDE, word.TALL_NARROW), (word.SHORT_WIDE, word.SHORT_NARROW))
    heights = (TALLEST if rows >= TALLEST else 0, rows % TALLEST)
    for height, (wide, narrow) in zip(heights, kinds, strict=True):
        for vectors, kind in ((panels.width + 1, wide), (panels.width, narrow)):
            found[kind] = _tile(number, lanes, height, vectors) if height and vectors in panels.widths else 0
    return found


def _tile(number: Number, lanes: int, rows: int, vectors: int) -> int:
    return machine.address(
        f"outer{rows}x{vectors}", (number is FLOAT, lanes),
        lambda name: _write_tile(name, number, lanes, rows, vectors),
    )  # fmt: skip


def _write_tile(name: str, number: Number, lanes: int, rows: int, vectors: int) -> str:
    e = Emitter(name, TILE, number, lanes)
    out, out_row, left, left_row, panel, count, columns, adds = e.arguments

    def one(k: Any, *tile: Any) -> list[Any]:
        line = e.at(panel, e.mul(k, vectors * lanes))
        loaded = [e.load(e.at(line, v * lanes)) for v in range(vectors)]
        place, results = e.offset(left, e.mul(k, left_row)), []
        for r in range(rows):
            x = e.broadcast(e.number_at(e.at(place, r)))
            results += [e.fma(x, loaded[v], tile[r * vectors + v]) for v in range(vectors)]
        return results

    tile = e.loop(0, count, one, [e.zero()] * (rows * vectors))
    mask = e.lanes_below(e.b.sub(columns, e.index((vectors - 1) * lanes)))
    places = [e.at(e.offset(out, e.mul(out_row, r)), v * lanes) for r in range(rows) for v in range(vectors)]
    masks = [mask if v == vectors - 1 else None for _ in range(rows) for v in range(vectors)]

    def added() -> list[Any]:
        return [e.b.fadd(e.load(p, m), x) for p, m, x in zip(places, masks, tile, strict=True)]

    totals = e.either(e.b.icmp_signed("!=", adds, e.index(0)), added, lambda: list(tile))
    for place, m, total in zip(places, masks, totals, strict=True):
        e.store(total, place, m)
    e.b.ret_void()
    return e.text


class _Run:
    """Writes `run`."""

    def __init__(self, name: str, number: Number, lanes: int):
        self.e = e = Emitter(name, [POINTER, I64], number, lanes)
        self.call, self.part = e.arguments
        self.panel = e.stack(e.vector, BLOCK * widest_panel(TALLEST), align=e.vector_bytes)
        self.left_row = TALLEST * number.size
        self.left_tile = BLOCK * self.left_row + CACHE_LINE
        self.left = e.stack(I8, MOST_TILES * self.left_tile, align=CACHE_LINE)
        sums = e.word_at(self.call, Call.size())
        e.loop(
            0, e.word(self.call, Call.STEPS), lambda i: self._sum(e.word_at(sums, e.mul(i, OuterSum.size())))
        )
        e.b.ret_void()
        self.text = e.text

    def _range_of_part(self, count: Any) -> tuple[Any, Any]:
        """This thread's part of so many things."""
        e, parts = self.e, self.e.word(self.call, Call.PARTS)
        first = e.b.sdiv(e.mul(self.part, count), parts)
        return first, e.b.sdiv(e.mul(e.add(self.part, 1), count), parts)

    def _sum(self, entry: Any) -> None:
        e = self.e
        f = {word: e.word(entry, word) for word in OuterSum}
        has_right = e.b.icmp_signed("!=", f[OuterSum.RIGHT], e.index(0))

        def each_block(add: Callable[[Any, Any], None]) -> None:
            def block(first: Any) -> None:
                add(first, e.minimum_of(e.b.sub(f[OuterSum.COUNT], first), BLOCK))

            e.loop(0, f[OuterSum.COUNT], block, step=BLOCK)

        with e.b.if_else(has_right) as (products, columns):
            with products:
                height = f[OuterSum.HEIGHT]
                begin, end = self._range_of_part(e.b.sdiv(e.add(f[OuterSum.ROWS], height, -1), height))

                def chunk(tile: Any) -> None:
                    last = e.minimum_of(e.add(tile, f[OuterSum.CHUNK]), end)

                    def add(first: Any, count: Any) -> None:
                        self._pack_left(f, tile, last, first, count)
                        self._products(f, tile, last, first, count)

                    each_block(add)

                e.loop(begin, end, chunk, step=f[OuterSum.CHUNK])
            with columns:
                each_block(lambda first, count: self._columns(f, first, count))

    def _address(self, word: Any) -> Any:
        return self.e.b.inttoptr(word, POINTER)

    def _left(self, f: dict, first: Any) -> Any:
        """The block's first row of the left side."""
        e = self.e
        return e.offset(self._address(f[OuterSum.LEFT]), e.mul(first, f[OuterSum.LEFT_ROW]))

    # ---- matrices

    def _products(self, f: dict, begin: Any, end: Any, first: Any, count: Any) -> None:
        """Add a block to some of this thread's tiles."""
        e, word = self.e, OuterSum
        height = f[word.HEIGHT]
        whole = e.b.sdiv(f[word.ROWS], height)
        adds = e.b.zext(e.less(0, first), I64)
        out = self._address(f[word.OUT])

        def panel(p: Any) -> None:
            is_wide = e.less(p, f[word.WIDE])
            vectors = e.add(f[word.WIDTH], e.b.zext(is_wide, I64))
            column = e.mul(e.add(e.mul(p, f[word.WIDTH]), e.minimum_of(p, f[word.WIDE])), e.lanes)
            self._pack(f, first, count, column, vectors)
            tall, short = (
                e.b.select(is_wide, f[wide], f[narrow])
                for wide, narrow in ((word.TALL_WIDE, word.TALL_NARROW), (word.SHORT_WIDE, word.SHORT_NARROW))
            )

            def tile(i: Any) -> None:
                row = e.mul(i, height)
                function = e.b.select(e.less(i, whole), tall, short)
                target = e.at(e.offset(out, e.mul(row, f[word.OUT_ROW])), column)
                columns = e.b.sub(f[word.COLUMNS], column)
                given = (
                    target,
                    f[word.OUT_ROW],
                    e.offset(self.left, e.mul(e.b.sub(i, begin), self.left_tile)),
                    e.index(self.left_row),
                    self.panel,
                    count,
                    columns,
                    adds,
                )
                e.call_address(function, *given)

            e.loop(begin, end, tile)

        e.loop(0, f[word.PANELS], panel)

    def _pack_left(self, f: dict, begin: Any, end: Any, first: Any, count: Any) -> None:
        """Copy a block's rows of the left side, tile by tile: rows far apart fall into few places of the cache."""
        e, word = self.e, OuterSum
        left, rows = self._left(f, first), f[word.ROWS]
        whole = e.b.sdiv(rows, e.index(TALLEST))
        piece = ir.VectorType(e.scalar, min(e.lanes, TALLEST))

        def line(k: Any) -> None:
            source, target = e.offset(left, e.mul(k, f[word.LEFT_ROW])), e.mul(k, self.left_row)

            def place(tile: Any) -> Any:
                return e.offset(self.left, e.add(target, e.mul(e.b.sub(tile, begin), self.left_tile)))

            def tile(i: Any) -> None:
                for n in range(0, TALLEST, piece.count):
                    number = e.add(e.mul(i, TALLEST), n)
                    value = e.b.load(e.at(source, number), align=e.number.size, typ=piece)
                    e.b.store(value, e.at(place(i), n), align=e.number.size)

            def single(row: Any) -> None:
                to = e.at(place(whole), e.b.sub(row, e.mul(whole, TALLEST)))
                e.b.store(e.number_at(e.at(source, row)), to)

            e.loop(begin, e.minimum_of(end, whole), tile)
            with e.b.if_then(e.less(whole, end)):
                e.loop(e.mul(whole, TALLEST), rows, single)

        e.loop(0, count, line)

    def _pack(self, f: dict, first: Any, count: Any, column: Any, vectors: Any) -> None:
        """Copy a block's rows of the right side, where it has any; columns past the end become zero."""
        e, word = self.e, OuterSum
        head, right = self._address(f[word.HEAD]), self._address(f[word.RIGHT])
        has_marks = e.b.icmp_signed("!=", f[word.MARKS], e.index(0))
        marks = self._address(e.b.select(has_marks, f[word.MARKS], f[word.HEAD]))

        def line(i: Any) -> None:
            k = e.add(first, i)
            behind = e.b.sub(k, f[word.HEAD_COUNT])
            in_head = e.less(behind, 0)
            place = e.b.select(
                in_head,
                e.offset(head, e.mul(k, f[word.HEAD_ROW])),
                e.offset(right, e.mul(behind, f[word.RIGHT_ROW])),
            )
            marked = e.marked(e.offset(marks, e.b.select(has_marks, k, e.index(0))))
            counts = e.b.not_(e.b.and_(has_marks, marked))

            def vector(v: Any) -> None:
                at = e.add(column, e.mul(v, e.lanes))
                left = e.b.select(counts, e.b.sub(f[word.COLUMNS], at), e.index(0))
                value = e.load(e.at(place, at), e.lanes_below(left))
                e.store(value, e.at(self.panel, e.mul(e.add(e.mul(i, vectors), v), e.lanes)))

            e.loop(0, vectors, vector)

        e.loop(0, count, line)

    # ---- columns

    def _columns(self, f: dict, first: Any, count: Any) -> None:
        """Add the block's rows, as they are, to the sums of this thread's columns."""
        e, word = self.e, OuterSum
        together = TOGETHER * e.lanes
        groups = e.b.sdiv(e.add(f[word.ROWS], together - 1), e.index(together))
        begin, end = self._range_of_part(groups)
        left, out = self._left(f, first), self._address(f[word.OUT])
        is_first = e.less(first, 1)

        def group(g: Any) -> None:
            column = e.mul(g, together)
            size = e.b.sub(f[word.ROWS], column)
            masks = [e.lanes_below(e.b.sub(size, e.index(v * e.lanes))) for v in range(TOGETHER)]

            def line(k: Any, *totals: Any) -> list[Any]:
                place = e.at(e.offset(left, e.mul(k, f[word.LEFT_ROW])), column)
                return [
                    e.b.fadd(total, e.load(e.at(place, v * e.lanes), masks[v]))
                    for v, total in enumerate(totals)
                ]

            totals = e.loop(0, count, line, [e.zero()] * TOGETHER)
            for v, total in enumerate(totals):
                place = e.at(e.at(out, column), v * e.lanes)
                known = e.select(is_first, e.zero(), e.load(place, masks[v]))
                e.store(e.b.fadd(known, total), place, masks[v])

        e.loop(begin, end, group)
