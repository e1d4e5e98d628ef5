"""All gradients of a cell's weights on Hopper's tensor cores, as accurate as fp32: sums over the rows of delta at once.

Σ δᵀ v for every product of the loop and, where the input's product is taken in one with the loop, Σ δᵀ x and Σ δ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends.call import Inputs
from deeprnn.backends.cuda.device import hopper
from deeprnn.backends.cuda.gemm.outer_products import (
    MOST_COLUMNS,
    MOST_MATRICES,
    MOST_OUTS,
    MOST_TILES,
    TILES,
    Left,
    OuterProducts,
    SumBlock,
    Target,
)
from deeprnn.backends.gradients import merged_products
from deeprnn.cells.adjoint import Adjoint
from deeprnn.cells.description import Vector

FEWEST_ROWS = 768  # below, the launches cost more than the arithmetic saved
FEWEST_COLUMNS = 64  # of a stage


def serves(adjoint: Adjoint, delta: Tensor, members: int) -> bool:
    """Whether the sums over these rows should be taken this way: large, fp32, on Hopper."""
    rows = delta.shape[-3] * delta.shape[-2]
    if delta.dtype != torch.float32 or rows * members < FEWEST_ROWS or rows < 128 or not hopper(delta.device):
        return False
    return fits(adjoint, rows)


def fits(adjoint: Adjoint, rows: int) -> bool:
    """Whether the kernel's tables hold the cell's tiles and sums, and it can count the rows."""
    cell, products = adjoint.cell, merged_products(adjoint)
    if (
        min(stage.size for stage in cell.stages) < FEWEST_COLUMNS
        or adjoint.width % 4
        or rows >= 2**31 - 2**16
    ):
        return False
    vectors = {p.vector for p in products}
    if len(vectors) + 3 > MOST_MATRICES or len(products) + 2 > MOST_OUTS:
        return False
    tiles = sum(-(-p.width // max(TILES)) * (-(-cell.size_of(p.vector) // 128) + 1) for p in products)
    tiles += 3 * -(-adjoint.width // max(TILES))  # of the input and of ones
    return tiles <= MOST_TILES and _columns(adjoint) < MOST_COLUMNS


def _columns(adjoint: Adjoint) -> int:
    """Columns of both sides, at most."""
    vectors = {p.vector for p in merged_products(adjoint)}
    return sum(adjoint.cell.size_of(v) for v in vectors) + adjoint.width + 1024


@lru_cache(maxsize=256)
def _layout(
    adjoint: Adjoint, input_width: int, with_bias: bool
) -> tuple[tuple[Vector, ...], tuple[SumBlock, ...], int]:
    """The vectors of the left side, the sums wanted, and how many of those are the loop's products."""
    cell = adjoint.cell
    vectors = tuple(dict.fromkeys(p.vector for p in merged_products(adjoint)))
    # States first: they are wanted for many columns. Then the input and ones, for all of A's.
    vectors = tuple(sorted(vectors, key=lambda v: v.kind != "state"))
    starts, at = {}, 0
    blocks, input_blocks = [], []
    for vector in vectors:
        if vector.kind != "state" and not input_blocks and (input_width or with_bias):
            at = _add_input_blocks(input_blocks, at, input_width, with_bias, adjoint)
        starts[vector] = at
        at += cell.size_of(vector)
    if not input_blocks and (input_width or with_bias):
        _add_input_blocks(input_blocks, at, input_width, with_bias, adjoint)
    for p in merged_products(adjoint):
        start = starts[p.vector]
        blocks.append(SumBlock(start, start + cell.size_of(p.vector), p.start, p.start + p.width))
    return vectors, (*blocks, *input_blocks), len(blocks)


def _add_input_blocks(
    blocks: list[SumBlock], at: int, input_width: int, with_bias: bool, adjoint: Adjoint
) -> int:
    """The sums for the input's weights and biases, whose columns begin at `at`; where those end.

    Where the cell has vectors, whose gradients are sums of delta as well, they lie beyond those of the biases.
    """
    width = adjoint.cell.entry_width
    for count, end in (
        (input_width, width),
        (int(with_bias), adjoint.width if adjoint.cell.vectors else width),
    ):
        if count:
            blocks.append(SumBlock(at, at + count, 0, end))
            at += count
    return at


def blocks(adjoint: Adjoint, input_width: int, with_bias: bool) -> tuple[SumBlock, ...]:
    """The sums wanted: those of `merged_products`, then of an input of so many columns, then of delta itself."""
    return _layout(adjoint, input_width, with_bias)[1]


class WeightSums:
    """In two steps: `start` needs no gradient and may run beside the loop that computes delta."""

    def __init__(
        self,
        adjoint: Adjoint,
        stored: Sequence[Tensor],
        inputs: Inputs,
        x: Tensor | None = None,
        with_bias: bool = False,
        free_processors: int = 0,
        onto: WeightSums | None = None,
        targets: Sequence[Target] = (),
    ) -> None:
        """`with_bias`: of delta itself too. `free_processors`, `onto`, `targets`: see `OuterProducts`."""
        self.with_bias = with_bias
        vectors, wanted, self.loop_sums = _layout(adjoint, 0 if x is None else x.shape[-1], with_bias)
        states = [self._left(adjoint, v, stored, inputs) for v in vectors if v.kind == "state"]
        own_input = [] if x is None else [Left(for_vector_loads(x))]
        own_input += [Left(None)] if with_bias else []
        others = [self._left(adjoint, v, stored, inputs) for v in vectors if v.kind != "state"]
        marks = None if inputs.reset is None else inputs.reset.contiguous()
        earlier = None if onto is None else onto.sums
        left = [*states, *own_input, *others]
        self.in_place = bool(targets)
        self.sums = OuterProducts(left, adjoint.width, marks, wanted, free_processors, earlier, targets)

    @staticmethod
    def _left(adjoint: Adjoint, vector: Vector, stored: Sequence[Tensor], inputs: Inputs) -> Left:
        cell = adjoint.cell
        if vector.kind == "output":
            return Left(for_vector_loads(stored[cell.outputs.index((vector.stage, vector.index))]))
        output = stored[cell.outputs.index(cell.new_states[vector.index])]
        return Left(for_vector_loads(output), for_vector_loads(inputs.states[vector.index]))

    def start(self, stream: int | None = None) -> None:
        """Split states, layers and inputs into parts, perhaps on another stream than the current one."""
        self.sums.split_left(stream)

    def finish(self, delta: Tensor, stream: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The sums of the loop's products, as in `merged_products`; those for the input and the biases."""
        return self._named(self.sums.finish(for_vector_loads(delta), stream))

    def all_at_once(self, delta: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Both steps, in one launch less."""
        return self._named(self.sums.finish(for_vector_loads(delta), with_left=True))

    def _named(self, sums: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if self.with_bias and not self.in_place:
            sums[-1] = sums[-1].squeeze(-1)
        return sums[: self.loop_sums], sums[self.loop_sums :]


def for_vector_loads(x: Tensor) -> Tensor:
    """Contiguous and aligned for loads of four numbers, which a view into something longer may not be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
