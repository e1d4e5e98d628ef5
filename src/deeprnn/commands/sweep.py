"""`deeprnn sweep`: search over recipe fields, go on with a search, and score its winner."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from deeprnn.commands.train import Train
    from deeprnn.sweeps.spec import Spec
    from deeprnn.training.recipe import Recipe

SWEEPS = Path("sweeps")


@dataclass(frozen=True)
class Sweep:
    """Search over recipe fields: grid, random or TPE, hopeless trials pruned, trials of one shape in lockstep.

    deeprnn sweep rates.toml | deeprnn sweep paper/jsb/rnn | deeprnn sweep sweeps/rates --score-test

    The file names a recipe, [space] the fields and their values ("log:0.001..1", "uniform:0..0.2", "int:1..8" or a
    list), [override] what else is changed. The same command goes on after Ctrl-C or a kill. Trials are compared on
    validation; --score-test scores the winner of a finished sweep on test, once.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")]
    """a sweep's file, its folder, or a packaged one such as paper/jsb/rnn"""
    out: Path | None = None
    """the sweep's folder; without it sweeps/NAME"""
    trials: int | None = None
    """in place of the file's number"""
    engine: Literal["local", "ray"] = "local"
    """this machine, or an existing Ray cluster"""
    address: str = ""
    """of the Ray cluster: host:port, ray://host:port or auto; without it Ray runs on this machine"""
    jobs: int | None = None
    """populations at once (local: cores, or two a GPU; ray: what the cluster has)"""
    pack: int | None = None
    """models in one population at most (16 on a GPU, 4 on the CPU)"""
    device: str = "auto"
    """auto, cpu or cuda"""
    storage: str = ""
    """an Optuna journal file or a database such as postgresql://host/name, which several sweeps may share; the folder
    remembers it, without its password"""
    store: str = ""
    """an address that all machines reach (file:///…, s3://…, gs://…), for checkpoints"""
    score_test: bool = False
    """score the winner of a finished sweep on test; a second time only repeats what was recorded"""
    quiet: bool = False
    """print nothing but warnings and errors"""

    def run(self) -> int:
        """Run, go on, or score."""
        from deeprnn.sweeps.spec import load_spec

        spec = load_spec(self.what)
        return search(spec, self._folder(), self)

    def _folder(self) -> Path:
        if self.out is not None:
            return self.out
        path = Path(self.what)
        return (
            path if path.is_dir() else SWEEPS / self.what.removesuffix(".toml").replace("/", "-").strip(".-")
        )


def from_train(train: Train, recipe: Recipe, stem: str) -> int:
    """`deeprnn train DATA --sweep field=values …`: a sweep of the recipe that it would train."""
    from deeprnn.commands.train import folder_below
    from deeprnn.errors import UserError
    from deeprnn.sweeps.space import KINDS
    from deeprnn.sweeps.spec import make_spec
    from deeprnn.training.recipe import parse_value

    ignored = {
        "--json": train.json,
        "--ledger": train.ledger,
        "--track": train.track,
        "--threads": train.threads,
    }
    if rejected := [option for option, value in ignored.items() if value]:
        raise UserError(
            f"{' and '.join(rejected)} cannot go with --sweep, whose trials are no runs of their own"
        )
    space = {}
    for text in train.sweep:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(
                f"--sweep {text!r} needs the form field=values, as in optimiser.rate=log:0.001..1"
            )
        space[name.replace("-", "_")] = value if value.partition(":")[0] in KINDS else parse_value(value)
    tables = {"space": space, "sampler": train.sampler, "trials": train.trials}
    name = train.name or f"{stem}-{'-'.join(n.rpartition('.')[2] for n in space)}"
    options = Sweep(what=name, trials=train.trials, device=train.device, quiet=train.quiet)
    return search(make_spec(recipe, tables), folder_below(train.out or SWEEPS, name), options)


def search(spec: Spec, folder: Path, options: Any) -> int:
    """A sweep with everything that a person sees of it; the exit status."""
    from dataclasses import replace

    from deeprnn.cells import lookup
    from deeprnn.commands.sweep_view import SweepView, conclude, score_text
    from deeprnn.console import program
    from deeprnn.errors import UserError
    from deeprnn.sweeps.engines import make_engine
    from deeprnn.sweeps.html import write_page
    from deeprnn.sweeps.run import Settings, default_pack, run_sweep
    from deeprnn.sweeps.winner import score_winner
    from deeprnn.training.loading import pick_device, rooted
    from deeprnn.training.recipe import override
    from deeprnn.training.saving import catch_signals

    if options.trials is not None:
        if options.trials < 1:
            raise UserError(f"--trials must be at least 1, got {options.trials}")
        most = spec.space.grid_size if spec.sampler == "grid" else options.trials
        spec = replace(spec, trials=min(options.trials, most))
    if spec.recipe.model.cell:  # a person asks for it: its code may run
        spec = replace(
            spec, recipe=override(spec.recipe, {"model.cell": lookup.load(spec.recipe.model.cell)})
        )
    spec = replace(spec, recipe=rooted(spec.recipe))
    if options.score_test:
        record, outcome = score_winner(spec, folder, options.storage)
        write_page(spec, folder, outcome)
        print(score_text(record))
        return 0
    device = (
        options.device
        if options.engine == "ray" and options.device == "cuda"
        else str(pick_device(options.device))
    )
    pack = options.pack if options.pack is not None else default_pack(device)
    settings = Settings(folder, pack, options.storage, options.store)
    engine = make_engine(options.engine, device, options.jobs, options.address)
    with catch_signals() as received, SweepView(spec, folder, shown=not options.quiet) as view:
        outcome = run_sweep(spec, settings, engine, view, received)
    if received:
        print(f"saved; the same command goes on, or: {program()} sweep {shlex.quote(str(folder))}")
        return 128 + received[0]
    conclude(spec, folder, outcome, shown=not options.quiet)
    has_winner = any(t.state == "complete" for t in outcome.trials)
    return 0 if has_winner or not outcome.finished else 1
