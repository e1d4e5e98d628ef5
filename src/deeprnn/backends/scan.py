"""The loop as one `scan` operator, for torch.export and ONNX: time stays a dynamic dimension there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.protocol import Case, Gradients, Inputs
from deeprnn.cells.description import CellDescription
from deeprnn.cells.step_graph import block_of, forward_step, product_blocks


def forward(cell: CellDescription, inputs: Inputs) -> list[Tensor]:
    """Every output of every step, by torch's scan."""
    from torch._higher_order_ops.scan import scan

    assert inputs.A is not None
    marks = (
        inputs.A.new_ones(inputs.A.shape[:2]) if inputs.reset is None else (~inputs.reset).to(inputs.A.dtype)
    )
    module, places = forward_step(cell, False), [cell.outputs.index(o) for o in cell.new_states]
    # Clones: scan takes no two inputs that share memory.
    parts = [block_of(inputs.matrices, *p).transpose(-2, -1).clone() for p in product_blocks(cell)]
    rest = (*parts, *(x.unsqueeze(-2).clone() for x in inputs.vectors), *inputs.streams)

    def step(states: tuple[Tensor, ...], now: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        entered, kept = now
        outputs = module(entered, *(x * kept.unsqueeze(-1) for x in states), *rest)
        return tuple(outputs[k].clone() for k in places), torch.cat(outputs, -1)

    _, joined = scan(step, tuple(inputs.states), (inputs.A, marks), dim=0)
    return list(joined.split([cell.stages[o.stage].size for o in cell.outputs], -1))


class Scan:
    """Every cell whose streams are one for the sequence, as an operator that can be written down."""

    name = "scan"

    def why_not(self, case: Case) -> str | None:
        """It serves everything."""
        return None

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """By torch's scan over steps."""
        return forward(case.cell, inputs)

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """As the reference."""
        return plain.backward(case.cell, gradients, stored, inputs)


BACKEND = Scan()
