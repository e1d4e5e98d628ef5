"""The loop over time: for each step and stage, tiles of sums and the pointwise code behind them. One for all cells.

Threads share rows of the batch and members of a population, or the panels of every stage, with a barrier after each
stage that others read. What is done, and where everything lies, stands in the tables of `tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from deeprnn.backends.cpu.jit import machine, packing, pointwise, tiles
from deeprnn.backends.cpu.jit.builder import I8, I32, I64, POINTER, Builder
from deeprnn.backends.cpu.jit.tables import BoundView, Call, Packing, Plan, Stage, Sum, Term, TileTerm, View


@lru_cache(maxsize=4)
def run(vector_bytes: int) -> int:
    """The address of `run(call, part)`: the share of one thread."""
    return machine.address("run", vector_bytes, lambda name: _ExecutorWriter(name, vector_bytes).text)


@lru_cache(maxsize=1)
def region() -> int:
    """The address of `region(call)`, the body of an OpenMP region: all threads run their shares, or none does."""
    return machine.address("region", "", _region)


def _region(name: str) -> str:
    e = Builder(name, [POINTER])
    (call,) = e.arguments
    threads = e.call_address(e.word(call, Call.THREAD_COUNT), result=I32)
    complete = e.b.icmp_signed("==", e.b.sext(threads, I64), e.word(call, Call.PARTS))
    with e.b.if_else(complete) as (all_there, missing):
        with all_there:
            number = e.call_address(e.word(call, Call.THREAD_NUMBER), result=I32)
            e.call_address(e.word(call, Call.WORKER), call, e.b.sext(number, I64))
        with missing:
            e.b.store(e.index(1), e.word_at(call, Call.THREADS_MISSING))
    e.b.ret_void()
    return e.text


class _ExecutorWriter:
    """Writes `run`."""

    def __init__(self, name: str, vector_bytes: int):
        self.vector_bytes = vector_bytes
        self.e = e = Builder(name, [POINTER, I64])
        self.call, self.part = e.arguments
        self.plan = e.pointer(self.call, Call.PLAN)
        self.steps = e.word(self.call, Call.STEPS)
        self.views = self.section(Plan.VIEWS)
        self.barrier_target = e.stack(I64, 1)
        e.b.store(e.index(0), self.barrier_target)
        self.tensors = e.stack(I64, self.field(Plan.TENSORS))
        self.current = e.stack(I64, self.field(Plan.VIEW_COUNT))
        self.bound = e.stack(I64, e.mul(self.field(Plan.VIEW_COUNT), BoundView.size()))
        self.terms = e.stack(I64, e.mul(self.field(Plan.MOST_TERMS), tiles.TERM_WORDS))
        self.scratch = e.stack(I8, self.field(Plan.SCRATCH_BYTES), align=64)
        self.shared = e.less(1, self.field(Plan.PARTS))
        self._each_member(self._pack)
        self._barrier()
        self._each_job()
        e.b.ret_void()
        self.text = e.text

    # ---- tables

    def field(self, word: Plan) -> Any:
        return self.e.word(self.plan, word)

    def section(self, word: Plan) -> Any:
        """Where a section of the plan begins."""
        return self.e.word_at(self.plan, self.field(word))

    def entry(self, table: Any, number: Any, kind: type) -> Any:
        """An entry of a section."""
        return self.e.word_at(table, self.e.mul(number, kind.size()))

    def tensor(self, number: Any) -> Any:
        return self.e.pointer(self.tensors, number)

    # ---- threads

    def _barrier(self) -> None:
        """Wait for the other threads, where there are any."""
        e = self.e
        with e.b.if_then(self.shared):
            barrier_target = e.add(e.b.load(self.barrier_target, typ=I64), self.field(Plan.PARTS))
            e.b.store(barrier_target, self.barrier_target)
            e.barrier(e.word_at(self.call, self.field(Plan.COUNTER)), barrier_target)

    def _each_member(self, body: Callable[[], None]) -> None:
        def member(number: Any) -> None:
            self._bind(number)
            body()

        self.e.loop(0, self.e.word(self.call, Call.MEMBERS), member)

    def _bind(self, member: Any) -> None:
        """Addresses of a member's tensors."""
        e, count = self.e, self.field(Plan.TENSORS)

        def one(i: Any) -> None:
            base = e.word(self.call, e.add(i, Call.size()))
            distance = e.word(self.call, e.add(i, Call.size(), count))
            e.b.store(e.add(base, e.mul(member, distance)), e.word_at(self.tensors, i))

        e.loop(0, count, one)
        e.loop(0, self.field(Plan.VIEW_COUNT), self._bind_view)

    def _bind_view(self, i: Any) -> None:
        e = self.e
        entry, bound = self.entry(self.views, i, View), self.entry(self.bound, i, BoundView)
        ring = e.b.icmp_signed("!=", e.word(entry, View.DOUBLE_BUFFERED), e.index(0))
        outside = e.word(entry, View.BOUNDARY)
        exists = e.less(-1, outside)
        address = e.word(self.tensors, e.b.select(exists, outside, e.index(0)))
        words = {
            BoundView.BASE: e.add(
                e.word(self.tensors, e.word(entry, View.TENSOR)), e.word(entry, View.OFFSET)
            ),
            BoundView.TIME: e.word(entry, View.TIME),
            BoundView.SHIFT: e.word(entry, View.SHIFT),
            BoundView.STEP_MASK: e.b.select(ring, e.index(1), e.index(-1)),
            BoundView.STEPS: e.b.select(ring, e.index(2), self.steps),
            BoundView.BOUNDARY: e.b.select(exists, address, e.index(0)),
        }
        for word, value in words.items():
            e.b.store(value, e.word_at(bound, word))

    def _range_of_part(self, count: Any) -> tuple[Any, Any]:
        """This thread's part of so many things."""
        e, parts = self.e, self.field(Plan.PARTS)
        first = e.b.sdiv(e.mul(self.part, count), parts)
        return first, e.b.sdiv(e.mul(e.add(self.part, 1), count), parts)

    def _pack(self) -> None:
        e, table = self.e, self.section(Plan.PACKINGS)

        def one(i: Any) -> None:
            entry = self.entry(table, i, Packing)
            first, last = self._range_of_part(e.word(entry, Packing.PANELS))
            matrix, packed = self.tensor(e.word(entry, Packing.MATRIX)), self.tensor(self.field(Plan.WEIGHTS))
            self._invoke(
                packing.ARGUMENTS, e.word(entry, Packing.FUNCTION), matrix, packed, entry, first, last
            )

        e.loop(0, self.field(Plan.PACKING_COUNT), one)

    def _invoke(self, kinds: tuple, address: Any, *arguments: Any) -> None:
        assert [a.type for a in arguments] == list(kinds)
        self.e.call_address(address, *arguments)

    def _each_job(self) -> None:
        """A job is a member and a share of its rows; by columns every thread takes part in each."""
        e = self.e
        shares, batch = self.field(Plan.ROW_PARTS), self.field(Plan.BATCH)
        by_columns = e.b.icmp_signed("!=", self.field(Plan.BY_COLUMNS), e.index(0))
        first = e.b.select(by_columns, e.index(0), self.part)
        stride = e.b.select(by_columns, e.index(1), self.field(Plan.PARTS))

        def job(number: Any) -> None:
            self._bind(e.b.sdiv(number, shares))
            share = e.b.srem(number, shares)
            row = e.b.sdiv(e.mul(share, batch), shares)
            rows = e.b.sub(e.b.sdiv(e.mul(e.add(share, 1), batch), shares), row)
            tall = e.b.sub(rows, e.mul(self.field(Plan.BLOCKS), self.field(Plan.HEIGHT)))
            self._each_step(row, tall, by_columns)

        e.loop(first, e.mul(e.word(self.call, Call.MEMBERS), shares), job, step=stride)

    # ---- steps and stages

    def _each_step(self, row: Any, tall: Any, by_columns: Any) -> None:
        """Every step, in one direction or the other, and the final stages as step -1."""
        e = self.e
        stages, final = self.field(Plan.STAGE_COUNT), self.field(Plan.FINAL_COUNT)
        backwards = e.b.icmp_signed("!=", self.field(Plan.REVERSE), e.index(0))
        last = e.add(self.steps, -1)

        def step(i: Any) -> None:
            over = e.b.icmp_signed("==", i, self.steps)
            t = e.b.select(backwards, e.b.sub(last, i), i)
            self._look_up_views(t)
            begin = e.b.select(over, stages, e.index(0))
            end = e.b.select(over, e.add(stages, final), stages)
            e.loop(begin, end, lambda s: self._stage(s, row, tall, by_columns))

        e.loop(0, e.add(self.steps, e.minimum_of(final, 1)), step)

    def _look_up_views(self, t: Any) -> None:
        """Where this step's rows of every view begin."""
        e = self.e

        def one(i: Any) -> None:
            view = self.entry(self.bound, i, BoundView)
            u = e.b.and_(e.add(t, e.word(view, BoundView.SHIFT)), e.word(view, BoundView.STEP_MASK))
            inside = e.b.icmp_unsigned("<", u, e.word(view, BoundView.STEPS))
            address = e.add(e.word(view, BoundView.BASE), e.mul(u, e.word(view, BoundView.TIME)))
            e.b.store(
                e.b.select(inside, address, e.word(view, BoundView.BOUNDARY)), e.word_at(self.current, i)
            )

        e.loop(0, self.field(Plan.VIEW_COUNT), one)

    def _stage(self, number: Any, row: Any, tall: Any, by_columns: Any) -> None:
        e = self.e
        stage = self.entry(self.section(Plan.STAGES), number, Stage)
        panels, width, wide = (e.word(stage, word) for word in (Stage.PANELS, Stage.WIDTH, Stage.WIDE))
        first = e.mul(e.b.select(by_columns, self.part, e.index(0)), panels)
        height, blocks = self.field(Plan.HEIGHT), self.field(Plan.BLOCKS)

        def panel(p: Any) -> None:
            is_wide = e.less(p, wide)
            vectors = e.add(width, e.b.zext(is_wide, I64))
            start = e.add(e.mul(p, width), e.minimum_of(p, wide))
            narrow = e.b.zext(e.b.not_(is_wide), I64)
            kinds = [e.word(stage, e.add(kind, narrow)) for kind in (Stage.TALL_WIDE, Stage.SHORT_WIDE)]

            def block(i: Any, r: Any) -> list[Any]:
                is_tall = e.less(i, tall)
                rows = e.add(height, e.b.zext(is_tall, I64))
                self._tile(stage, r, rows, start, vectors, e.b.select(is_tall, *kinds))
                return [e.add(r, rows)]

            with e.b.if_then(e.less(0, vectors)):
                e.loop(0, blocks, block, [row])

        e.loop(first, e.add(first, panels), panel)
        waits = e.b.icmp_signed("!=", e.word(stage, Stage.BARRIER), e.index(0))
        with e.b.if_then(e.b.and_(waits, by_columns)):
            self._barrier()

    # ---- tiles

    def _tile(self, stage: Any, row: Any, rows: Any, start: Any, vectors: Any, function: Any) -> None:
        """The sums of one tile, then the pointwise code."""
        e = self.e
        size, tile_bytes = e.word(stage, Stage.SIZE), self.field(Plan.TILE_BYTES)
        first_view = e.word(stage, Stage.VIEWS)
        views = self.entry(self.views, first_view, View)
        current = e.word_at(self.current, first_view)
        sums = e.word_at(self.plan, e.word(stage, Stage.SUMS))

        def one(i: Any) -> None:
            entry = self.entry(sums, i, Sum)
            count = self._terms(entry, current, views, row, rows, start, vectors)
            out = e.offset(self.scratch, e.mul(i, tile_bytes))
            self._invoke(tiles.ARGUMENTS, function, out, self.terms, count, e.b.sub(size, self._unit(start)))

        e.loop(0, e.word(stage, Stage.SUM_COUNT), one)
        area = (row, rows, self._unit(start), size, vectors)
        code = e.word(stage, Stage.POINTWISE)
        self._invoke(pointwise.ARGUMENTS, code, current, views, *area, self.scratch, tile_bytes)

    def _unit(self, vector: Any) -> Any:
        return self.e.mul(vector, self.field(Plan.LANES))

    def _terms(
        self, entry: Any, current: Any, views: Any, row: Any, rows: Any, start: Any, vectors: Any
    ) -> Any:
        """Fill in the terms of a sum for one tile; how many there are. A term without a vector is left out."""
        e = self.e
        table = e.word_at(self.plan, e.word(entry, Sum.TERMS))
        packed = e.offset(self.tensor(self.field(Plan.WEIGHTS)), e.word(entry, Sum.WEIGHTS))
        packed = e.offset(packed, e.mul(e.mul(start, e.word(entry, Sum.DEPTH)), self.vector_bytes))
        unpacked = e.b.icmp_signed("!=", self.field(Plan.UNPACKED), e.index(0))

        def one(i: Any, weights: Any, count: Any) -> list[Any]:
            term = self.entry(table, i, Term)
            depth, number = e.word(term, Term.DEPTH), e.word(term, Term.VIEW)
            vector = e.pointer(current, number)
            stride = e.word(term, Term.STRIDE)
            matrix = e.offset(self.tensor(e.word(term, Term.MATRIX)), e.word(term, Term.OFFSET))
            matrix = e.offset(matrix, e.mul(self._unit(start), stride))
            target = e.word_at(self.terms, e.mul(count, tiles.TERM_WORDS))
            e.b.store(depth, e.word_at(target, TileTerm.DEPTH))
            e.b.store(e.b.select(unpacked, matrix, weights), e.word_at(target, TileTerm.WEIGHTS))
            e.b.store(stride, e.word_at(target, TileTerm.STRIDE))
            exists = e.b.icmp_unsigned("!=", e.b.ptrtoint(vector, I64), e.index(0))
            with e.b.if_then(exists):
                row_stride = e.word(self.entry(views, number, View), View.ROW)
                self._rows(
                    e.word_at(target, TileTerm.ROWS), vector, row_stride, term, current, views, row, rows
                )
            further = e.offset(weights, e.mul(e.mul(depth, vectors), self.vector_bytes))
            return [further, e.add(count, e.b.zext(exists, I64))]

        return e.loop(0, e.word(entry, Sum.TERM_COUNT), one, [packed, e.index(0)])[1]

    def _rows(self, target, vector, stride, term, current, views, row, rows) -> None:
        """Addresses of a vector's rows; a row that is reset reads zeros."""
        e = self.e
        number = e.word(term, Term.MARKS)
        has_marks = e.less(-1, number)
        zeros = self.tensor(self.field(Plan.ZEROS))
        place = e.b.select(has_marks, number, e.index(0))
        marks = e.b.select(has_marks, e.pointer(current, place), zeros)
        mark_stride = e.word(self.entry(views, place, View), View.ROW)
        mark_stride = e.b.select(has_marks, mark_stride, e.index(0))

        def one(r: Any) -> None:
            b = e.add(row, r)
            reset = e.marked(e.offset(marks, e.mul(b, mark_stride)))
            address = e.b.select(reset, zeros, e.offset(vector, e.mul(b, stride)))
            e.b.store(address, e.word_at(target, r))

        e.loop(0, rows, one)
