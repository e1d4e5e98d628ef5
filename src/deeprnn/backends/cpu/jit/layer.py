"""A layer's call by machine code: the input's product, the loop and, backward, the gradients of all parameters.

With many rows in a step the input's product is part of the step's sums, and A is never written. With few rows a step
would read more weights than it uses, so they are multiplied before the loop, in tiles of rows of several steps, where
the call is long enough to make up for that. The bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cpu.jit import weight_sums
from deeprnn.backends.cpu.jit.lowering import InputProjectionShape
from deeprnn.backends.cpu.jit.run import (
    MOST_CALLS,
    Program,
    backward_program,
    forward_program,
    input_program,
)
from deeprnn.backends.cpu.jit.sharing import threads_that_pay
from deeprnn.backends.cpu.jit.tables import TALLEST
from deeprnn.backends.wiring import Wiring

ROWS_IN_LOOP = TALLEST
"""rows of a batch from which the input's product belongs in the loop: a tile there is as tall as one before it"""
ENTRY_COST = 16
"""numbers of the input's matrices that a step may read in the time in which it writes and reads one of A"""
SAVED_BY_PRODUCT = 2**19
"""numbers not read in the steps of a call from which a product before the loop pays, with fewer rows too"""
ALIGNED = 16
"""numbers: parts of one tensor begin at multiples of them"""


class Given(NamedTuple):
    """The tensors of a call, all contiguous; a state that is None is zeros."""

    x: Tensor  # (T, B, I)
    parameters: Sequence[Tensor]  # in the wiring's order
    states: Sequence[Tensor | None]  # (B, n), before the first step
    masks: Sequence[Tensor] = ()
    reset: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        parameters: Sequence[Tensor],
        states: Sequence[Tensor | None],
        masks: Sequence[Tensor] = (),
        reset: Tensor | None = None,
    ) -> Given:
        """Copies of what is not contiguous, the rest as it is."""
        return cls(
            x.contiguous(), [p.contiguous() for p in parameters],
            [None if h is None else h.contiguous() for h in states], [m.contiguous() for m in masks],
            None if reset is None else reset.contiguous(),
        )  # fmt: skip


class LayerCall:
    """Both directions of a wiring's calls, at any length and batch."""

    def __init__(self, wiring: Wiring, inputs: int, dtype: torch.dtype):
        self.wiring, self.cell, self.dtype, self.size = wiring, wiring.cell, dtype, dtype.itemsize
        heights = tuple(wiring.shapes[i][0] for i in wiring.U)
        self.inputs = inputs
        self.projection = InputProjectionShape(
            inputs, heights, tuple((p.column, p.count) for p in wiring.biases)
        )
        self.saved_by_product = (inputs - ENTRY_COST) * sum(heights)
        self.backward_program = backward_program(self.cell.text)
        self._forward_programs: dict[tuple[bool, bool], Program] = {}
        self._sized: dict[tuple[int, int], SizedCall] = {}
        self.sums = weight_sums.WeightSums(wiring, inputs, dtype)
        self.outputs = len(self.cell.outputs)

    def at(self, steps: int, batch: int) -> SizedCall:
        """The calls of this length and batch."""
        key = steps, batch
        if (found := self._sized.get(key)) is None:
            if len(self._sized) >= MOST_CALLS:  # sequences of ever new lengths
                self._sized.clear()
            found = self._sized[key] = SizedCall(self, steps, batch)
        return found

    def widths(self, keep: bool) -> list[int]:
        """Of every output and, with `keep`, of what else the backward pass reads."""
        return self.forward_program(keep, False).results

    def forward_program(self, keep: bool, in_loop: bool) -> Program:
        """The loop, with the input's product in it or not."""
        key = keep, in_loop
        if (program := self._forward_programs.get(key)) is None:
            program = self._forward_programs[key] = forward_program(
                self.cell.text, keep, self.projection, in_loop
            )
        return program


