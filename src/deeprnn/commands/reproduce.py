"""`deeprnn reproduce`: the paper's experiments again, from plan to table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deeprnn.reproduction.runner import Outcome, Settings


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments: plan, train in dependency order, end with the table.

    What the ledger has is skipped; an interrupted call goes on where it stopped. For example:
    `deeprnn reproduce --fresh --seeds 11..15` trains everything anew and compares it with what is published,
    `deeprnn reproduce --only nottingham/dts --budget 30`, `deeprnn reproduce --plan` to see the plan.

    `--study depth` runs a study instead: contenders with one grid, chosen on validation, then new seeds scored on
    test once. `deeprnn report --study depth` tells what came of it.
    """

    only: tuple[str, ...] = ()
    """data sets (jsb), cells (jsb/dots) or patterns (*/rnn); everything when empty"""
    fresh: bool = False
    """train anew into a ledger of its own, and compare it with the published one"""
    seeds: str = ""
    """how many seeds of each cell, or which: 5, 11..15 or 3,7 (5 for music, 3 for language)"""
    budget: float | None = None
    """minutes after which nothing is started and what runs is saved"""
    study: str = ""
    """run a study in place of the cells: depth, pretraining, input, commutative, extras or beyond, or a plan's .toml
    file"""
    minutes: float | None = None
    """the same as --budget"""
    device: str = "auto"
    """auto, cpu or cuda"""
    jobs: int | None = None
    """populations at once (4 on a GPU, 1 on the CPU)"""
    engine: Literal["local", "ray"] = "local"
    """this machine, or an existing Ray cluster, whose nodes all reach the run folders and the ledger"""
    address: str = ""
    """of the Ray cluster: host:port, ray://host:port or auto"""
    plan: bool = False
    """show the plan and stop"""
    extras: bool = False
    """also the models the paper names but does not train"""
    override: tuple[str, ...] = ()
    """changes to recipes: field=value, or data/model:field=value"""
    runs: Path | None = None
    """where the run folders go (runs/reproduce, or runs/fresh)"""
    ledger: Path | None = None
    """folder of the ledger's entries (results/runs, ledger/ in the folder of the fresh runs, results/studies/NAME)"""
    published: Path = Path("results/runs")
    """with --fresh: the ledger to compare with"""
    clean: bool = False
    """with --fresh: score finished runs also without near-duplicates of the training part, into clean.json beside
    the ledger"""

    def run(self) -> int:
        """Plan, run, and print the table."""
        from deeprnn.console import console
        from deeprnn.errors import UserError
        from deeprnn.reproduction.clean_scores import score_finished
        from deeprnn.reproduction.run import describe, plan_of, reproduce
        from deeprnn.training.loading import load_data_once

        settings = self._settings()
        if self.clean and not self.fresh:
            raise UserError("--clean is for --fresh: it needs the parameters of runs, which a ledger has not")
        if self.study:
            return self._study(settings)
        if self.plan:
            console().print(describe(plan_of(settings), settings))
            return 0
        outcome = reproduce(settings, say=lambda text: print(text, flush=True))
        if self.clean:
            score_finished(settings.root, settings.ledger, settings.device, load_data_once)
        show_tables(settings)
        return conclude(outcome, ", ".join(outcome.unfinished))

    def _settings(self) -> Settings:
        """The options as the runner takes them."""
        from deeprnn.reproduction.entries import FOLDER
        from deeprnn.reproduction.run import default_jobs, parse_seeds
        from deeprnn.reproduction.runner import ROOT, Settings
        from deeprnn.training.loading import pick_device

        elsewhere = self.plan and self.device.startswith(
            "cuda"
        )  # the time on a GPU, wherever the plan is shown
        device = self.device if elsewhere else str(pick_device(self.device))
        jobs = self.jobs if self.jobs is not None else default_jobs(device)
        root = self.runs or (Path("runs/fresh") if self.fresh else ROOT)
        return Settings(
            only=self.only,
            extras=self.extras,
            seeds=parse_seeds(self.seeds) if self.seeds else None,
            budget=self.budget or self.minutes,
            device=device,
            jobs=jobs,
            overrides=self.override,
            root=root,
            ledger=self.ledger or (root / "ledger" if self.fresh else FOLDER),
            published=self.published if self.fresh else None,
            engine=self.engine,
            address=self.address,
        )

    def _study(self, settings: Settings) -> int:
        """Go on with a study, or show its plan."""
        from dataclasses import replace

        from deeprnn.console import console
        from deeprnn.errors import UserError
        from deeprnn.reproduction.entries import FOLDER
        from deeprnn.reproduction.study.analysis import results
        from deeprnn.reproduction.study.plan_file import read_study
        from deeprnn.reproduction.study.report import text
        from deeprnn.reproduction.study.run import describe_study, read_runs, run_study, study_ledger

        study, ledger = read_study(self.study), study_ledger(self.study, self.ledger or FOLDER)
        if self.seeds or self.override or self.extras or self.fresh:
            raise UserError(
                "--seeds, --override, --extras and --fresh are not for a study: its plan says what is run"
            )
        if self.runs is None:
            settings = replace(settings, root=Path("runs/studies") / study.name)
        if self.plan:
            console().print(describe_study(study, settings, ledger))
            return 0
        outcome = run_study(study, settings, ledger, say=lambda line: print(line, flush=True))
        print("\n" + text(results(study, read_runs(ledger))))
        return conclude(outcome, f"{len(outcome.unfinished)} populations")


def show_tables(settings: Settings) -> None:
    """The ledger's tables, and for a rerun how it compares with what is published."""
    from deeprnn.console import width
    from deeprnn.reproduction import tables
    from deeprnn.reproduction.compare import compare, comparison_text

    entries = tables.read_ledger(settings.ledger)
    print("\n" + tables.text_tables(entries, width()))
    if settings.published is not None:
        print(f"\nThis rerun beside {settings.published}, mean ± deviation over seeds, test:")
        print(comparison_text(compare(entries, tables.read_ledger(settings.published))))


def conclude(outcome: Outcome, unfinished: str) -> int:
    """What failed, and what is left; the exit status."""
    for name, error in outcome.failed.items():
        print(f"failed: {name}: {error}")
    if outcome.unfinished:
        print(f"not finished: {unfinished}. The same command goes on with them.")
    return outcome.status
