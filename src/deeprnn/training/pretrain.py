"""Pretraining: DOT(S) starts from a trained DT(S), a stack's first level from a trained RNN (Sec. 5.2)."""

from __future__ import annotations

from dataclasses import replace

from deeprnn.errors import UserError
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
    part, stop = recipe.pretrain, stage.stop
    return replace(
        stage,
        stop=replace(stop, epochs=part.epochs or stop.epochs, minutes=part.minutes or stop.minutes),
        data=recipe.data,
        model=core(recipe.model),
        init=recipe.init,
        seeds=recipe.seeds,
        rates=recipe.rates,
        transpositions=recipe.transpositions,
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
    kind = ("dts" if model.intermediate else "rnn") + "-nade" * (model.output == "nade")
    return replace(
        model,
        kind=kind,
        hidden=model.hidden[:1],
        output_hidden=(),
        output_from="top",
        input_to_levels="first",
    )
