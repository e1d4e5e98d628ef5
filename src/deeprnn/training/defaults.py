"""Which recipe a person means, and sensible settings for data that has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeprnn import data as data_sets
from deeprnn.cells import lookup
from deeprnn.cells.library import LIBRARY
from deeprnn.data.music import MusicData
from deeprnn.errors import UserError, did_you_mean
from deeprnn.model.init import InitSpec
from deeprnn.training import loading
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
    override,
    packaged,
)

FEW_FRAMES = 100_000
SEMITONES = 6
"""Random transposition of few songs: what validation prefers (docs/guide/data.md)."""

KINDS = ("rnn", "dt", "dts", "do", "dot", "dots", "srnn", "sdts", "dots-star")


def resolve(
    what: str, model: str = "", level: str = "auto", changes: Mapping[str, Any] | None = None
) -> tuple[Recipe, Data | None, list[str]]:
    """The recipe for a data set's name, a recipe, a file or a folder; its data if loaded, and remarks.

    Of `changes`, to be made to the recipe later, those of the data's fields say how to read it.
    `model` is one of the paper's, or a cell: a shipped one, or a user's own, which is imported.
    """
    if model and model not in KINDS:
        if model not in LIBRARY and not lookup.is_own(model):
            known = (*KINDS, *LIBRARY)
            hint = did_you_mean(model, known)
            raise UserError(
                f"no model {model!r}{hint}: known are {', '.join(known)}, and your own cell as my_cells.py:Paced"
            )
        model = lookup.load(model)
    known = packaged()
    if is_recipe(what):
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
        hint = did_you_mean(what, options)
        raise UserError(
            f"{what!r} is neither a data set ({', '.join(data_sets.names())}), nor a recipe, nor a file or folder{hint}"
        )
    name = what if what in data_sets.names() else str(Path(what).expanduser().resolve())
    part = DataPart(name=name, level=level)  # type: ignore[arg-type]
    reading = {name: value for name, value in (changes or {}).items() if name.startswith("data.")}
    part = override(Recipe(data=part), reading).data
    data = loading.load_data(part)
    recipe, remarks = choose(data, part, model or "dots", bool(changes))
    return recipe, data, remarks


def is_recipe(what: str) -> bool:
    """Whether a word names a recipe rather than data."""
    short = what.removesuffix(".toml").removeprefix("./").removeprefix("recipes/")
    return what.endswith(".toml") or short in packaged()


def choose(data: Data, part: DataPart, model: str, changed: bool = False) -> tuple[Recipe, list[str]]:
    """Settings from the data's kind and size, for an ordinary computer: Adam, a few lanes, a cosine.

    Those of texts were measured beside an LSTM, in benchmarks/own_data.py. `changed`: a person's options come on top.
    """
    remarks = []
    if isinstance(data, MusicData):
        amount, what = data.splits["train"].frames, "frames"
        lanes = max(1, min(8, len(data.splits["train"]) // 4))
        if not part.transpose and amount < FEW_FRAMES:
            part = replace(part, random_transpose=SEMITONES)
            remarks = [
                f"every epoch each song is moved by up to {SEMITONES} semitones, for there are few; "
                "--data.random_transpose 0 leaves the keys as they are"
            ]
    else:
        amount, what = len(data.splits["train"]), "symbols"
        lanes = max(1, min(32, amount // 2000))
    # A text of characters has more to learn from than a few minutes can use: more updates gain more than more units.
    size = 100 if amount < 20_000 else 200 if amount < 500_000 or data.kind == "char" else 400
    chunk = 100 if data.kind == "music" else 50
    rate = 0.004 if data.kind == "char" else 0.002
    noisy_below = 100_000 if data.kind == "char" else 500_000
    # About six thousand updates: minutes on two cores, and more than small data can use without overfitting.
    updates = max(1, amount // (chunk * lanes))
    epochs = max(5, min(200, 6000 // updates))
    recipe = Recipe(
        data=replace(part, chunk=chunk, lanes=lanes),
        model=model_of(model, size),
        init=_init(data),
        optimiser=OptimiserPart(name="adam", rate=rate, clip=1.0),
        schedule=SchedulePart(name="cosine", floor=0.02, warmup=min(100, epochs * updates // 20)),
        regulariser=RegulariserPart(weight_noise=0.03 if amount < noisy_below else 0.0, dropout_output=0.1),
        stop=StopPart(epochs=epochs, patience=max(5, epochs // 4)),
    )
    layout = f"{lanes} lane{'s' if lanes > 1 else ''} of {chunk} steps"
    unless = ", where no option says otherwise" if changed else ""
    remarks += [
        f"chosen for {amount:,} {what} of training data{unless}: {size} units, {layout}, Adam at {rate:g} over at most "
        f"{epochs} epochs",
        "every choice can be changed, for example --hidden 300 --epochs 10 or --minutes 5",
    ]
    return recipe, remarks


def _init(data: Data) -> InitSpec:
    """Wider than the paper's, which asks for a long slow start; music begins at its own density of notes.

    Of characters one input is on at a time: wide weights let each be told from the others at once.
    """
    if data.kind == "char":
        return InitSpec(input_std=1.0, output_std=0.1, output_hidden_std=0.2)
    init = InitSpec(input_std=0.1, output_std=0.05, output_hidden_std=0.1)
    if not isinstance(data, MusicData):
        return init
    share = min(max(data.splits["train"].density / data.size, 0.001), 0.5)
    return replace(init, output_bias=round(math.log(share / (1 - share)), 2))


def model_of(kind: str, size: int) -> ModelPart:
    """A model of the family at one size for all its layers, or one level of a cell."""
    if kind not in KINDS:
        return ModelPart(kind=lookup.short(kind), hidden=(size,), cell=kind)
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
