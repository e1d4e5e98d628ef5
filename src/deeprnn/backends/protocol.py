"""What a backend is, and what it is given: a case, which decides which code runs, and the tensors of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import Adjoint
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


class Backend(Protocol):
    """One way to unroll a cell over time."""

    name: str

    def why_not(self, case: Case) -> str | None:
        """None if it can serve the case, else the reason and the remedy in a sentence."""
        ...

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """Every output of every step, ([P,] T, B, n) each; with `keep` followed by what the backward pass needs."""
        ...

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """From the gradients of the outputs (None: zero) and what `forward` returned with `keep`.

        `inputs.A` is None: it is not kept for the backward pass.
        """
        ...


@runtime_checkable
class DescribingBackend(Backend, Protocol):
    """A backend that serves cases in different ways, and can say how."""

    def describe(self, case: Case, batch: int) -> str:
        """What would run, in a line for a person."""
        ...


class MatrixGradients(Protocol):
    """How the gradients of a cell's matrices are summed over all steps; see `gradients.matrix_gradients`."""

    def __call__(
        self, adjoint: Adjoint, delta: Tensor, stored: Sequence[Tensor], inputs: Inputs
    ) -> Sequence[Tensor]:
        """One gradient for each matrix."""
        ...


@runtime_checkable
class BackendWithMatrixGradients(Backend, Protocol):
    """A backend with products of its own for the gradients of a cell's matrices."""

    matrix_gradients: MatrixGradients


@runtime_checkable
class ProjectingBackend(Backend, Protocol):
    """A backend that can take the input's product in one with the loop."""

    def serves_projection(self, case: Case, projection: InputProjection, inputs: Inputs) -> bool:
        """Whether it should."""
        ...

    def forward_with_projection(
        self, projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs, keep: bool
    ) -> list[Tensor]:
        """As `forward`, of `projection.A`."""
        ...

    def backward_with_projection(
        self,
        projection_case: ProjectionCase,
        gradients: Sequence[Tensor | None],
        stored: Sequence[Tensor],
        projection: InputProjection,
        inputs: Inputs,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of x, U, b, states, matrices and vectors in this order; `needed` says which are wanted."""
        ...


@runtime_checkable
class DirectBackend(ProjectingBackend, Protocol):
    """A backend that can take a layer's whole call, from its input and parameters to its last states."""

    def direct_call(self, projection_case: ProjectionCase, wiring: Wiring) -> DirectCall | None:
        """The call at these shapes as one thing, None where it cannot be."""
        ...


class DirectCall(Protocol):
    """Both directions of a layer's call at one shape, from its input and parameters; see `backends/direct.py`."""

    case: Case
    reads_output: bool
    """whether the backward pass reads the very output that the user holds, and may not change"""

    def forward(
        self, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Output, last states (1, B, n) and, with `keep`, what else a backward pass reads; no states are zeros."""
        ...

    def backward(
        self, gradients: Sequence[Tensor | None], saved: SavedTensors, wants_x: bool, wants_parameters: bool
    ) -> Sequence[Tensor | None]:
        """From the gradients of the output and of the last states, those of x and of the parameters."""
        ...
