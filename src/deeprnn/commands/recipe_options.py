"""Recipe fields as options of the command line: every one by its dotted name, the most used also by a short one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.training.recipe import Recipe

SHORT = {
    "epochs": "stop.epochs",
    "minutes": "stop.minutes",
    "hidden": "model.hidden",
    "lr": "optimiser.rate",
    "batch-size": "data.lanes",
    "dropout": "regulariser.dropout_output",
}
"""what people type elsewhere, and the field it sets here"""

SUGGESTIONS = {
    "--learning-rate": "--lr",
    "--units": "--hidden",
    "--batch": "--batch-size",
    "--time": "--minutes",
    "--tensorboard": "--track tensorboard",
}
"""words that are no options, and the option that is likely meant"""

MOST_USED = {
    "stop.epochs": "epochs at most; 0: no limit",
    "stop.minutes": "minutes at most; 0: no limit",
    "stop.patience": "epochs without a new best before it ends",
    "model.hidden": "units of the state; 300,300 is a stack of two",
    "model.intermediate": "units of the transition's hidden layers",
    "model.output_hidden": "units of the output's hidden layers",
    "optimiser.name": "sgd, momentum, adam or adamw",
    "optimiser.rate": "learning rate",
    "optimiser.clip": "largest norm of a gradient",
    "data.lanes": "sequences side by side in an update",
    "data.chunk": "steps of an update",
    "regulariser.dropout_output": "share of units that the output does not see",
    "regulariser.weight_noise": "standard deviation of the noise on weights",
}
"""fields that `--help` lists with their values"""


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate recipe fields, `--section.field value`, `--section.field=value` or short, from the other arguments."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        short = name.removeprefix("--").replace("_", "-")
        if not name.startswith("--") or ("." not in name and short not in SHORT):
            rest.append(word)
            continue
        if not equals:
            value = next(words, None)
            if value is None:
                raise UserError(f"{name} needs a value")
        overrides.append((SHORT.get(short) or short.replace("-", "_"), value))
    return rest, overrides


def join_repeated(argv: Sequence[str], option: str) -> list[str]:
    """The words with those of a repeated option behind its first: `--sweep a --sweep b` is `--sweep a b`."""
    rest: list[str] = []
    values: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word != option and not word.startswith(f"{option}="):
            rest.append(word)
            continue
        values += [word.partition("=")[2]] if "=" in word else []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
    return [*rest, option, *values] if option in argv or values else rest


def field_options() -> list[str]:
    """Every recipe field as it can be typed."""
    from deeprnn.training.recipe import field_names

    return [f"--{name}" for name in (*SHORT, *field_names())]


def parse_values(overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Overrides from the command line with their values as a recipe has them."""
    from deeprnn.training.recipe import parse_value

    return {name: parse_value(text) for name, text in overrides}


def changes(recipe: Recipe, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The fields that overrides from the command line set, with their values."""
    values = parse_values(overrides)
    if isinstance(
        values.get("model.hidden"), int
    ):  # of a stack, every level; a list says how many levels there are
        values["model.hidden"] = [values["model.hidden"]] * len(recipe.model.hidden)
    return values


def apply(recipe: Recipe, overrides: Sequence[tuple[str, str]]) -> Recipe:
    """The recipe with overrides from the command line; a model whose shape changes is named by its new one."""
    from deeprnn.training.recipe import override

    changed = override(recipe, changes(recipe, overrides))
    if recipe.model.kind == _shape(recipe):
        changed = override(changed, {"model.kind": _shape(changed)})
    return changed


def _shape(recipe: Recipe) -> str:
    """What a model is called by its levels and its output function; what stands below them has no part in it."""
    from deeprnn.model.notation import short_name
    from deeprnn.model.specs import Dropout

    model = replace(recipe.model, embedding=0, tied=False)
    return short_name(model.spec(1, False, Dropout()))


def show_fields(recipe: Recipe | None, what: str) -> None:
    """The most used fields, with their values where a recipe is known, and the names of all others."""
    from rich.panel import Panel
    from rich.table import Table

    from deeprnn.console import console

    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    if recipe:
        table.add_column(style="cyan", max_width=12)
    table.add_column(style="dim")
    short = {field: name for name, field in SHORT.items()}
    for name, meaning in MOST_USED.items():
        typed, meaning = (
            (f"--{short[name]}", f"{meaning} ({name})") if name in short else (f"--{name}", meaning)
        )
        table.add_row(typed, *([_value(recipe, name)] if recipe else []), meaning)
    title = f"recipe fields, as they are for {what}" if recipe else "recipe fields"
    console().print(Panel(table, title=title, title_align="left", border_style="dim"))
    console().print("All fields can be changed, by their dotted names:", style="dim")
    for section, keys in _sections().items():
        line = f"  --{section}.{', '.join(keys)}"
        console().print(fill(line, console().width, subsequent_indent=" " * 6), style="dim")


def _value(recipe: Recipe, name: str) -> str:
    section, _, key = name.partition(".")
    value = getattr(getattr(recipe, section), key)
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _sections() -> dict[str, list[str]]:
    from deeprnn.training.recipe import field_names

    out: dict[str, list[str]] = {}
    for name in field_names():
        section, dot, key = name.partition(".")
        if dot:
            out.setdefault(section, []).append(key)
    return out
