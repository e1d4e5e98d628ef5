"""`deeprnn train`: from data and a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from deeprnn import launcher
from deeprnn.commands.arguments import TrackOption, parse
from deeprnn.commands.reading import Reading
from deeprnn.commands.recipe_options import (
    SUGGESTIONS,
    apply,
    field_options,
    join_repeated,
    parse_values,
    show_fields,
    split_overrides,
)

if TYPE_CHECKING:
    from deeprnn.training.recipe import Recipe


RUNS = Path("runs")


@dataclass(frozen=True)
class Train:
    """Train a model on a benchmark set, your own MIDI folder or text file, or by a recipe.

    deeprnn train jsb --model dots | deeprnn train recipes/paper/jsb/dots.toml | deeprnn train songs/ |
    deeprnn train book.txt --level char | deeprnn train bach --model lstm |
    deeprnn train bach --model my_cells.py:Paced --model.cell-options depth=3

    Every field of a recipe can be changed by its dotted name, such as --optimiser.rate 0.5, the most used ones
    by a short one: --epochs (of every stage: a DOT(S) or sRNN has a first one), --minutes (of all stages
    together), --hidden, --lr, --batch-size, --dropout. `deeprnn train DATA --help` shows their values for that data.
    Ctrl-C saves and says how to go on (exit status 130; 143 after SIGTERM).
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """a data set (jsb, nottingham, musedata, ptb-char, ptb-word, bach), a recipe, a file or a folder"""
    model: str = ""
    """rnn, dts, dots, srnn, dots-star, dt, do, dot or sdts; a cell such as lstm, gru, rhn, or your own as
    my_cells.py:Paced; without it dots"""
    level: Literal["auto", "char", "word"] = "auto"
    """how a text file is read"""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    seeds: str = ""
    """1..5 or 1,2,3: as many models, trained in lockstep"""
    rates: str = ""
    """1,0.5: every seed at every rate"""
    transpositions: str = ""
    """music, 0,6: every seed with songs as they are and moved by up to 6 semitones; validation decides"""
    out: Path | None = None
    """the folder that runs are kept in; without it runs, and sweeps with --sweep"""
    name: str = ""
    """the run's own folder there; without it the data's and model's name and a number"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 0
    """CPU threads; 0: the number that is fastest now, which the run then keeps"""
    ledger: Path | None = None
    """also write the finished run's entry into this folder"""
    track: TrackOption = ()
    """watch the run with another program; may be given several times"""
    sweep: tuple[str, ...] = ()
    """search over these fields instead: optimiser.rate=log:0.001..1 model.hidden=[[100],[200]]"""
    trials: int | None = None
    """with --sweep: how many"""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """with --sweep: how they are chosen"""
    no_test: bool = False
    """never score the test part, now or later: for runs of a search (the recipe's evaluation.test = false)"""
    quiet: bool = False
    """print nothing but warnings and errors"""
    json: bool = False
    """print the results as one JSON document, and nothing else"""
    overrides: Annotated[tuple[tuple[str, str], ...], tyro.conf.Suppress] = field(default=())
    """recipe fields from the command line"""

    @classmethod
    def from_argv(cls, argv: Sequence[str], prog: str = "deeprnn train") -> Train:
        """Recipe fields go to the recipe, the rest to this command."""
        from dataclasses import replace

        rest, overrides = split_overrides(join_repeated(argv, "--sweep"))
        try:
            command = parse(cls, rest, prog, other_options=field_options(), suggestions=SUGGESTIONS)
        except SystemExit as end:
            if not end.code:  # the help has been printed
                show_fields(*recipe_for_help(rest, overrides))
            raise
        return replace(command, overrides=tuple(overrides))

    def run(self) -> int:
        """Resolve the recipe, train, and show what came of it."""
        from deeprnn.cells import lookup
        from deeprnn.commands.training import set_threads, train_recipe
        from deeprnn.console import console
        from deeprnn.runs.folder import new_folder
        from deeprnn.training.defaults import resolve
        from deeprnn.training.loading import load_data, pick_device, rooted
        from deeprnn.training.ranks import joined, own_device
        from deeprnn.training.recipe import override

        set_threads(self.threads)
        device = own_device(pick_device(self.device))  # before there is a folder
        self._check_restarts()
        overrides = [*self.overrides, *self.reading.overrides()]
        changes = parse_values(overrides)
        recipe, data, remarks = resolve(self.what, self._model(changes), self.level, changes)
        grid = {"seeds": self.seeds, "rates": self.rates, "transpositions": self.transpositions}
        members = [(name, text) for name, text in grid.items() if text]
        recipe = _limit_every_stage(apply(recipe, [*overrides, *members]), [name for name, _ in overrides])
        if self.no_test:
            recipe = override(recipe, {"evaluation.test": False})
        if recipe.model.cell:  # a person asks for it, here or in a recipe of theirs: its code may run
            recipe = override(recipe, {"model.cell": lookup.load(recipe.model.cell)})
        recipe = rooted(recipe)
        # Read before there is a folder: what cannot be read leaves none behind.
        data = data or load_data(recipe.data)
        stem = f"{Path(recipe.data.name).stem}-{recipe.model.name}"
        if self.sweep:
            from deeprnn.commands.sweep import from_train

            return from_train(self, recipe, stem)
        with joined(device) as ranks:
            if ranks.lead and not (self.quiet or self.json):
                for remark in (*data.remarks, *remarks):
                    console().print(remark)
            folder = Path(
                ranks.on_lead(
                    lambda: str(self._named_folder() if self.name else new_folder(self.out or RUNS, stem))
                )
            )
            new = not launcher.restarts()  # else it goes on with what the first attempt left
            return train_recipe(recipe, folder, data=data, options=self, device=device, ranks=ranks, new=new)

    def _check_restarts(self) -> None:
        from deeprnn.errors import UserError

        if launcher.most_restarts() and not self.name:
            raise UserError(
                "torchrun --max-restarts starts this command again when a process dies: --name its run, so that it is "
                "found then"
            )

    def _model(self, changes: dict[str, Any]) -> str:
        """`--model`, for which `--model.cell` stands too where no recipe says what else the model is."""
        from deeprnn.training.defaults import is_recipe

        cell = changes.get("model.cell")
        return cell if isinstance(cell, str) and not self.model and not is_recipe(self.what) else self.model

    def _named_folder(self) -> Path:
        from deeprnn.errors import UserError

        folder = folder_below(self.out or RUNS, self.name)
        if (folder / "recipe.toml").exists() and not launcher.restarts():
            raise UserError(
                f"{folder} exists: go on with `deeprnn resume {folder}`, or choose another --name"
            )
        return folder


