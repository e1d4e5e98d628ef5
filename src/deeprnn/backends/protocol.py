"""What a backend is: what every one can do, and what some can do besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from deeprnn.backends.call import Case, Gradients, InputProjection, Inputs, ProjectionCase, SavedTensors
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import Adjoint


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
