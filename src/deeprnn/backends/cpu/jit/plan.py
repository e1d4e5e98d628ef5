"""A pass planned for a batch size and a number of threads: panels, row blocks, functions, as one table of words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from deeprnn.backends.cpu.jit import machine, pointwise, tables, tiles
from deeprnn.backends.cpu.jit.lowering import LoweredStage, Operand, Pass, ProductTerm, StepRows
from deeprnn.backends.cpu.jit.number import Number
from deeprnn.backends.cpu.jit.packing import packing
from deeprnn.backends.cpu.jit.sharing import WorkSplit
from deeprnn.backends.cpu.jit.tables import Word

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


class Strides(NamedTuple):
    """Bytes from step to step and from row to row of an operand."""

    time: int
    row: int


class PassPlan:
    """The table of a plan, and what a call has to bring along."""

    def __init__(
        self,
        pass_: Pass,
        number: Number,
        split: WorkSplit,
        absent: frozenset[Operand],
        per_sequence: frozenset[Operand],
    ):
        self.pass_, self.number, self.split = pass_, number, split
        self.absent, self.per_sequence = absent, per_sequence
        self.lanes = machine.machine().vector_bytes // number.size
        self.tensors = {operand: i for i, operand in enumerate((*pass_.operands, WEIGHTS))}
        self.widest = 1 if split.unpacked else tiles.widest_panel(max(split.heights))
        self.counter = tables.Call.size() + 2 * len(self.tensors) + 16
        """word of a call in which threads count: a cache line away from the addresses, which all of them read"""
        self.call_words = self.counter + 16
        self.weights_size = 0
        """numbers"""
        self.builder = _WordBuilder()
        self._write()

        self.memory = (ctypes.c_int64 * len(self.builder.words))(*self.builder.words)
        """the words in memory, where machine code reads them"""
        self._call = ctypes.c_int64 * self.call_words
        self.weights_bytes = self.weights_size * number.size
        """packed weights of one member"""

    def new_call(self) -> Any:
        """A call's table, its tensors and numbers still to be filled in."""
        call = self._call()
        call[tables.Call.PLAN] = ctypes.addressof(self.memory)
        return call

    def _write(self) -> None:
        header = self.builder.reserve(tables.Plan.size())
        stages = (*self.pass_.stages, *self.pass_.final)
        views = [view for stage in stages for view in stage.views]
        sums = [terms for stage in stages for terms in stage.sums]
        most_sums = max(len(stage.sums) for stage in stages)
        tile_bytes = max(self.split.heights) * self.widest * self.lanes * self.number.size
        first_views = [sum(len(s.views) for s in stages[:i]) for i in range(len(stages))]
        packings: list[list[int]] = []
        rows = [self._stage(s, v, packings) for s, v in zip(stages, first_views, strict=True)]
        word = tables.Plan
        self.builder.fill(
            header,
            {
                word.TENSORS: len(self.tensors),
                word.COUNTER: self.counter,
                word.VIEWS: self.builder.append([self._view(view) for view in views]),
                word.VIEW_COUNT: len(views),
                word.STAGES: self.builder.append(rows),
                word.STAGE_COUNT: len(self.pass_.stages),
                word.FINAL_COUNT: len(self.pass_.final),
                word.PACKINGS: self.builder.append(packings),
                word.PACKING_COUNT: len(packings),
                word.REVERSE: int(self.pass_.backward),
                word.PARTS: self.split.parts,
                word.BY_COLUMNS: int(self.split.by_columns),
                word.BATCH: self.split.batch,
                word.ROW_PARTS: self.split.row_parts,
                word.BLOCKS: self.split.blocks,
                word.LANES: self.lanes,
                word.HEIGHT: self.split.height,
                word.TILE_BYTES: tile_bytes,
                word.SCRATCH_BYTES: tile_bytes * most_sums,
                word.MOST_TERMS: max(map(len, sums), default=0),
                word.UNPACKED: int(self.split.unpacked),
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
        return Strides(row * self.split.batch if timed and operand not in self.per_sequence else 0, row)

    def _view(self, view: StepRows) -> list[int]:
        operand = view.operand
        time, row = self.strides(operand)
        boundary = -1 if view.boundary is None else self.tensors[view.boundary]
        if not time:
            boundary = self.tensors[operand]
        word = tables.View
        return _entry(
            word,
            {
                word.TENSOR: self.tensors[operand],
                word.OFFSET: view.column * self.number.size,
                word.TIME: time,
                word.ROW: row,
                word.SHIFT: view.shift,
                word.DOUBLE_BUFFERED: int(operand.kind == "carry"),
                word.BOUNDARY: boundary,
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
                word.SUMS: self.builder.append(sums),
                word.SUM_COUNT: len(sums),
                **{kind: functions.get(kind, 0) for kind in list(word)[word.TALL_WIDE :]},
            },
        )

    @property
    def _column_parts(self) -> int:
        return self.split.parts if self.split.by_columns else 1

    def _functions(self, panels: Panels) -> dict[tables.Stage, int]:
        """The functions for tiles, by height and width."""
        kinds = tables.Stage
        heights = [self.split.height + 1, self.split.height]
        names = [(kinds.TALL_WIDE, kinds.TALL_NARROW), (kinds.SHORT_WIDE, kinds.SHORT_NARROW)]
        made = {}
        for rows, row in zip(heights, names, strict=True):
            for vectors, kind in zip((panels.width + 1, panels.width), row, strict=True):
                if rows in self.split.heights and vectors in panels.widths:
                    made[kind] = self._tile(rows, vectors)
        return made

    def _tile(self, rows: int, vectors: int) -> int:
        if self.split.unpacked:
            return tiles.unpacked_tile(self.number, rows)
        return tiles.packed_tile(self.number, rows, vectors)

    def _sum(
        self, stage: LoweredStage, terms: Sequence[ProductTerm], panels: Panels, packings: list[list[int]]
    ) -> list[int]:
        depth, start = sum(term.depth for term in terms), self.weights_size
        word, above = tables.Sum, 0
        if not self.split.unpacked:
            self.weights_size += depth * -(-stage.size // self.lanes) * self.lanes
            for term in terms:
                packings.append(self._packing(stage, term, panels, start, above, depth))
                above += term.depth
        return _entry(
            word,
            {
                word.WEIGHTS: start * self.number.size,
                word.DEPTH: depth,
                word.TERMS: self.builder.append([self._term(term) for term in terms]),
                word.TERM_COUNT: len(terms),
            },
        )

    def _place(self, term: ProductTerm) -> tuple[int, int]:
        """Where a term's part of its matrix begins, and the distance from unit to unit."""
        row = term.matrix.width * self.number.size
        return term.row * row + term.column * self.number.size, term.unit_step * row

    def _term(self, term: ProductTerm) -> list[int]:
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
        self, stage: LoweredStage, term: ProductTerm, panels: Panels, start: int, above: int, depth: int
    ) -> list[int]:
        word = tables.Packing
        offset, stride = self._place(term)
        return _entry(
            word,
            {
                word.FUNCTION: packing(self.number, transposed=not self.pass_.backward),
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


class _WordBuilder:
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
