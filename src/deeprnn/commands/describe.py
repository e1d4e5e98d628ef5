"""`deeprnn describe`: a model's equations, shapes, counts and picture; the paper's Table 1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from deeprnn.commands.model_view import show_json, show_model, show_table1
from deeprnn.console import console
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.model.specs import ModelSpec

# name -> (takes --intermediate, takes --output-hidden, shortcut and input to every layer, stacked)
MODELS = {
    "rnn": (False, False, False, False),
    "dt": (True, False, False, False),
    "dts": (True, False, True, False),
    "do": (False, True, False, False),
    "dot": (True, True, False, False),
    "dots": (True, True, True, False),
    "srnn": (False, False, False, True),
    "sdts": (True, False, True, True),
    "sdots": (True, True, True, True),
}


@dataclass(frozen=True)
class Describe:
    """Show a model: equations, shapes, parameter counts, picture.

    `deeprnn describe --table1` lists the paper's Table 1 beside our counts;
    `deeprnn describe dots --hidden 400 --intermediate 400 --output-hidden 400` any model of the family;
    `deeprnn describe lstm --hidden 400` or `my_cells.py:Paced` a cell; `deeprnn describe paper/jsb/dots` the model of
    a recipe, `deeprnn describe runs/x` that of a run.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    """rnn, dt, dts, do, dot, dots, srnn, sdts, sdots, a cell such as lstm or my_cells.py:Paced, a recipe, or a run"""
    table1: bool = False
    """print the 20 sizes of the paper's Table 1"""
    input: int = 88
    """length of the input vector, or number of symbols"""
    output: int | None = None
    """number of outputs (as many as inputs)"""
    hidden: tuple[int, ...] = (200,)
    """units of the state; for stacked models one number per level, or one for all"""
    levels: int | None = None
    """levels of a stacked model when --hidden is one number (2)"""
    intermediate: tuple[int, ...] = ()
    """units of the transition's intermediate layers (as many as --hidden)"""
    output_hidden: tuple[int, ...] = ()
    """units of the output function's hidden layers (as many as --hidden)"""
    input_hidden: tuple[int, ...] = ()
    """units of a deep input function"""
    options: tuple[str, ...] = ()
    """arguments of a cell: depth=5 zoneout=0.1"""
    unit: str = "sigmoid"
    """φ by name: sigmoid, tanh, relu, softsign, …, maxout:N, lp:N"""
    output_unit: str = "sigmoid"
    """unit of the output function's hidden layers"""
    shortcut: Literal["none", "last", "all"] | None = None
    """which transition layers h(t-1) also reaches directly"""
    input_to: Literal["first", "last", "all"] | None = None
    """which transition layers the input enters"""
    input_to_levels: Literal["first", "all"] = "first"
    """whether the input also enters the upper levels of a stack"""
    output_from: Literal["top", "all"] = "top"
    """whether the output sees all levels of a stack"""
    nade: int = 0
    """hidden units of a NADE, whose notes depend on each other; 0: independent notes"""
    text: bool = False
    """symbols with a softmax, instead of frames with independent notes"""
    svg: Path | None = None
    """write the picture here"""
    png: Path | None = None
    """write the picture here"""
    json: bool = False
    """print one JSON document instead"""

    def run(self) -> int:
        """Print and draw what was asked for."""
        if self.table1:
            if self.model or self.svg or self.png:
                raise UserError(
                    "--table1 prints sizes and draws nothing: leave the model, --svg and --png out"
                )
            return show_table1(self.json)
        spec = self.spec()
        show_json(spec) if self.json else show_model(spec)
        self.draw(spec)
        return 0

    def spec(self) -> ModelSpec:
        """The model asked for."""
        if self.model is None:
            raise UserError(f"name a model ({', '.join(MODELS)}) or a run folder, or ask for --table1")
        from deeprnn.model.models import assemble

        if self.model not in MODELS:
            return self.cell_spec() or self.recipe_spec() or run_spec(self.model)
        deep, deep_output, short, stacked = MODELS[self.model]
        if self.intermediate and not deep:
            raise UserError(
                f"{self.model} has no intermediate layers: leave --intermediate out, or describe dt or dts"
            )
        if self.output_hidden and not deep_output:
            raise UserError(
                f"{self.model} has a shallow output: leave --output-hidden out, or describe do or dots"
            )
        if len(self.hidden) > 1 and not stacked:
            raise UserError(
                f"{self.model} has one level, --hidden gives {len(self.hidden)}: describe srnn or sdts"
            )
        hidden = self.hidden * (self.levels or 2) if stacked and len(self.hidden) == 1 else self.hidden
        if self.levels is not None and self.levels != len(hidden):
            has = f"{self.model} has one level" if not stacked else f"--hidden gives {len(hidden)} levels"
            raise UserError(
                f"--levels {self.levels}: {has}; leave it out, or describe srnn with one --hidden"
            )
        return assemble(
            input_size=self.input,
            output_size=self.input if self.output is None else self.output,
            hidden_sizes=hidden,
            intermediate=(self.intermediate or hidden[:1]) if deep else (),
            output_hidden=(self.output_hidden or hidden[:1]) if deep_output else (),
            shortcut=self.shortcut or ("last" if short else "none"),
            input_to=self.input_to or ("all" if short else "first"),
            unit=self.unit,
            output_unit=self.output_unit,
            **self.output_kind(),
            output_from=self.output_from,
            input_to_levels=self.input_to_levels,
            input_mlp=self.input_hidden,
        )

    def output_kind(self) -> dict[str, Any]:
        """The output's distribution, as arguments of `assemble`."""
        if self.nade and self.text:
            raise UserError("--nade is for frames of notes, --text for symbols: choose one")
        if self.nade:
            return {"output": "nade", "nade_size": self.nade}
        return {"output": "categorical" if self.text else "bernoulli"}

    def cell_spec(self) -> ModelSpec | None:
        """A model whose levels are cells, None where no cell is meant."""
        from deeprnn.cells import lookup
        from deeprnn.model.models import assemble

        name = self.model or ""
        if name not in lookup.LIBRARY and not lookup.is_own(name):
            return None
        return assemble(
            input_size=self.input,
            output_size=self.input if self.output is None else self.output,
            hidden_sizes=self.hidden * (self.levels or 1) if len(self.hidden) == 1 else self.hidden,
            intermediate=self.intermediate,
            output_hidden=self.output_hidden,
            output_unit=self.output_unit,
            **self.output_kind(),
            output_from=self.output_from,
            cell=lookup.load(name),
            cell_options=self.options,
        )

    def recipe_spec(self) -> ModelSpec | None:
        """The model that a recipe trains on its own data, None where no recipe is meant."""
        from deeprnn.model import paper
        from deeprnn.training.defaults import is_recipe
        from deeprnn.training.recipe import load_recipe

        if not is_recipe(self.model or ""):
            return None
        recipe = load_recipe(self.model or "")
        size = paper.INPUTS.get(recipe.data.name, self.input)
        text = self.text or recipe.data.name.startswith("ptb") or recipe.data.level in ("char", "word")
        return recipe.model.spec(size, text, recipe.regulariser.dropout)

    def draw(self, spec: ModelSpec) -> None:
        """Write the pictures asked for."""
        from deeprnn.files import write_atomically
        from deeprnn.render import model_diagram

        for path, content in ((self.svg, model_diagram.model_svg), (self.png, model_diagram.model_png)):
            if path is None:
                continue
            write_atomically(path, content(spec))
            console(stderr=True).print(f"wrote {path}")


def run_spec(name: str) -> ModelSpec:
    """The model of a run folder, or of the run by that name that comes with deeprnn."""
    from deeprnn.model.specs import ModelSpec
    from deeprnn.runs import shipped

    folder = shipped.find(name) or Path(name)
    path = folder / "run.json"
    if (folder / "population.json").is_file():  # its members differ in their seeds alone
        path = min(folder.glob("*/run.json"), default=path)
    if not path.is_file():
        from deeprnn.cells.library import LIBRARY

        raise UserError(
            f"{name!r} is neither a model nor a cell nor a recipe nor the folder of a run: models are "
            f"{', '.join(MODELS)}; cells are {', '.join(LIBRARY)}, and your own as my_cells.py:Paced"
        )
    try:
        info = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(info, dict) or "model" not in info:
        raise UserError(f"{path} describes no model: it is no run of deeprnn, or a damaged one")
    return ModelSpec.from_dict(info["model"])
