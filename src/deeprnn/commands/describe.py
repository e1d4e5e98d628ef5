"""`deeprnn describe`: a model's equations, shapes, counts and picture; the paper's Table 1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from deeprnn.console import console, show_rows
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
        """What the output is of."""
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


def table1_rows() -> list[dict]:
    """The paper's Table 1 with our counts of weight-matrix entries."""
    from deeprnn.model import paper
    from deeprnn.model.structure import dissect

    return [
        {
            "data": size.data,
            "model": size.model,
            "units": list(size.units),
            "parameters": dissect(paper.spec(size.data, size.model)).weights,
            "paper": size.printed,
        }
        for size in paper.TABLE1
    ]


def show_table1(as_json: bool) -> int:
    """Print Table 1; the exit status tells whether every count agrees."""
    from deeprnn.model.paper import LABELS
    from deeprnn.model.structure import short_count

    rows = table1_rows()
    agree = all(short_count(row["parameters"]) == row["paper"] for row in rows)
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0 if agree else 1
    console().print("Table 1: entries of the weight matrices, biases not counted\n")
    headings = ("data", "model", "units", "weights", "ours", "paper", "equal")
    lines: list[list[str]] = []
    for number, row in enumerate(rows):
        first = not number or row["data"] != rows[number - 1]["data"]
        if first and number:
            lines.append([""] * len(headings))
        mine = short_count(row["parameters"])
        sizes = ", ".join(map(str, row["units"])) + (" ×2" if row["model"] == "srnn" else "")
        equal = "yes" if mine == row["paper"] else "NO"
        name = row["data"] if first else ""
        lines.append([name, LABELS[row["model"]], sizes, f"{row['parameters']:,}", mine, row["paper"], equal])
    show_rows(headings, lines, right=("weights", "ours", "paper"), spare=("weights", "equal"))
    return 0 if agree else 1


def show_model(spec: ModelSpec) -> None:
    """Equations, matrices and counts for a person."""
    from rich.table import Table

    from deeprnn.model.structure import dissect, equations, label, short_count, symbol

    anatomy, out = dissect(spec), console()
    out.print(f"{label(spec)}\n", style="bold")
    for line in equations(spec):
        out.print(f"  {line}")
    out.print()
    table = Table("matrix", "from", "to", box=None, padding=(0, 2))
    table.add_column("shape", justify="right")
    table.add_column("weights", justify="right")
    for link in anatomy.links:
        target = anatomy.layer(link.target)
        level = f" of level {target.level}" if target.level else ""
        source = symbol(anatomy.layer(link.source), "t-1" if link.delayed else "t")
        shape = f"{link.rows} × {link.columns}"
        name = f" ({link.parameter})" if link.parameter else ""
        table.add_row(link.matrix + level + name, source, symbol(target), shape, f"{link.weights:,}")
    out.print(table)
    weights, rest = anatomy.weights, anatomy.parameters - anatomy.weights
    learned = any(layer.unit.startswith("lp") for layer in anatomy.layers)
    others = "biases, orders and centres of Lp units" if learned else "biases"
    others = "biases and other vectors" if any(layer.others for layer in anatomy.layers) else others
    out.print(
        f"\n  {weights:,} weights ({short_count(weights)}) and {rest:,} {others}: {anatomy.parameters:,} in all"
    )


def show_json(spec: ModelSpec) -> None:
    """The same as one JSON document."""
    from deeprnn.model.structure import dissect, equations, label

    anatomy = dissect(spec)
    matrices = [
        {
            "name": k.parameter or k.matrix,
            "from": k.source,
            "to": k.target,
            "kind": k.kind,
            "shape": [k.rows, k.columns],
        }
        for k in anatomy.links
    ]
    document = {
        "label": label(spec),
        "weights": anatomy.weights,
        "parameters": anatomy.parameters,
        "equations": equations(spec),
        "matrices": matrices,
        "model": spec.to_dict(),
    }
    print(json.dumps(document, indent=2, ensure_ascii=False))
