"""Expressions of what a step computes, pulled from its results back to what is known or multiplied.

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
from deeprnn.cells.tracing.blocks import ROWS, Block, Computed, Filled, Index, Known, Multiplied, Part, State
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.operations import batch_dimension, name_of
from deeprnn.cells.tracing.recording import Undescribable, where

Cut = tuple[int, Index]  # a state, and places that should be a part of it by themselves
MOST_PARTS = 16
"""of one state"""
COPIES = 8
"""of a number, from which on it is computed once, in a stage of its own, and sent to all units that read it"""


@dataclass
class Pulled:
    """The new states and the vectors that products multiply, as expressions."""

    columns: Columns
    pieces: list[tuple[Block, Index]] = field(default_factory=list)
    numbers: dict[tuple[int, bytes], int] = field(default_factory=dict)
    memo: dict[tuple[int, bytes], Expression] = field(default_factory=dict)
    written: list[Cut] = field(default_factory=list)  # parts of states that are computed in different ways
    read: list[Cut] = field(default_factory=list)  # parts of states that are read by themselves
    states: list[Expression] = field(default_factory=list)  # one for each part of a state
    vectors: dict[tuple[Multiplied, int], Expression] = field(
        default_factory=dict
    )  # by product and part of it

    def pull(self) -> None:
        """Pull everything."""
        for atom in self.columns.atoms:
            self._new_state(atom)
        pending = list(self.states)
        done: set[Block] = set()
        while pending:
            for node in in_order([pending.pop()]):
                if node.op != "product":
                    continue
                block = self.pieces[node.value[0]][0]  # type: ignore[index]
                assert isinstance(block, Multiplied)
                if block in done:
                    continue
                done.add(block)
                for i, part in enumerate(block.parts):
                    if not isinstance(part.block, State):
                        self.vectors[block, i] = self.expression(part.block, part.index)
                        pending.append(self.vectors[block, i])

    def _new_state(self, atom: State) -> None:
        node = self.columns.recording.new_states[atom.state]
        names = self.columns.names(node).expand(node.meta["shape"])
        numbers = (names // ROWS).numpy()
        if batch_dimension(names, ROWS) != 0 or (numbers != numbers[:1]).any():
            raise Undescribable(f"a new state mixes the rows of a batch{where(node)}")
        numbers = numbers[0][atom.places]
        groups = self.columns.grouped([numbers])
        if len(groups) > 1:
            for _, positions in groups:
                self.written.append((atom.state, atom.places[positions]))
        (block,), positions = groups[0]
        self.states.append(self.expression(block, numbers[positions] - block.start))

    def piece(self, kind: str, block: Block, index: Index) -> Expression:
        """A leaf for numbers of a block."""
        key = _key(block, index)
        if key not in self.numbers:
            self.numbers[key] = len(self.pieces)
            self.pieces.append((block, index))
        return leaf(kind, self.numbers[key])

    def expression(self, block: Block, index: Index) -> Expression:
        """Those numbers of a block as an expression of leaves."""
        waiting = [(block, index)]  # a list, for Python's own stack is soon full
        while waiting:
            own, places = waiting[-1]
            if self._repeats(own, places):
                waiting.pop()
                self.memo[_key(own, places)] = self._sent(own, places)
                continue
            operands = [(b, i[places]) for b, i in own.operands] if isinstance(own, Computed) else []
            unknown = [operand for operand in operands if _key(*operand) not in self.memo]
            if unknown:
                waiting += reversed(unknown)
                continue
            waiting.pop()
            if _key(own, places) not in self.memo:
                args = [self.memo[_key(*operand)] for operand in operands]
                self.memo[_key(own, places)] = self._expression(own, places, args)
        return self.memo[_key(block, index)]

    def _expression(self, block: Block, index: Index, args: list[Expression]) -> Expression:
        if isinstance(block, Filled):
            return constant(block.value)
        if isinstance(block, Known):
            return self.piece(block.kind, block, index)
        if isinstance(block, Multiplied):
            return self.piece("product", block, index)
        if isinstance(block, State):
            return self._state(block, index)
        assert isinstance(block, Computed)
        try:
            return block.build(*args)
        except NotImplementedError as error:
            raise Undescribable(f"{error}{where(block.node)}") from None
        except (ArithmeticError, ValueError) as error:  # of constants, such as a division by zero
            raise Undescribable(f"{name_of(block.node)}: {error}{where(block.node)}") from None

    def _repeats(self, block: Block, index: Index) -> TypeGuard[Computed | Multiplied]:
        """Whether a few numbers that depend on the state are read by many units: a mean, a gate for a whole head."""
        few = self.columns.narrow_stages and len(np.unique(index)) * COPIES <= len(index)
        return few and isinstance(block, (Computed, Multiplied)) and self._in_loop(block)

    def _in_loop(self, block: Block) -> bool:
        """Whether a block depends on the state."""
        waiting, seen = [block], set[Block]()
        while waiting:
            if (own := waiting.pop()) in seen:
                continue
            seen.add(own)
            if isinstance(own, (State, Multiplied)):
                return True
            waiting += [operand for operand, _ in own.operands] if isinstance(own, Computed) else []
        return False

    def _sent(self, block: Computed | Multiplied, index: Index) -> Expression:
        """Numbers of a block at many units each: a product with a matrix of zeros and ones sends them."""
        unique, places = np.unique(index, return_inverse=True)
        part = Part(block, unique, np.arange(len(unique)))
        return self._picked(part, places, len(unique), block.node)

    def _picked(self, part: Part, places: Index, width: int, node: fx.Node) -> Expression:
        """Those places of a part as a product with zeros and ones."""
        dtype = self.columns.recording.states[0].meta["dtype"]
        chooser = torch.zeros(len(places), width, dtype=dtype)
        chooser[torch.arange(len(places)), torch.from_numpy(places)] = 1.0
        moved = self.columns.add(Multiplied, len(places), [part], self.columns.constant(chooser), node)
        return self.piece("product", moved, np.arange(len(places)))

    def _state(self, atom: State, index: Index) -> Expression:
        if len(index) == atom.width and (index == np.arange(atom.width)).all():
            return leaf("state", self.columns.atoms.index(atom))
        if (np.diff(index) > 0).all() and len(index) < atom.width:
            self.read.append((atom.state, atom.places[index]))
        whole = np.arange(atom.width)
        node = self.columns.recording.states[atom.state]
        return self._picked(Part(atom, whole, whole), index, atom.width, node)


def _key(block: Block, index: Index) -> tuple[int, bytes]:
    return id(block), index.tobytes()


def pulled(read: Callable[[list[list[Index]]], Columns], states: Sequence[int]) -> Pulled:
    """Read a step with its states in as few parts as will do, and pull.

    A part that is computed in its own way has to be a state of its own. One that is only read by itself may be one too,
    where that does not lead to ever smaller parts; else a product fetches it.
    """
    whole = [[np.arange(n)] for n in states]
    first = _pull(read(whole))
    if not first.written and not first.read:
        return first
    finer = _pull(read(_cut(whole, [*first.written, *first.read])))
    if not finer.written and not finer.read:
        return finer
    cuts, found = whole, first
    while found.written:
        cuts = _cut(cuts, found.written)
        if max(map(len, cuts)) > MOST_PARTS:
            raise Undescribable(f"a state is computed in more than {MOST_PARTS} different ways")
        found = _pull(read(cuts))
    return found


def _pull(columns: Columns) -> Pulled:
    found = Pulled(columns)
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