def folder_below(out: Path, name: str) -> Path:
    """The folder of that name in another one, and nowhere else."""
    from deeprnn.errors import UserError

    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise UserError(f"--name {name!r} is no name below {out}: choose the folder with --out")
    return out / path


def _limit_every_stage(recipe: Recipe, typed: Sequence[str]) -> Recipe:
    """Limits from the command line hold for the first stage too, unless that is given one of its own.

    Of epochs each stage has as many, of minutes each has half: a person who gives five means five.
    """
    from deeprnn.training.recipe import override

    if not recipe.pretrain.recipe:
        return recipe
    changes: dict[str, object] = {}
    if "stop.epochs" in typed and "pretrain.epochs" not in typed:
        changes["pretrain.epochs"] = recipe.stop.epochs
    if "stop.minutes" in typed and "pretrain.minutes" not in typed:
        changes |= dict.fromkeys(("pretrain.minutes", "stop.minutes"), recipe.stop.minutes / 2)
    return override(recipe, changes)


def recipe_for_help(words: Sequence[str], overrides: Sequence[tuple[str, str]]) -> tuple[Recipe | None, str]:
    """The recipe that a command line with --help would train, where it names one, and what of."""
    from deeprnn.errors import UserError
    from deeprnn.training.defaults import resolve

    try:
        command = parse(Train, [word for word in words if word not in ("-h", "--help")], quiet=True)
        recipe, _, _ = resolve(command.what, command.model, command.level)
        return apply(recipe, overrides), command.what
    except (UserError, SystemExit):
        return None, ""
