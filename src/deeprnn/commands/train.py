"""`deeprnn train`: from data and a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from deeprnn.training.evaluate import Data
    from deeprnn.training.recipe import Recipe


@dataclass(frozen=True)
class Train:
    """Train a model on a benchmark set, your own MIDI folder or text file, or by a recipe.

    deeprnn train jsb --model dots | deeprnn train recipes/paper/jsb/dots.toml | deeprnn train songs/ |
    deeprnn train book.txt --level char

    Every field of a recipe can be changed by its dotted name: --optimiser.rate 0.5 --model.hidden 300
    --stop.epochs 20 --regulariser.weight_noise 0 --data.lanes 8. A wrong name lists the right ones.
    Ctrl-C saves and says how to go on (exit status 130; 143 after SIGTERM).
    """

    what: tyro.conf.Positional[str]
    """a data set (jsb, nottingham, musedata, ptb-char, ptb-word, bach), a recipe, a file or a folder"""
    model: str = ""
    """rnn, dts, dots, srnn, dots-star, dt, do, dot or sdts; without it dots"""
    level: Literal["auto", "char", "word"] = "auto"
    """how a text file is read"""
    seeds: str = ""
    """1..5 or 1,2,3: as many models, trained in lockstep"""
    rates: str = ""
    """1,0.5: every seed at every rate"""
    out: Path = Path("runs")
    """the folder that runs are kept in"""
    name: str = ""
    """the run's own folder there; without it the data's and model's name and a number"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 0
    """CPU threads; 0: as torch chooses"""
    ledger: Path | None = None
    """also write the finished run's entry into this folder"""
    tensorboard: bool = False
    """write TensorBoard logs into the run folder"""
    quiet: bool = False
    """print nothing but errors"""
    json: bool = False
    """print the results as one JSON document, and nothing else"""
    overrides: Annotated[tuple[tuple[str, str], ...], tyro.conf.Suppress] = field(default=())
    """recipe fields from the command line"""

    @classmethod
    def from_argv(cls, argv: Sequence[str], prog: str = "deeprnn train") -> Train:
        """Dotted options go to the recipe, the rest to this command."""
        from dataclasses import replace

        rest, overrides = split_overrides(argv)
        return replace(tyro.cli(cls, prog=prog, args=rest), overrides=tuple(overrides))

    def run(self) -> int:
        """Resolve the recipe, train, and show what came of it."""
        from deeprnn.console import console, escape
        from deeprnn.errors import UserError
        from deeprnn.runs.folder import new_folder
        from deeprnn.training.defaults import resolve
        from deeprnn.training.recipe import override, parse_value
        from deeprnn.training.session import rooted

        set_threads(self.threads)
        recipe, data, remarks = resolve(self.what, self.model, self.level)
        changes = {name: parse_value(text) for name, text in self.overrides}
        changes |= {n: parse_value(t) for n, t in (("seeds", self.seeds), ("rates", self.rates)) if t}
        recipe = rooted(override(recipe, changes))
        if any(name.startswith("data.") for name in changes):
            data = None  # read again, as now described
        if not (self.quiet or self.json):
            for remark in remarks:
                console().print(escape(remark))
        stem = f"{Path(recipe.data.name).stem}-{recipe.model.kind}"
        folder = self._named() if self.name else new_folder(self.out, stem)
        try:
            return conduct(recipe, folder, data=data, options=self)
        except UserError:
            drop_empty(folder)
            raise

    def _named(self) -> Path:
        from deeprnn.errors import UserError

        folder = self.out / self.name
        if (folder / "recipe.toml").exists():
            raise UserError(
                f"{folder} exists: go on with `deeprnn resume {folder}`, or choose another --name"
            )
        return folder


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate `--section.field value` and `--section.field=value` from the other arguments."""
    from deeprnn.errors import UserError

    rest: list[str] = []
    found: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(word)
            continue
        if not equals:
            value = next(words, None)
            if value is None:
                raise UserError(f"{name} needs a value")
        found.append((name.removeprefix("--").replace("-", "_"), value))
    return rest, found


def drop_empty(folder: Path) -> None:
    """Remove a run's folder in which nothing was begun, after an error before the first file."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".lock"}:
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()


def set_threads(threads: int) -> None:
    """Limit torch to so many CPU threads."""
    from deeprnn.errors import UserError

    if threads < 0:
        raise UserError(f"--threads must not be negative, got {threads}")
    if threads:
        import torch

        torch.set_num_threads(threads)


def conduct(recipe: Recipe, folder: Path, *, data: Data | None, options: Any, conclusion: bool = True) -> int:
    """Run a recipe with everything a person sees; the exit status."""
    import json
    import shlex
    import sys
    from contextlib import ExitStack

    from deeprnn.commands import run_view
    from deeprnn.console import program
    from deeprnn.runs import ledger
    from deeprnn.training import keeping, session

    shown = not (options.quiet or options.json)
    with ExitStack() as stack:
        stage = stack.enter_context(ExitStack())

        def watch(trainer: Any, place: Path) -> list[Any]:
            stage.close()  # the first stage's live line gives way to the second's
            watchers: list[Any] = []
            if shown:
                paper = run_view.members(place)[0].info.get("paper")
                watchers.append(stage.enter_context(run_view.View(trainer, place, paper)))
            if options.tensorboard:
                watchers.append(run_view.Board(trainer, place))
            return watchers

        try:
            device = session.pick_device(options.device)
            session.run_recipe(recipe, folder, data=data, device=device, watch=watch)
        except keeping.Interrupted as signal:
            stage.close()
            print(f"saved; go on with: {program()} resume {shlex.quote(str(folder))}", file=sys.stderr)
            return signal.status
    entries = (
        [ledger.record(run, options.ledger) for run in run_view.members(folder)] if options.ledger else []
    )
    if options.json:
        print(json.dumps([run_view.summary(run) for run in run_view.members(folder)]))
    elif shown and conclusion:
        run_view.conclusion(folder)
        for path in entries:
            run_view.console().print(f"ledger: {path}")
    return 0
