"""A cell unrolled by a backend, and its backward pass, as operators of torch: what compilers and exporters see.

How they are differentiated and mapped over is `autograd.py`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, Inputs
from deeprnn.backends.registry import load_backend
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import CellDescription, from_text


class UnrollAttributes(NamedTuple):
    """What of a call is no tensor, as plain values: the form in which torch's operators take it."""

    backend: str
    text: str  # of the cell
    precision: str
    has_reset: bool
    keep: bool  # what a backward pass needs is wanted

    @property
    def cell(self) -> CellDescription:
        """The cell."""
        return from_text(self.text)


@constant_when_compiled
def output_count(text: str) -> int:
    """How many outputs a cell has."""
    return len(from_text(text).outputs)


def flat(gradients: Gradients) -> list[Tensor]:
    """As an operator returns them."""
    return [gradients.delta, *gradients.states]


# Defined by schema: torch.library.custom_op would import the compiler, a second, at the first call.
torch.library.define(
    "deeprnn::unroll",
    "(str backend, str cell, str precision, Tensor[] inputs, bool has_reset, bool keep) -> Tensor[]",
)
torch.library.define(
    "deeprnn::unroll_backward",
    "(str backend, str cell, str precision, Tensor?[] gradients, Tensor[] stored, Tensor[] inputs, bool has_reset) "
    "-> Tensor[]",
)
unroll_op = torch.ops.deeprnn.unroll.default
backward_op = torch.ops.deeprnn.unroll_backward.default


@lru_cache(maxsize=4096)
def _case(text: str, device: torch.device, dtype: torch.dtype, precision: str) -> Case:
    return Case(from_text(text), device, dtype, precision)


def run(
    backend: str, text: str, precision: str, tensors: Sequence[Tensor], has_reset: bool, keep: bool
) -> list[Tensor]:
    inputs = Inputs.of(from_text(text), tensors)
    case = _case(text, tensors[0].device, tensors[0].dtype, precision)
    return load_backend(backend).forward(case, inputs, keep)


def run_backward(
    backend: str,
    text: str,
    precision: str,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    tensors: Sequence[Tensor],
    has_reset: bool,
) -> list[Tensor]:
    inputs = Inputs.of(from_text(text), tensors, has_A=False)
    case = _case(text, stored[0].device, stored[0].dtype, precision)
    return flat(load_backend(backend).backward(case, gradients, stored, inputs))


# On every device: which backends serve it is the registry's business.
torch.library.impl("deeprnn::unroll", "default", run)
torch.library.impl("deeprnn::unroll_backward", "default", run_backward)


@torch.library.register_fake("deeprnn::unroll")
def _(backend, cell, precision, inputs, has_reset, keep):
    lead = inputs[0].shape[:-1]
    return [inputs[0].new_empty(*lead, n) for n in plain.stored_sizes(from_text(cell), keep)]


@torch.library.register_fake("deeprnn::unroll_backward")
def _(backend, cell, precision, gradients, stored, inputs, has_reset):
    described = from_text(cell)
    delta = stored[0].new_empty(*stored[0].shape[:-1], adjoint_of(described).width)
    return [delta, *(x.new_empty(x.shape) for x in inputs[: len(described.states)])]
