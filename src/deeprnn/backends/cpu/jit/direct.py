"""A layer's whole call at one shape, from its input and parameters to its last states, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from deeprnn.backends.call import ProjectionCase, SavedTensors
from deeprnn.backends.cpu.jit.layer import Given, LayerCall
from deeprnn.backends.gradients import gradients_of_outputs


class DirectCall:
    """See `protocol.DirectCall`."""

    reads_output = False

    def __init__(self, projection_case: ProjectionCase, call: LayerCall) -> None:
        self.case = projection_case.case
        cell, (self.steps, self.batch, _) = projection_case.case.cell, projection_case.shape
        self.cell, self.dtype = cell, self.case.dtype
        self.call = call.at(self.steps, self.batch)
        self.places = [cell.outputs.index(o) for o in cell.new_states]
        """of the states' sequences among the outputs; that of the first is the layer's output"""
        rows, size = self.steps * self.batch, self.dtype.itemsize
        starts = [[0, *accumulate(rows * width for width in call.widths(keep))] for keep in (False, True)]
        self.stored = [of_call[-1] for of_call in starts]
        """numbers of all sequences in one tensor, without and with what a backward pass reads"""
        self.offsets = [[size * start for start in of_call[:-1]] for of_call in starts]
        """bytes before each sequence there"""
        self.output = (self.steps, self.batch, cell.states[0])
        self.output_bytes = rows * cell.states[0] * size
        self.no_states = [None] * len(cell.states)

    def forward(
        self, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Output, last states and, with `keep`, every sequence: the user may change the output in place."""
        y = torch.empty(*self.output, dtype=self.dtype)
        alone = not keep and len(self.offsets[False]) == 1  # nothing is stored but the output
        stored = y if alone else torch.empty(self.stored[keep], dtype=self.dtype)
        results = self._addresses(stored, keep)
        self.call.forward(self._given(x, states, parameters), results, keep)
        if not alone:
            ctypes.memmove(y.data_ptr(), results[self.places[0]], self.output_bytes)
        last = []
        for place, n in zip(self.places, self.cell.states, strict=True):
            state = torch.empty(1, self.batch, n, dtype=self.dtype)
            step = self.batch * n * self.dtype.itemsize
            ctypes.memmove(state.data_ptr(), results[place] + (self.steps - 1) * step, step)
            last.append(state)
        return y, last, stored if keep else None

    def backward(
        self, gradients: Sequence[Tensor | None], saved: SavedTensors, wants_x: bool, wants_parameters: bool
    ) -> Sequence[Tensor | None]:
        """See `protocol.DirectCall`."""
        assert saved.workspace is not None
        outer = gradients_of_outputs(self.cell, self.steps, gradients)
        stored = self._addresses(saved.workspace, True)
        given = self._given(saved.x, saved.states, saved.parameters)
        memory, made = self.call.backward(given, stored, outer, wants_parameters)
        d_x = self.call.input_gradient(memory, saved.parameters) if wants_x else None
        return [d_x, *(made or [None] * len(saved.parameters))]

    def _addresses(self, stored: Tensor, keep: bool) -> list[int]:
        base = stored.data_ptr()
        return [base + offset for offset in self.offsets[keep]]

    def _given(self, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor]) -> Given:
        """Parameters are contiguous already."""
        first = self.no_states if states is None else [h.contiguous() for h in states]
        return Given(x.contiguous(), parameters, first)
