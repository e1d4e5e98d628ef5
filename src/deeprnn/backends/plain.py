"""Any cell over time, forward and backward, by plain torch operations that autograd and vmap can follow.

`forward` is the truth that every backend is tested against. `backward` is the derivative that a backend computes,
written as a function of what a forward pass stored: second and higher derivatives are those of this function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.backends.call import Gradients, Inputs
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import CellDescription
from deeprnn.cells.step_graph import backward_step, block_of, forward_step, product_blocks


def at(stream: Tensor, t: int, members: int | None) -> Tensor:
    """A stream at step t: its own where it has a time axis, else the one for the sequence."""
    return stream.select(-3, t) if stream.dim() == (3 if members is None else 4) else stream


def cleared(states: Sequence[Tensor], reset: Tensor | None, t: int) -> list[Tensor]:
    """States, zero in rows that a mark resets before step t."""
    if reset is None:
        return list(states)
    marks = reset.select(-2, t).unsqueeze(-1)
    return [torch.where(marks, 0.0, x) for x in states]


def forward(cell: CellDescription, inputs: Inputs, keep: bool = False) -> list[Tensor]:
    """Every output of all steps, ([P,] T, B, n) each; with `keep` followed by what a backward pass needs."""
    assert inputs.A is not None
    step, states, per_step = forward_step(cell, keep), inputs.states, []
    sizes, places = stored_sizes(cell, keep), [cell.outputs.index(o) for o in cell.new_states]
    parts = [block_of(inputs.matrices, *product).transpose(-2, -1) for product in product_blocks(cell)]
    vectors = [x.unsqueeze(-2) for x in inputs.vectors]
    for t, entered in enumerate(inputs.A.unbind(-3)):
        states = cleared(states, inputs.reset, t)
        masks = [at(x, t, inputs.members) for x in inputs.masks]
        outputs = step(entered, *states, *parts, *vectors, *masks)
        shape = entered.shape[:-1]
        # What depends on parameters alone is the same in all rows.
        outputs = [
            x if x.shape == (*shape, n) else x.expand(*shape, n) for x, n in zip(outputs, sizes, strict=True)
        ]
        states = [outputs[k] for k in places]
        per_step.append(outputs)
    if not per_step:  # no step: empty results that still belong to the graph
        root = inputs.A.sum(-1, keepdim=True) + sum(x.sum() for x in inputs.states)
        return [root.expand(*root.shape[:-1], n) for n in sizes]
    return [torch.stack(steps, -3) for steps in zip(*per_step, strict=True)]


def stored_sizes(cell: CellDescription, keep: bool) -> list[int]:
    """Widths of what a forward pass returns."""
    sizes = [cell.stages[o.stage].size for o in cell.outputs]
    return sizes + ([cell.stages[s].size for s, _ in adjoint_of(cell).saved] if keep else [])


def previous(cell: CellDescription, stored: Sequence[Tensor], inputs: Inputs, state: int) -> Tensor:
    """A state as each step saw it: ([P,] T, B, n), zero where a mark resets it."""
    output = stored[cell.outputs.index(cell.new_states[state])]
    if output.shape[-3] == 0:
        return output
    first = inputs.states[state].unsqueeze(-3)
    seen = torch.cat([first, output.narrow(-3, 0, output.shape[-3] - 1)], -3)
    return seen if inputs.reset is None else seen.masked_fill(inputs.reset.unsqueeze(-1), 0)


def backward(
    cell: CellDescription, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
) -> Gradients:
    """The gradients of every pre-activation and of the first states; as `Backend.backward`, for any device."""
    adjoint, steps = adjoint_of(cell), stored[0].shape[-3]
    step = backward_step(cell, tuple(g is not None for g in gradients))
    seen = [previous(cell, stored, inputs, i).unbind(-3) for i in range(len(cell.states))]
    given_gradients = [g.unbind(-3) for g in gradients if g is not None]
    saved = [x.unbind(-3) for x in stored]
    parts = [block_of(inputs.matrices, *product) for product in product_blocks(cell)]
    vectors = [x.unsqueeze(-2) for x in inputs.vectors]
    carried = [torch.zeros_like(x) for x in inputs.states]
    rows = []
    for t in range(steps - 1, -1, -1):
        masks = [at(x, t, inputs.members) for x in inputs.masks]
        at_t = [[x[t] for x in group] for group in (given_gradients, seen, saved)]
        row, *carried = step(*at_t[0], *carried, *at_t[1], *at_t[2], *parts, *vectors, *masks)
        rows.append(row)
        if inputs.reset is not None:
            marks = inputs.reset.select(-2, t).unsqueeze(-1)
            carried = [x.masked_fill(marks, 0) for x in carried]
    if not rows:
        return Gradients(stored[0].new_zeros(*stored[0].shape[:-1], adjoint.width), carried)
    return Gradients(torch.stack(rows[::-1], -3), carried)