class SizedCall:
    """Both directions of a layer's calls of one length and batch."""

    def __init__(self, layer: LayerCall, steps: int, batch: int):
        self.layer, self.steps, self.batch = layer, steps, batch
        self.input_program = input_program(layer.projection)
        program, cell = layer.backward_program, layer.cell
        self.offsets = [layer.size * start for _, start, _, _ in layer.wiring.biases]
        zeroed = [2 * batch * width for width in program.carry]
        others = [batch * width for width in (*cell.states, *program.local)]
        counts = [steps * batch * program.delta, *zeroed, *others]
        self.places = [0, *accumulate(-(-n // ALIGNED) * ALIGNED for n in counts)]
        """numbers before delta, the carry, the first states' gradients and the rest, in one tensor of the backward's"""
        first, last = (1 if program.fills_delta else 0), 1 + len(zeroed)
        self.zeroed = [layer.size * self.places[i] for i in (first, last)]
        """where zeros begin and end"""

    def forward(self, given: Given, results: Sequence[int], keep: bool) -> None:
        """Fill sequences of these widths, each (T, B, width) at an address."""
        layer, steps, batch = self.layer, self.steps, self.batch
        in_loop = batch >= ROWS_IN_LOOP or steps * layer.saved_by_product < SAVED_BY_PRODUCT
        program, wiring = layer.forward_program(keep, in_loop), layer.wiring
        places = [p.data_ptr() for p in given.parameters]
        entering = [given.x.data_ptr(), *[places[i] for i in wiring.U]]
        if not in_loop:
            A = torch.empty(steps * batch * layer.cell.entry_width, dtype=layer.dtype)
            self._multiply(entering, A.data_ptr())
            entering = [A.data_ptr()]
        for (i, _, _, _), offset in zip(wiring.biases, self.offsets, strict=True):
            entering.append(places[i] + offset)
        matrices = [places[i] for i in wiring.matrices]
        addresses = [*entering, *self._given(given, places), *results, *matrices]
        program.run_at(addresses, layer.dtype, steps, batch, _per_sequence(program, given))

    def _multiply(self, given: Sequence[int], A: int) -> None:
        """Fill A, less its biases: equal chunks of whole tiles, which threads share as members, then the rest."""
        layer, program, rows = self.layer, self.input_program, self.steps * self.batch
        x, *matrices = given
        x_row, A_row = layer.size * layer.inputs, layer.size * layer.cell.entry_width
        threads = threads_that_pay(rows * program.multiplications)
        chunks = max(1, min(threads, rows // TALLEST // TALLEST))
        tiles = rows // TALLEST // chunks
        chunk, first = tiles * TALLEST, chunks * tiles * TALLEST
        distances = [chunk * x_row, 0, chunk * A_row, *[0] * len(matrices)] if chunks > 1 else []
        whole, rest = [x, None, A, *matrices], [x + first * x_row, None, A + first * A_row, *matrices]
        program.run_at(whole, layer.dtype, tiles, TALLEST, members=chunks, distances=distances)
        program.run_at(rest, layer.dtype, 1, rows - first)

    def backward(
        self, given: Given, stored: Sequence[int], gradients: Sequence[Tensor | None], wants_parameters: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory with delta and the gradients of the first states, and those of all parameters, if they are wanted.

        `stored` is where `forward` wrote, `gradients` are those of the outputs.
        """
        layer, steps, batch = self.layer, self.steps, self.batch
        program, size = layer.backward_program, layer.size
        memory = torch.empty(self.places[-1], dtype=layer.dtype)
        base = memory.data_ptr()
        begin, end = self.zeroed
        ctypes.memset(base + begin, 0, end - begin)
        delta, *rest = [base + size * start for start in self.places[:-1]]
        carried, states = len(program.carry), len(layer.cell.states)
        carry, d_states, local = rest[:carried], rest[carried : carried + states], rest[carried + states :]
        outer = [None if g is None else g.contiguous() for g in gradients]
        places = [p.data_ptr() for p in given.parameters]
        addresses = [delta, *self._given(given, places), *stored]
        addresses += [None if g is None else g.data_ptr() for g in outer]
        addresses += [*d_states, *carry, *local, *[places[i] for i in layer.wiring.matrices]]
        program.run_at(addresses, layer.dtype, steps, batch, _per_sequence(program, given))
        return memory, self._parameter_gradients(given, delta, stored) if wants_parameters else []

    def input_gradient(self, memory: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """That of x, from the memory of `backward`."""
        layer, width = self.layer, self.layer.backward_program.delta
        delta = memory[: self.steps * self.batch * width].view(self.steps, self.batch, width)
        U = [parameters[i] for i in layer.wiring.U]
        matrix = U[0] if len(U) == 1 else torch.cat(U)
        return delta[..., : layer.cell.entry_width] @ matrix

    def state_gradients(self, memory: Tensor) -> list[Tensor]:
        """Those of the first states."""
        starts = self.places[1 + len(self.layer.backward_program.carry) :]
        sizes = self.layer.cell.states
        return [
            memory[start : start + self.batch * n].view(self.batch, n).clone()
            for start, n in zip(starts, sizes, strict=False)
        ]

    def _parameter_gradients(self, given: Given, delta: int, stored: Sequence[int]) -> list[Tensor]:
        made = [torch.empty_like(p) for p in given.parameters]
        states = [None if h is None else h.data_ptr() for h in given.states]
        marks = None if given.reset is None else given.reset.data_ptr()
        x, outputs, gradients = given.x.data_ptr(), stored[: self.layer.outputs], [g.data_ptr() for g in made]
        self.layer.sums.run(delta, x, states, outputs, marks, gradients, self.steps, self.batch)
        return made

    def _given(self, given: Given, places: Sequence[int]) -> list[int | None]:
        """First states, vectors, masks and marks: what both directions read."""
        size = self.layer.size
        return [
            *[None if h is None else h.data_ptr() for h in given.states],
            *[places[i] + size * start for i, start, _, _ in self.layer.wiring.vectors],
            *[m.data_ptr() for m in given.masks],
            None if given.reset is None else given.reset.data_ptr(),
        ]


def _per_sequence(program: Program, given: Given) -> tuple[int, ...]:
    """Masks that are one for the whole sequence."""
    if not given.masks:
        return ()
    return tuple([i for i, mask in zip(program.masks, given.masks, strict=True) if mask.dim() < 3])


@lru_cache(maxsize=1024)
def layer_call(wiring: Wiring, inputs: int, dtype: torch.dtype) -> LayerCall | None:
    """The calls of a wiring; None where a parameter's gradient is no single sum over the rows."""
    if not weight_sums.serves(wiring):
        return None
    call = LayerCall(wiring, inputs, dtype)
    return call if call.projection.fits(wiring.cell) else None
