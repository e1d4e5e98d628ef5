"""Which recipe a person means, and sensible settings for data that has none."""

from __future__ import annotations

import math
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from deeprnn import data as data_sets
from deeprnn.data.music import MusicData
from deeprnn.errors import UserError
from deeprnn.model.init import InitSpec
from deeprnn.training.evaluate import Data
from deeprnn.training.recipe import (
    DataPart,
    ModelPart,
    OptimiserPart,
    Recipe,
    RegulariserPart,
    SchedulePart,
    StopPart,
    load_recipe,
    packaged,
)
from deeprnn.training.session import load_data

KINDS = ("rnn", "dt", "dts", "do", "dot", "dots", "srnn", "sdts", "dots-star")


def resolve(what: str, model: str = "", level: str = "auto") -> tuple[Recipe, Data | None, list[str]]:
    """The recipe for a data set's name, a recipe, a file or a folder; its data if loaded, and remarks."""
    if model and model not in KINDS:
        near = get_close_matches(model, KINDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(f"no model {model!r}{hint}: known are {', '.join(KINDS)}")
    known = packaged()
    short = what.removesuffix(".toml").removeprefix("./").removeprefix("recipes/")
    if what.endswith(".toml") or short in known:
        if model:
            raise UserError(
                f"{what} already names its model: leave --model out, or override --model.hidden and the like"
            )
        return load_recipe(what), None, []
    if f"paper/{what}/{model or 'dots'}" in known:
        name = f"paper/{what}/{model or 'dots'}"
        return load_recipe(name), None, [f"recipe {name}"]
    if what not in data_sets.names() and not Path(what).expanduser().exists():
        options = [*data_sets.names(), *known]
        near = get_close_matches(what, options, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"{what!r} is neither a data set ({', '.join(data_sets.names())}), nor a recipe, nor a file or folder{hint}"
        )
    name = what if what in data_sets.names() else str(Path(what).expanduser().resolve())
    part = DataPart(name=name, level=level)  # type: ignore[arg-type]
    data = load_data(part)
    recipe, remarks = choose(data, part, model or "dots")
    return recipe, data, remarks


def choose(data: Data, part: DataPart, model: str) -> tuple[Recipe, list[str]]:
    """Settings from the data's kind and size, for an ordinary computer: Adam, a few lanes, a cosine."""
    if isinstance(data, MusicData):
        amount, what = data.splits["train"].frames, "frames"
        lanes = max(1, min(8, len(data.splits["train"]) // 4))
    else:
        amount, what = len(data.splits["train"]), "symbols"
        lanes = max(1, min(32, amount // 2000))
    size = 100 if amount < 20_000 else 200 if amount < 500_000 else 400
    chunk = 50 if data.kind == "word" else 100
    # About six thousand updates: minutes on two cores, and more than small data can use without overfitting.
    updates = max(1, amount // (chunk * lanes))
    epochs = max(5, min(200, 6000 // updates))
    recipe = Recipe(
        data=replace(part, chunk=chunk, lanes=lanes),
        model=model_of(model, size),
        init=_init(data),
        optimiser=OptimiserPart(name="adam", rate=0.002, clip=1.0),
        schedule=SchedulePart(name="cosine", floor=0.02, warmup=min(100, epochs * updates // 20)),
        regulariser=RegulariserPart(weight_noise=0.03 if amount < 500_000 else 0.0, dropout_output=0.1),
        stop=StopPart(epochs=epochs, patience=max(5, epochs // 4)),
    )
    layout = f"{lanes} lane{'s' if lanes > 1 else ''} of {chunk} steps"
    remarks = [
        f"chosen for {amount:,} {what} of training data: {size} units, {layout}, Adam at 0.002 over at most "
        f"{epochs} epochs",
        "every choice can be changed, for example --model.hidden 300 --stop.epochs 10",
    ]
    return recipe, remarks


def _init(data: Data) -> InitSpec:
    """Wider than the paper's, which asks for a long slow start; music begins at its own density of notes."""
    init = InitSpec(input_std=0.1, output_std=0.05, output_hidden_std=0.1)
    if not isinstance(data, MusicData):
        return init
    share = min(max(data.splits["train"].density / data.size, 0.001), 0.5)
    return replace(init, output_bias=round(math.log(share / (1 - share)), 2))


def model_of(kind: str, size: int) -> ModelPart:
    """A model of the family at one size for all its layers."""
    if kind == "dots-star":
        return ModelPart(
            kind,
            (size,),
            (size,),
            (size,),
            "last",
            "all",
            "tanh",
            intermediate_unit="lp:2",
            output_unit="maxout:2",
        )
    levels = 2 if kind.startswith("s") else 1
    deep = (size,) if kind in ("dt", "dts", "dot", "dots", "sdts") else ()
    short = kind in ("dts", "dots", "sdts")
    return ModelPart(
        kind=kind,
        hidden=(size,) * levels,
        intermediate=deep,
        output_hidden=(size,) if kind in ("do", "dot", "dots") else (),
        shortcut="last" if short else "none",
        input_to="all" if short else "first",
        unit="tanh",  # learns faster than the paper's sigmoid
        output_unit="relu",
    )
