"""What values a recipe's fields may have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from deeprnn.errors import UserError
from deeprnn.training.recipe.fields import shown

if TYPE_CHECKING:
    from deeprnn.training.recipe import Recipe

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "data.chunk": (1, math.inf, "at least 1"),
    "data.lanes": (1, math.inf, "at least 1"),
    "data.order_seed": (0, math.inf, "not negative"),
    "data.random_transpose": (0, 128, "from 0 to 127"),
    "data.minimum": (1, math.inf, "at least 1"),
    "evaluation.chunk": (1, math.inf, "at least 1"),
    "evaluation.width": (1, math.inf, "at least 1"),
    "evaluation.streams": (1, math.inf, "at least 1"),
    "init.input_std": (0, math.inf, "not negative and finite"),
    "init.output_std": (0, math.inf, "not negative and finite"),
    "init.output_hidden_std": (0, math.inf, "not negative and finite"),
    "init.incoming": (1, math.inf, "at least 1"),
    "init.spectral_norm": (0, math.inf, "not negative and finite"),
    "init.bias": (-math.inf, math.inf, "finite"),
    "init.rectifier_bias": (-math.inf, math.inf, "finite"),
    "init.output_bias": (-math.inf, math.inf, "finite"),
    "model.nade_size": (1, math.inf, "at least 1"),
    "optimiser.clip": (0, math.inf, "not negative and finite (0: never clipped)"),
    "optimiser.momentum": (0, 1, "at least 0 and below 1"),
    "optimiser.epsilon": (0, math.inf, "not negative and finite"),
    "optimiser.weight_decay": (0, math.inf, "not negative and finite"),
    "optimiser.average_decay": (0, 1, "at least 0 and below 1"),
    "schedule.patience": (0, math.inf, "not negative"),
    "schedule.factor": (1, math.inf, "at least 1"),
    "schedule.minimum": (0, math.inf, "not negative and finite"),
    "schedule.floor": (0, 1 + 1e-12, "between 0 and 1"),
    "schedule.warmup": (0, math.inf, "not negative"),
    "regulariser.weight_noise": (0, math.inf, "not negative and finite"),
    **{
        f"regulariser.{name}": (0, 1, "at least 0 and below 1")
        for name in ("dropconnect", "dropout_levels", "dropout_symbols")
    },
    "model.embedding": (0, math.inf, "not negative"),
    "regulariser.commutative": (0, math.inf, "not negative and finite"),
    "stop.patience": (0, math.inf, "not negative"),
    "stop.epochs": (0, math.inf, "not negative"),
    "stop.minutes": (0, math.inf, "not negative and finite"),
    "pretrain.rate": (0, math.inf, "not negative and finite"),
    "pretrain.epochs": (0, math.inf, "not negative"),
    "pretrain.minutes": (0, math.inf, "not negative and finite"),
    "save.seconds": (0, math.inf, "not negative and finite"),
    "save.updates": (0, math.inf, "not negative"),
}
"""least value, bound above that is not reached, and how to say it"""


def check(recipe: Recipe) -> None:
    """Refuse a value that no run could use, by its name."""
    for name, (least, below, words) in _BOUNDS.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(recipe, section), key)
        if not (least <= value < below) or math.isinf(value):  # also refuses NaN
            raise UserError(f"{name} must be {words}, got {value}")
    if not 0 < recipe.schedule.beta < math.inf:
        raise UserError(f"schedule.beta must be above zero and finite, got {recipe.schedule.beta}")
    for rate in (recipe.optimiser.rate, *recipe.rates):
        if not 0 < rate < math.inf:
            raise UserError(f"optimiser.rate must be above zero and finite, got {rate}")
    betas = recipe.optimiser.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optimiser.betas must be two numbers, at least 0 and below 1, got {list(betas)}")
    if recipe.optimiser.weight_decay and recipe.optimiser.name != "adamw":
        raise UserError(
            f"optimiser.weight_decay={recipe.optimiser.weight_decay:g} is for adamw, and optimiser.name is "
            f"{recipe.optimiser.name!r}: choose adamw, or leave the decay out"
        )
    if recipe.schedule.name == "cosine" and not (recipe.stop.epochs or recipe.stop.minutes):
        raise UserError(
            "schedule.name='cosine' needs stop.epochs or stop.minutes: the rate reaches its floor there"
        )
    _check_members(recipe)


def _check_members(recipe: Recipe) -> None:
    seeds, rates = recipe.seeds, recipe.rates
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise UserError(f"seeds must be distinct and not negative, got {shown(list(seeds))}")
    if len({f"{rate:g}" for rate in rates}) != len(rates):  # a member's folder is named by its rate
        raise UserError(f"rates must differ in their first six digits, got {shown(list(rates))}")
    moved = recipe.transpositions
    if len(set(moved)) != len(moved) or not all(0 <= t < 128 for t in moved):
        raise UserError(f"transpositions must be distinct and from 0 to 127, got {shown(list(moved))}")
    several = len(seeds) * max(1, len(rates)) * max(1, len(moved)) > 1
    if several and recipe.data.order == "own" and recipe.data.lanes > 1:
        # Lanes fill differently in another order, so that members' epochs would differ in length.
        raise UserError(
            f"data.order='own' in a population needs data.lanes=1, got {recipe.data.lanes}: "
            "use data.order='shared', or train the seeds one by one"
        )
