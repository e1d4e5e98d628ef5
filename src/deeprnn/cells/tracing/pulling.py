"""Expressions of what a step computes: its backward slice, from its results to what is known or multiplied.

Leaves are `state (k,)`, part k of the states; and, by the number of a piece (numbers of a block in some order):
`product`, `row` (from x), `fixed` (from parameters) and `drawn` (random).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
import torch
from torch import fx

from deeprnn.cells.expressions import Expression, constant, in_order, leaf
from deeprnn.cells.tracing.blocks import (
    ROWS,
    Block,
    Constant,
    Elementwise,
    Index,
    MatrixVector,
    Precomputed,
    State,
    VectorPart,
)
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.operations import batch_dimension, name_of
from deeprnn.cells.tracing.recording import Undescribable, where

Cut = tuple[int, Index]  # a state, and places that should be a part of it by themselves
MOST_PARTS = 16
"""of one state"""
COPIES = 8
"""of a number, from which on it is computed once, in a stage of its own, and sent to all units that read it"""


@dataclass
class StepExpressions:
    """The new states and the vectors that products multiply, as expressions."""

    columns: Columns
    pieces: list[tuple[Block, Index]] = field(default_factory=list)
    piece_ids: dict[tuple[int, bytes], int] = field(default_factory=dict)
    memo: dict[tuple[int, bytes], Expression] = field(default_factory=dict)
    cuts_by_write: list[Cut] = field(default_factory=list)
    """parts of states that are computed in different ways"""
    cuts_by_read: list[Cut] = field(default_factory=list)
    """parts of states that are read by themselves"""
    states: list[Expression] = field(default_factory=list)  # one for each part of a state
    vectors: dict[tuple[MatrixVector, int], Expression] = field(
        default_factory=dict
    )  # by product and part of it

    def pull(self) -> None:
        """Pull everything."""
        for state_part in self.columns.state_parts:
            self._new_state(state_part)
        pending = list(self.states)
        done: set[Block] = set()
        while pending:
            for node in in_order([pending.pop()]):
                if node.op != "product":
                    continue
                block = self.pieces[node.value[0]][0]  # type: ignore[index]
                assert isinstance(block, MatrixVector)
                if block in done:
                    continue
                done.add(block)
                for i, part in enumerate(block.parts):
                    if not isinstance(part.block, State):
                        self.vectors[block, i] = self.expression(part.block, part.index)
                        pending.append(self.vectors[block, i])

    def _new_state(self, state_part: State) -> None:
        node = self.columns.recording.new_states[state_part.state]
        names = self.columns.names(node).expand(node.meta["shape"])
        numbers = (names // ROWS).numpy()
        if batch_dimension(names, ROWS) != 0 or (numbers != numbers[:1]).any():
            raise Undescribable(f"a new state mixes the rows of a batch{where(node)}")
        numbers = numbers[0][state_part.places]
        groups = self.columns.grouped([numbers])
        if len(groups) > 1:
            for _, positions in groups:
                self.cuts_by_write.append((state_part.state, state_part.places[positions]))
        (block,), positions = groups[0]
        self.states.append(self.expression(block, numbers[positions] - block.start))

    def leaf_for(self, kind: str, block: Block, index: Index) -> Expression:
        """A leaf for numbers of a block."""
        key = _key(block, index)
        if key not in self.piece_ids:
            self.piece_ids[key] = len(self.pieces)
            self.pieces.append((block, index))
        return leaf(kind, self.piece_ids[key])

    def expression(self, block: Block, index: Index) -> Expression:
        """Those numbers of a block as an expression of leaves."""
        waiting = [(block, index)]  # a list, for Python's own stack is soon full
        while waiting:
            inner, places = waiting[-1]
            if self._repeats(inner, places):
                waiting.pop()
                self.memo[_key(inner, places)] = self._sent_to_units(inner, places)
                continue
            operands = [(b, i[places]) for b, i in inner.operands] if isinstance(inner, Elementwise) else []
            unknown = [operand for operand in operands if _key(*operand) not in self.memo]
            if unknown:
                waiting += reversed(unknown)
                continue
            waiting.pop()
            if _key(inner, places) not in self.memo:
                args = [self.memo[_key(*operand)] for operand in operands]
                self.memo[_key(inner, places)] = self._expression(inner, places, args)
        return self.memo[_key(block, index)]

    def _expression(self, block: Block, index: Index, args: list[Expression]) -> Expression:
        if isinstance(block, Constant):
            return constant(block.value)
        if isinstance(block, Precomputed):
            return self.leaf_for(block.kind, block, index)
        if isinstance(block, MatrixVector):
            return self.leaf_for("product", block, index)
        if isinstance(block, State):
            return self._state(block, index)
        assert isinstance(block, Elementwise)
        try:
            return block.build(*args)
        except NotImplementedError as error:
            raise Undescribable(f"{error}{where(block.node)}") from None
        except (ArithmeticError, ValueError) as error:  # of constants, such as a division by zero
            raise Undescribable(f"{name_of(block.node)}: {error}{where(block.node)}") from None

    def _repeats(self, block: Block, index: Index) -> TypeGuard[Elementwise | MatrixVector]:
        """Whether a few numbers that depend on the state are read by many units: a mean, a gate for a whole head."""
        few = self.columns.narrow_stages and len(np.unique(index)) * COPIES <= len(index)
        return few and isinstance(block, (Elementwise, MatrixVector)) and self._in_loop(block)

    def _in_loop(self, block: Block) -> bool:
        """Whether a block depends on the state."""
        waiting, seen = [block], set[Block]()
        while waiting:
            if (inner := waiting.pop()) in seen:
                continue
            seen.add(inner)
            if isinstance(inner, (State, MatrixVector)):
                return True
            waiting += [operand for operand, _ in inner.operands] if isinstance(inner, Elementwise) else []
        return False

    def _sent_to_units(self, block: Elementwise | MatrixVector, index: Index) -> Expression:
        """Numbers of a block at many units each: a product with a matrix of zeros and ones sends them."""
        unique, places = np.unique(index, return_inverse=True)
        part = VectorPart(block, unique, np.arange(len(unique)))
        return self._picked(part, places, len(unique), block.node)

    def _picked(self, part: VectorPart, places: Index, width: int, node: fx.Node) -> Expression:
        """Those places of a part as a product with zeros and ones."""
        dtype = self.columns.recording.states[0].meta["dtype"]
        chooser = torch.zeros(len(places), width, dtype=dtype)
        chooser[torch.arange(len(places)), torch.from_numpy(places)] = 1.0
        moved = self.columns.add(MatrixVector, len(places), [part], self.columns.constant(chooser), node)
        return self.leaf_for("product", moved, np.arange(len(places)))

    def _state(self, state_part: State, index: Index) -> Expression:
        if len(index) == state_part.width and (index == np.arange(state_part.width)).all():
            return leaf("state", self.columns.state_parts.index(state_part))
        if (np.diff(index) > 0).all() and len(index) < state_part.width:
            self.cuts_by_read.append((state_part.state, state_part.places[index]))
        whole = np.arange(state_part.width)
        node = self.columns.recording.states[state_part.state]
        return self._picked(VectorPart(state_part, whole, whole), index, state_part.width, node)


def _key(block: Block, index: Index) -> tuple[int, bytes]:
    return id(block), index.tobytes()


def pull_expressions(read: Callable[[list[list[Index]]], Columns], states: Sequence[int]) -> StepExpressions:
    """Read a step with its states in as few parts as will do, and pull.

    A part that is computed in its own way has to be a state of its own. One that is only read by itself may be one too,
    where that does not lead to ever smaller parts; else a product fetches it.
    """
    whole = [[np.arange(n)] for n in states]
    first = _pull_once(read(whole))
    if not first.cuts_by_write and not first.cuts_by_read:
        return first
    finer = _pull_once(read(_cut(whole, [*first.cuts_by_write, *first.cuts_by_read])))
    if not finer.cuts_by_write and not finer.cuts_by_read:
        return finer
    cuts, found = whole, first
    while found.cuts_by_write:
        cuts = _cut(cuts, found.cuts_by_write)
        if max(map(len, cuts)) > MOST_PARTS:
            raise Undescribable(f"a state is computed in more than {MOST_PARTS} different ways")
        found = _pull_once(read(cuts))
    return found


def _pull_once(columns: Columns) -> StepExpressions:
    found = StepExpressions(columns)
    found.pull()
    return found


def _cut(cuts: list[list[Index]], wanted: list[Cut]) -> list[list[Index]]:
    """States cut so that each of the wanted sets of places is made of whole parts."""
    new = [list(parts) for parts in cuts]
    for state, places in wanted:
        split = []
        for part in new[state]:
            inside = np.isin(part, places)
            split += [part[inside], part[~inside]] if inside.any() and not inside.all() else [part]
        new[state] = sorted(split, key=lambda part: part[0])
    return new
