"""A layer's call by machine code: the input's product, the loop and, backward, the gradients of all parameters.

With many rows in a step the input's product is part of the step's sums, and A is never written. With few rows a step
would read more weights than it uses, so they are multiplied before the loop, in tiles of rows of several steps, where
the call is long enough to make up for that. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cpu.jit import weight_sums
from deeprnn.backends.cpu.jit.lowering import InputEntry
from deeprnn.backends.cpu.jit.run import Program, backward_program, forward_program, input_program
from deeprnn.backends.cpu.jit.tables import TALLEST
from deeprnn.backends.wiring import Wiring

ROWS_IN_LOOP = TALLEST
"""rows of a batch from which the input's product belongs in the loop: a tile there is as tall as one before it"""
ENTRY_COST = 16
"""numbers of the input's matrices that a step may read in the time in which it writes and reads one of A"""
SAVED_BY_PRODUCT = 2**19
"""numbers not read in the steps of a call from which a product before the loop pays, with fewer rows too"""


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
        self.wiring, self.cell, self.dtype = wiring, wiring.cell, dtype
        heights = tuple(wiring.shapes[i][0] for i in wiring.U)
        self.through = InputEntry(inputs, heights, tuple((p.column, p.count) for p in wiring.biases))
        self.saved_by_product = (inputs - ENTRY_COST) * sum(heights)
        self.backward_program = backward_program(self.cell.text)
        self._forward_programs: dict[tuple[bool, bool], Program] = {}
        self.sums = weight_sums.WeightSums(wiring, inputs, dtype)
        self.outputs = len(self.cell.outputs)

    def widths(self, keep: bool) -> list[int]:
        """Of every output and, with `keep`, of what else the backward pass reads."""
        return self._forward_program(keep, False).results

    def _forward_program(self, keep: bool, in_loop: bool) -> Program:
        key = keep, in_loop
        if (program := self._forward_programs.get(key)) is None:
            program = self._forward_programs[key] = forward_program(
                self.cell.text, keep, self.through, in_loop
            )
        return program

    def forward(self, given: Given, results: Sequence[int], keep: bool) -> None:
        """Fill sequences of these widths, each (T, B, width) at an address."""
        size, (steps, batch, _) = given.x.element_size(), given.x.shape
        in_loop = batch >= ROWS_IN_LOOP or steps * self.saved_by_product < SAVED_BY_PRODUCT
        program = self._forward_program(keep, in_loop)
        places = [p.data_ptr() for p in given.parameters]
        matrices = [places[i] for i in self.wiring.U]
        A = None if in_loop else torch.empty((steps * batch, self.cell.entry_width), dtype=self.dtype)
        if A is None:
            entering = [given.x.data_ptr(), *matrices]
        else:
            self._multiply(given.x, matrices, A)
            entering = [A.data_ptr()]
        entering += [places[i] + size * start for i, start, _, _ in self.wiring.biases]
        addresses = [*entering, *self._given(given, places), *results, *self._matrices(places)]
        program.run_at(addresses, self.dtype, steps, batch, self._timeless(program.masks, given))

    def _multiply(self, x: Tensor, matrices: Sequence[int], A: Tensor) -> None:
        """Fill A, less its biases: equal chunks of whole tiles, which threads share as members, then the rest."""
        program, rows, size = input_program(self.through), A.shape[0], x.element_size()
        x_row, A_row = size * x.shape[-1], size * A.shape[1]
        chunks = max(1, min(torch.get_num_threads(), rows // TALLEST // TALLEST))
        tiles = rows // TALLEST // chunks
        chunk, first = tiles * TALLEST, chunks * tiles * TALLEST
        distances = [chunk * x_row, 0, chunk * A_row, *[0] * len(matrices)]
        whole = [x.data_ptr(), None, A.data_ptr(), *matrices]
        program.run_at(whole, self.dtype, tiles, TALLEST, members=chunks, distances=distances)
        rest = [x.data_ptr() + first * x_row, None, A.data_ptr() + first * A_row, *matrices]
        program.run_at(rest, self.dtype, 1, rows - first)

    def backward(
        self, given: Given, stored: Sequence[int], gradients: Sequence[Tensor | None], wants_parameters: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """delta, the gradients of the first states and, one after the other, those of all parameters.

        `stored` is where `forward` wrote, `gradients` are those of the outputs.
        """
        program, (steps, batch, _) = self.backward_program, given.x.shape
        make = torch.empty if program.fills_delta else torch.zeros
        delta = make((steps, batch, program.delta), dtype=self.dtype)
        d_states = [torch.empty((batch, n), dtype=self.dtype) for n in self.cell.states]
        carry = [torch.zeros((2, batch, width), dtype=self.dtype) for width in program.carry]
        local = [torch.empty((batch, width), dtype=self.dtype) for width in program.local]
        outer = [None if g is None else g.contiguous() for g in gradients]
        places = [p.data_ptr() for p in given.parameters]
        addresses = [delta.data_ptr(), *self._given(given, places), *stored]
        addresses += [None if g is None else g.data_ptr() for g in outer]
        addresses += [x.data_ptr() for x in (*d_states, *carry, *local)]
        addresses += self._matrices(places)
        program.run_at(addresses, self.dtype, steps, batch, self._timeless(program.masks, given))
        sums = self._parameter_gradients(given, delta, stored) if wants_parameters else None
        return delta, d_states, sums

    def input_gradient(self, delta: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """That of x."""
        U = [parameters[i] for i in self.wiring.U]
        matrix = U[0] if len(U) == 1 else torch.cat(U)
        return delta[..., : self.cell.entry_width] @ matrix

    def _parameter_gradients(self, given: Given, delta: Tensor, stored: Sequence[int]) -> Tensor:
        states = [None if h is None else h.data_ptr() for h in given.states]
        marks = None if given.reset is None else given.reset.data_ptr()
        outputs = stored[: self.outputs]
        steps, batch, _ = given.x.shape
        return self.sums.run(delta.data_ptr(), given.x.data_ptr(), states, outputs, marks, steps, batch)

    def _given(self, given: Given, places: Sequence[int]) -> list[int | None]:
        """First states, vectors, masks and marks: what both directions read."""
        size = given.x.element_size()
        return [
            *[None if h is None else h.data_ptr() for h in given.states],
            *[places[i] + size * start for i, start, _, _ in self.wiring.vectors],
            *[m.data_ptr() for m in given.masks],
            None if given.reset is None else given.reset.data_ptr(),
        ]

    def _matrices(self, places: Sequence[int]) -> list[int]:
        return [places[i] for i in self.wiring.matrices]

    def _timeless(self, operands: Sequence[int], given: Given) -> tuple[int, ...]:
        """Masks that are one for the whole sequence."""
        return tuple([i for i, mask in zip(operands, given.masks, strict=True) if mask.dim() < 3])


@lru_cache(maxsize=1024)
def layer_call(wiring: Wiring, inputs: int, dtype: torch.dtype) -> LayerCall | None:
    """The calls of a wiring; None where a parameter's gradient is no single sum over the rows."""
    if not weight_sums.serves(wiring):
        return None
    call = LayerCall(wiring, inputs, dtype)
    return call if call.through.fits(wiring.cell) else None
