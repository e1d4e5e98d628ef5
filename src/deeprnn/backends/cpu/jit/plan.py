"""A pass planned for a batch size and a number of threads: panels, row blocks, functions, as one table of words."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from deeprnn.backends.cpu.jit import machine, pointwise, tables, tiles
from deeprnn.backends.cpu.jit.lowering import LoweredStage, Operand, Pass, Term, View
from deeprnn.backends.cpu.jit.number import Number
from deeprnn.backends.cpu.jit.packing import packing
from deeprnn.backends.cpu.jit.tables import TALLEST, Word

WEIGHTS = Operand("weights")
"""packed weights: the last tensor of a call"""


TIMED = ("A", "input", "marks", "mask", "output", "saved", "gradient", "delta", "carry")
"""kinds of operands that have rows of their own in every step"""


class Panels(NamedTuple):
    """How the units of a stage are cut: `count` panels, the first `wide` one vector wider than `width`."""

    count: int
    width: int
    wide: int

    @classmethod
    def of(cls, vectors: int, parts: int, widest: int) -> Panels:
        """As few panels as fit, a multiple of `parts`, as equal as possible."""
        count = parts * -(-vectors // (parts * widest))
        return cls(count, vectors // count, vectors % count)

    @property
    def widths(self) -> list[int]:
        """The widths that occur."""
        return [w for w, n in ((self.width + 1, self.wide), (self.width, self.count - self.wide)) if w and n]


class Sharing(NamedTuple):
    """How the work of a call is shared."""

    batch: int
    parts: int = 1
    """threads"""
    by_columns: bool = False
    """whether threads share the units of every stage, else members and rows"""
    row_shares: int = 1
    unpacked: bool = False
    """whether matrices are read as they are"""

    @property
    def blocks(self) -> int:
        """Row blocks of a share."""
        return math.ceil(math.ceil(self.batch / self.row_shares) / TALLEST)

    @property
    def height(self) -> int:
        """Rows of a block; some blocks may be one row taller."""
        return max(1, self.batch // self.row_shares // self.blocks)

    @property
    def heights(self) -> list[int]:
        """The heights that occur, the taller first."""
        exact = self.batch % (self.row_shares * self.blocks) == 0
        return [self.height] if exact else [self.height + 1, self.height]


class Strides(NamedTuple):
    """Bytes from step to step and from row to row of an operand."""

    time: int
    row: int


class Planned:
    """The table of a plan, and what a call has to bring along."""

    def __init__(
        self,
        work: Pass,
        number: Number,
        sharing: Sharing,
        absent: frozenset[Operand],
        timeless: frozenset[Operand],
    ):
        self.work, self.number, self.sharing = work, number, sharing
        self.absent, self.timeless = absent, timeless
        self.lanes = machine.machine().vector_bytes // number.size
        self.tensors = {operand: i for i, operand in enumerate((*work.operands, WEIGHTS))}
        self.widest = 1 if sharing.unpacked else tiles.widest_panel(max(sharing.heights))
        self.counter = tables.Call.size() + 2 * len(self.tensors) + 16
        """word of a call in which threads count: a cache line away from the addresses, which all of them read"""
        self.call_words = self.counter + 16
        self.weights_size = 0
        """numbers"""
        self.words = _Table()
        self._write()

        self.table = (ctypes.c_int64 * len(self.words.words))(*self.words.words)
        """the words in memory, where machine code reads them"""
        self._call = ctypes.c_int64 * self.call_words
        self.weights_bytes = self.weights_size * number.size
        """packed weights of one member"""

    def new_call(self) -> Any:
        """A call's table, its tensors and numbers still to be filled in."""
        call = self._call()
        call[tables.Call.PLAN] = ctypes.addressof(self.table)
        return call

    def _write(self) -> None:
        header = self.words.reserve(tables.Plan.size())
        stages = (*self.work.stages, *self.work.final)
        views = [view for stage in stages for view in stage.views]
        sums = [terms for stage in stages for terms in stage.sums]
        most_sums = max(len(stage.sums) for stage in stages)
        tile_bytes = max(self.sharing.heights) * self.widest * self.lanes * self.number.size
        first_views = [sum(len(s.views) for s in stages[:i]) for i in range(len(stages))]
        packings: list[list[int]] = []
        rows = [self._stage(s, v, packings) for s, v in zip(stages, first_views, strict=True)]
        word = tables.Plan
        self.words.fill(
            header,
            {
                word.TENSORS: len(self.tensors),
                word.COUNTER: self.counter,
                word.VIEWS: self.words.append([self._view(view) for view in views]),
                word.VIEW_COUNT: len(views),
                word.STAGES: self.words.append(rows),
                word.STAGE_COUNT: len(self.work.stages),
                word.FINAL_COUNT: len(self.work.final),
                word.PACKINGS: self.words.append(packings),
                word.PACKING_COUNT: len(packings),
                word.REVERSE: int(self.work.backward),
                word.PARTS: self.sharing.parts,
                word.BY_COLUMNS: int(self.sharing.by_columns),
                word.BATCH: self.sharing.batch,
                word.ROW_SHARES: self.sharing.row_shares,
                word.BLOCKS: self.sharing.blocks,
                word.LANES: self.lanes,
                word.HEIGHT: self.sharing.height,
                word.TILE_BYTES: tile_bytes,
                word.SCRATCH_BYTES: tile_bytes * most_sums,
                word.MOST_TERMS: max(map(len, sums), default=0),
                word.UNPACKED: int(self.sharing.unpacked),
                word.WEIGHTS: self.tensors[WEIGHTS],
                word.ZEROS: self.tensors[Operand("zeros")],
            },
        )

    # ---- where tensors lie

    def strides(self, operand: Operand) -> Strides:
        """Of a tensor as a call brings it: contiguous, with time first, then rows."""
        if operand in self.absent or operand.kind in ("vector", "bias"):
            return Strides(0, 0)
        row = 1 if operand.kind == "marks" else operand.width * self.number.size
        timed = operand.kind in TIMED
        return Strides(row * self.sharing.batch if timed and operand not in self.timeless else 0, row)

    def _view(self, view: View) -> list[int]:
        operand = view.operand
        time, row = self.strides(operand)
        outside = -1 if view.outside is None else self.tensors[view.outside]
        if not time:
            outside = self.tensors[operand]
        word = tables.View
        return _entry(
            word,
            {
                word.TENSOR: self.tensors[operand],
                word.OFFSET: view.column * self.number.size,
                word.TIME: time,
                word.ROW: row,
                word.SHIFT: view.shift,
                word.RING: int(operand.kind == "carry"),
                word.OUTSIDE: outside,
            },
        )

    # ---- stages

    def _stage(self, stage: LoweredStage, first_view: int, packings: list[list[int]]) -> list[int]:
        panels = Panels.of(-(-stage.size // self.lanes), self._column_parts, self.widest)
        sums = [self._sum(stage, terms, panels, packings) for terms in stage.sums]
        word = tables.Stage
        functions = self._functions(panels) if stage.sums else {}
        return _entry(
            word,
            {
                word.SIZE: stage.size,
                word.VIEWS: first_view,
                word.PANELS: panels.count // self._column_parts,
                word.WIDTH: panels.width,
                word.WIDE: panels.wide,
                word.POINTWISE: pointwise.function(stage.pointwise, self.number),
                word.BARRIER: int(stage.travels),
                word.SUMS: self.words.append(sums),
                word.SUM_COUNT: len(sums),
                **{kind: functions.get(kind, 0) for kind in list(word)[word.TALL_WIDE :]},
            },
        )

    @property
    def _column_parts(self) -> int:
        return self.sharing.parts if self.sharing.by_columns else 1

    def _functions(self, panels: Panels) -> dict[tables.Stage, int]:
        """The functions for tiles, by height and width."""
        kinds = tables.Stage
        heights = [self.sharing.height + 1, self.sharing.height]
        names = [(kinds.TALL_WIDE, kinds.TALL_NARROW), (kinds.SHORT_WIDE, kinds.SHORT_NARROW)]
        made = {}
        for rows, row in zip(heights, names, strict=True):
            for vectors, kind in zip((panels.width + 1, panels.width), row, strict=True):
                if rows in self.sharing.heights and vectors in panels.widths:
                    made[kind] = self._tile(rows, vectors)
        return made

    def _tile(self, rows: int, vectors: int) -> int:
        if self.sharing.unpacked:
            return tiles.unpacked_tile(self.number, rows)
        return tiles.packed_tile(self.number, rows, vectors)

    def _sum(
        self, stage: LoweredStage, terms: Sequence[Term], panels: Panels, packings: list[list[int]]
    ) -> list[int]:
        depth, start = sum(term.depth for term in terms), self.weights_size
        word, above = tables.Sum, 0
        if not self.sharing.unpacked:
            self.weights_size += depth * -(-stage.size // self.lanes) * self.lanes
            for term in terms:
                packings.append(self._packing(stage, term, panels, start, above, depth))
                above += term.depth
        return _entry(
            word,
            {
                word.WEIGHTS: start * self.number.size,
                word.DEPTH: depth,
                word.TERMS: self.words.append([self._term(term) for term in terms]),
                word.TERM_COUNT: len(terms),
            },
        )

    def _place(self, term: Term) -> tuple[int, int]:
        """Where a term's part of its matrix begins, and the distance from unit to unit."""
        row = term.matrix.width * self.number.size
        return term.row * row + term.column * self.number.size, term.unit_step * row

    def _term(self, term: Term) -> list[int]:
        word = tables.Term
        offset, stride = self._place(term)
        return _entry(
            word,
            {
                word.VIEW: term.view,
                word.MARKS: -1 if term.marks is None else term.marks,
                word.DEPTH: term.depth,
                word.MATRIX: self.tensors[term.matrix],
                word.OFFSET: offset,
                word.STRIDE: stride,
            },
        )

    def _packing(
        self, stage: LoweredStage, term: Term, panels: Panels, start: int, above: int, depth: int
    ) -> list[int]:
        word = tables.Packing
        offset, stride = self._place(term)
        return _entry(
            word,
            {
                word.FUNCTION: packing(self.number, transposed=not self.work.backward),
                word.MATRIX: self.tensors[term.matrix],
                word.OFFSET: offset,
                word.STRIDE: stride,
                word.TARGET: start * self.number.size,
                word.SIZE: stage.size,
                word.PANELS: panels.count,
                word.WIDTH: panels.width,
                word.WIDE: panels.wide,
                word.DEPTH: term.depth,
                word.ABOVE: above,
                word.SUM_DEPTH: depth,
            },
        )


class _Table:
    """Words, section after section."""

    def __init__(self) -> None:
        self.words: list[int] = []

    def reserve(self, count: int) -> int:
        """Room to be filled later; its offset."""
        self.words += [0] * count
        return len(self.words) - count

    def append(self, entries: Sequence[Sequence[int]]) -> int:
        """A section; its offset."""
        start = len(self.words)
        for entry in entries:
            self.words += entry
        return start

    def fill(self, start: int, fields: dict[Any, int]) -> None:
        """Words by their names."""
        for word, value in fields.items():
            self.words[start + word] = value


def _entry(kind: type[Word], fields: dict[Any, int]) -> list[int]:
    """An entry of a table; every word has to be given."""
    if set(fields) != set(kind):
        raise KeyError(f"{kind.__name__} needs {set(kind) ^ set(fields)}")
    return [fields[word] for word in kind]
