"""Which recipes can train as members of one population, and which fields each member may have of its own.

A population shares its batches, its model's shape and its optimiser's rule. What remains is a member's own: where it
starts, how far it steps, how much noise it meets, and when it slows down and stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deeprnn.training.recipe import Recipe, override
from deeprnn.training.recipe.continuing import flat

MAY_DIFFER = (
    "seeds",
    "init.",
    "optimiser.rate",
    "optimiser.clip",
    "optimiser.nonfinite",
    "regulariser.weight_noise",
    "schedule.beta",
    "schedule.patience",
    "schedule.factor",
    "schedule.minimum",
    "schedule.restore_best",
    "stop.patience",
)
"""fields that may differ within a population; a name that ends with a dot stands for a whole part"""


def may_differ(name: str) -> bool:
    """Whether a field can be each member's own."""
    return any(name.startswith(field) if field.endswith(".") else name == field for field in MAY_DIFFER)


def shape(recipe: Recipe) -> str:
    """What recipes have in common that can train together: all fields that are no member's own."""
    shared: dict[str, Any] = {k: v for k, v in flat(recipe.to_dict()).items() if not may_differ(k)}
    if recipe.data.order == "own" and recipe.data.lanes > 1:
        shared["seeds"] = (
            recipe.seeds
        )  # lanes fill differently in another order: epochs would differ in length
    if recipe.pretrain.recipe or recipe.pretrain.run:
        # The first stage starts from `init` as well, and is trained once for all members of a seed.
        shared |= {k: v for k, v in flat(recipe.to_dict()).items() if k.startswith("init.")}
    return repr(sorted(shared.items()))


def together(recipes: Sequence[Recipe], most: int) -> list[list[int]]:
    """The numbers of the recipes in groups of one shape, each of at most `most`."""
    groups: dict[str, list[int]] = {}
    for number, recipe in enumerate(recipes):
        groups.setdefault(shape(recipe), []).append(number)
    return [group[at : at + most] for group in groups.values() for at in range(0, len(group), most)]


def shared_recipe(variants: Sequence[Recipe]) -> Recipe:
    """The recipe of a population of variants: a member that meets a NaN must not stop the others."""
    return override(variants[0], {"optimiser.nonfinite": "skip"})
