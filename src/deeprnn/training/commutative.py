"""A commutative ⊕, which Sec. 4 suggests: ‖e ⊕ h − h ⊕ e‖² at the pairs of input and state that training meets.

The pairs are taken as they are, without gradient: it is the operator that shall commute, and not inputs and states
that shall become small or alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.model.operator_specs import PlusSpec
from deeprnn.model.plus import Plus
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import ModelSpec
from deeprnn.training.evaluate import Data
from deeprnn.training.recipe import Recipe


def check(recipe: Recipe, data: Data) -> None:
    """Refuse the field for a model of which no level could commute."""
    if recipe.regulariser.commutative:
        levels_with_two_orders(recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout))


def levels_with_two_orders(spec: ModelSpec) -> list[int]:
    """The levels whose input has the state's size, so that e ⊕ h and h ⊕ e are both defined; an error without any."""
    numbers = [
        k
        for k, level in enumerate(spec.levels)
        if isinstance(level, PlusSpec) and level.entering == level.hidden_size and not level.skip_size
    ]
    if not numbers:
        size = spec.levels[0].hidden_size
        raise UserError(
            f"regulariser.commutative needs a level of the paper's ⊕ whose input has the state's size, {size}: give "
            f"the input a hidden layer as wide, --model.input-hidden {size}"
        )
    return numbers


def commutativity(
    model: SequenceModel,
    x: Tensor,
    states: Sequence[Tensor],
    before: Sequence[Tensor],
    reset: Tensor,
    mask: Tensor,
) -> Tensor:
    """The penalty of every level that has two orders, summed: a mean over the steps that count.

    `states` are the levels' own, (T, B, H) each, `before` those carried in, (B, H).
    """
    total = mask.new_zeros((), dtype=states[0].dtype)
    first = [sum(len(level.state_sizes) for level in model.levels[:k]) for k in range(len(model.levels))]
    for k in levels_with_two_orders(model.spec):
        level = model.levels[k]
        assert isinstance(level, Plus)
        with torch.no_grad():
            e = level.embed_input(states[k - 1] if k else model.embed(x))
            h = torch.cat([before[first[k]][None].to(states[k].dtype), states[k][:-1]])
            h = torch.where(reset[..., None], 0.0, h)
        total = total + level.commutativity(e.to(h.dtype), h, counted=mask)
    return total
