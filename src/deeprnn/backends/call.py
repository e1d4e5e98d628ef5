"""What a backend is given: a case, which decides which code runs, and the tensors of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deeprnn.cells.description import CellDescription


@dataclass(frozen=True)
class Case:
    """Everything that decides which code runs, but for sizes along time, batch and population. Hashable."""

    cell: CellDescription
    device: torch.device
    dtype: torch.dtype
    precision: str = "fp32"
    """of the products inside the loop: "fp32", or "bf16" where autocast asks for it"""


class Inputs(NamedTuple):
    """The tensors of one call; a population of P models is a leading dimension of each."""

    A: (
        Tensor | None
    )  # ([P,] T, B, entry width): what enters from outside the recurrence; None in a backward pass
    states: list[Tensor]  # ([P,] B, n) each, before the first step
    matrices: list[Tensor]  # ([P,] rows, columns)
    vectors: list[Tensor]  # ([P,] n): parameters with one number a unit
    masks: list[Tensor]  # ([P,] T, B, n) or ([P,] B, n): masks and other inputs without gradient
    reset: Tensor | None = None  # ([P,] T, B) bool: states are zeroed before a marked step

    @property
    def members(self) -> int | None:
        """P, None without a population dimension."""
        return self.states[0].shape[0] if self.states[0].dim() == 3 else None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in order, as one list."""
        A, marks = ([] if x is None else [x] for x in (self.A, self.reset))
        return [*A, *self.states, *self.matrices, *self.vectors, *self.masks, *marks]

    @classmethod
    def of(cls, cell: CellDescription, tensors: Sequence[Tensor], has_A: bool = True) -> Inputs:
        """Read what `tensors` listed."""
        counts = (len(cell.states), len(cell.matrices), len(cell.vectors), len(cell.masks))
        rest = iter(tensors)
        A = next(rest) if has_A else None
        groups = [[next(rest) for _ in range(n)] for n in counts]
        return cls(A, *groups, reset=next(rest, None))

    def member(self, p: int) -> Inputs:
        """One member of a population."""
        return Inputs(
            None if self.A is None else self.A[p],
            *([x[p] for x in group] for group in (self.states, self.matrices, self.vectors, self.masks)),
            reset=self.reset if self.reset is None or self.reset.dim() == 2 else self.reset[p],
        )


class InputProjection(NamedTuple):
    """An input that enters every stage through a matrix: A is the x U_kᵀ + b_k side by side.

    There may be no b; where there is one more than U, the last adds to the first, as in `nn.RNN`.
    """

    x: Tensor  # (T, B, I)
    U: list[Tensor]
    b: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in order."""
        return [self.x, *self.U, *self.b]

    @property
    def matrix(self) -> Tensor:
        """All U as one."""
        return torch.cat(self.U) if len(self.U) > 1 else self.U[0]

    @property
    def bias(self) -> Tensor | None:
        """All b as one."""
        if not self.b:
            return None
        first = self.b[0] if len(self.b) == len(self.U) else self.b[0] + self.b[-1]
        return torch.cat([first, *self.b[1 : len(self.U)]]) if len(self.U) > 1 else first

    @property
    def A(self) -> Tensor:
        """What enters the stages."""
        return functional.linear(self.x, self.matrix, self.bias)


@dataclass(frozen=True, eq=False)
class ProjectionCase:
    """A case and the shapes of a call whose input enters through matrices.

    It is made once for all calls alike (`unrolling.project_and_unroll`) and compares by identity: whatever follows from
    it can be kept by it, and looking that up costs nothing.
    """

    case: Case
    shape: tuple[int, int, int]
    """of x: (T, B, I)"""
    heights: tuple[int, ...]
    """rows of each U"""
    biases: int
    has_reset: bool
    """whether there are reset marks"""

    @classmethod
    def of(cls, case: Case, projection: InputProjection, inputs: Inputs) -> ProjectionCase:
        """The one of these tensors."""
        heights = tuple(u.shape[0] for u in projection.U)
        has_reset = inputs.reset is not None
        return cls(case, tuple(projection.x.shape), heights, len(projection.b), has_reset)  # type: ignore[arg-type]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where U, b, states, matrices, vectors and masks end in the list of all tensors."""
        cell = self.case.cell
        counts = (len(cell.states), len(cell.matrices), len(cell.vectors), len(cell.masks))
        return tuple(accumulate((1 + len(self.heights), self.biases, *counts)))

    def split(self, tensors: Sequence[Tensor]) -> tuple[InputProjection, Inputs]:
        """Read what `[*projection.tensors, *inputs.tensors]` listed."""
        U, b, states, matrices, vectors, masks = self._ends
        rest = list(tensors)
        reset = rest[masks] if self.has_reset else None
        groups = rest[b:states], rest[states:matrices], rest[matrices:vectors], rest[vectors:masks]
        return InputProjection(rest[0], rest[1:U], rest[U:b]), Inputs(None, *groups, reset)


class SavedTensors(NamedTuple):
    """What the backward pass of a layer's call reads."""

    y: Tensor | None  # (T, B, n): the first state's sequence, where the call `reads_output`
    workspace: Tensor | None  # whatever else the forward pass stored
    x: Tensor
    states: Sequence[Tensor] | None
    parameters: Sequence[Tensor]


class Gradients(NamedTuple):
    """What a backward pass computes: see `cells.adjoint.Adjoint` for delta's columns."""

    delta: Tensor  # ([P,] T, B, width)
    states: list[Tensor]  # ([P,] B, n): of the states before the first step
