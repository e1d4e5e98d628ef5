"""Pretraining: DOT(S) starts from a trained DT(S), a stack's first level from a trained RNN (Sec. 5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import ModelPart, PretrainPart, Recipe, load_recipe


def first_stage(recipe: Recipe) -> Recipe | None:
    """The recipe of the first stage, None without one.

    Its settings come from the recipe that `pretrain.recipe` names, its data and seeds from this one, and its
    model is this one's own core: so an sRNN of 400 units a level starts from an RNN of 400, whatever size
    Table 1 gives the RNN that is reported by itself.
    """
    if not recipe.pretrain.recipe:
        return None
    stage = load_recipe(recipe.pretrain.recipe)
    if stage.pretrain.recipe:
        raise UserError(
            f"pretrain.recipe={recipe.pretrain.recipe!r} is itself pretrained: name a plain recipe"
        )
    return replace(
        stage,
        data=recipe.data,
        model=core(recipe.model),
        init=recipe.init,
        seeds=recipe.seeds,
        rates=recipe.rates,
        save=recipe.save,
        evaluation=recipe.evaluation,
        pretrain=PretrainPart(),
    )


def core(model: ModelPart) -> ModelPart:
    """The model without its deep output, and of a stack its first level only."""
    if len(model.hidden) == 1 and not model.output_hidden:
        raise UserError(
            f"model {model.kind!r} has one level and no deep output: there is nothing to pretrain it from"
        )
    kind = "dts" if model.intermediate else "rnn"
    return replace(
        model,
        kind=kind,
        hidden=model.hidden[:1],
        output_hidden=(),
        output_from="top",
        input_to_levels="first",
    )


def transferred(layout: Layout, source: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Parameters that start from the first stage: those of the transition, never the output function's."""
    names = tuple(
        name
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        if name.startswith("levels.") and name in source and tuple(source[name].shape) == shape
    )
    if not names:
        raise UserError("nothing could be transferred: the pretrained run has no level of the same sizes")
    return names


@torch.no_grad()
def transfer(layout: Layout, row: Tensor, source: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Copy what a first stage has learnt into a member's flat parameters (N,)."""
    names = transferred(layout, source)
    views = layout.views(row)
    for name in names:
        views[name].copy_(source[name])
    return names


def multipliers(layout: Layout, names: tuple[str, ...], rate: float, like: Tensor) -> Tensor:
    """(N,) rate multipliers: `rate` for what was pretrained, 1 for the rest."""
    out = torch.ones(layout.width, dtype=like.dtype, device=like.device)
    for name in names:
        out[layout.span(name)] = rate
    return out
