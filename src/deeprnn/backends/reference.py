"""The plain loop, which autograd records step by step: the truth that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, Inputs


class Reference:
    """Every cell, on every device, in every type."""

    name = "reference"

    def why_not(self, case: Case) -> str | None:
        """It serves everything."""
        return None

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """By operations that autograd follows."""
        return plain.forward(case.cell, inputs, keep)

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """The derivative as a function of what was stored."""
        return plain.backward(case.cell, gradients, stored, inputs)


BACKEND = Reference()
