"""The loop as one `scan` operator, for torch.export and ONNX: time stays a dynamic dimension there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, Inputs
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.cells.attribute_table import AttributeTable
from deeprnn.cells.description import from_text
from deeprnn.cells.step_graph import block_of, forward_step, product_blocks


class ScannedCell(NamedTuple):
    """What of a cell the loop needs, in plain values: the name of its step, its products' blocks, its outputs."""

    step: str
    blocks: tuple[tuple[int, ...], ...]
    new_states: tuple[int, ...]
    sizes: tuple[int, ...]


STEPS = AttributeTable()
"""one step of each cell, by name"""


@lru_cache(maxsize=512)
def _scanned_cell(text: str) -> ScannedCell:
    cell = from_text(text)
    name = f"step_{sha256(text.encode()).hexdigest()[:16]}"
    STEPS.keep(name, forward_step(cell, False))
    places = tuple(cell.outputs.index(o) for o in cell.new_states)
    sizes = tuple(cell.stages[o.stage].size for o in cell.outputs)
    return ScannedCell(name, product_blocks(cell), places, sizes)


@constant_when_compiled
def scanned_cell(text: str) -> ScannedCell:
    """What the loop needs of a cell; a compiler runs this while it traces."""
    return _scanned_cell(text)


def forward(text: str, inputs: Inputs) -> list[Tensor]:
    """Every output of every step, by torch's scan."""
    from torch._higher_order_ops.scan import scan

    assert inputs.A is not None
    name, blocks, places, sizes = scanned_cell(text)
    module = getattr(STEPS, name)
    marks = (
        inputs.A.new_ones(inputs.A.shape[:2]) if inputs.reset is None else (~inputs.reset).to(inputs.A.dtype)
    )
    # Clones: scan takes no two inputs that share memory. No dimension of one for vectors: exporters make all dynamic.
    parts = [block_of(inputs.matrices, *p).transpose(-2, -1).clone() for p in blocks]
    vectors = [x.clone() if x.dim() == 1 else x.unsqueeze(-2).clone() for x in inputs.vectors]
    rest = (*parts, *vectors, *inputs.masks)

    def step(states: tuple[Tensor, ...], now: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        entered, not_reset = now
        outputs = module(entered, *[x * not_reset.unsqueeze(-1) for x in states], *rest)
        return tuple([outputs[k].clone() for k in places]), torch.cat(outputs, -1)

    _, joined = scan(step, tuple(inputs.states), (inputs.A, marks), dim=0)
    return list(joined.split(list(sizes), -1))


class Scan:
    """Every cell whose masks are one for the sequence, as an operator that can be written down."""

    name = "scan"

    def why_not(self, case: Case) -> str | None:
        """It serves everything."""
        return None

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """By torch's scan over steps."""
        return forward(case.cell.text, inputs)

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """As the reference."""
        return plain.backward(case.cell, gradients, stored, inputs)


BACKEND = Scan()
