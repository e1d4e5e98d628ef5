"""`deeprnn reproduce`: the paper's experiments again, from plan to table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeprnn.reproduction.run import Settings


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments: plan, train in dependency order, end with the table.

    What the ledger has is skipped; an interrupted call goes on where it stopped. For example:
    `deeprnn reproduce --only jsb --seeds 1`, `deeprnn reproduce --only nottingham/dts --budget 30`,
    `deeprnn reproduce --plan` to see the plan and the time it expects.

    `--study depth` runs a study instead: contenders with one grid, chosen on validation, then new seeds scored on
    test once. `deeprnn report --study depth` tells what came of it.
    """

    only: tuple[str, ...] = ()
    """data sets (jsb), cells (jsb/dots) or patterns (*/rnn); everything when empty"""
    seeds: int | None = None
    """seeds of each cell (5 for music, 3 for language)"""
    budget: float | None = None
    """minutes after which nothing is started and what runs is saved"""
    study: str = ""
    """run a study in place of the cells: depth, pretraining, input, commutative or extras, or a plan's .toml file"""
    minutes: float | None = None
    """the same as --budget"""
    device: str = "auto"
    """auto, cpu or cuda"""
    jobs: int | None = None
    """populations at once (4 on a GPU, 1 on the CPU)"""
    plan: bool = False
    """show the plan and stop"""
    extras: bool = False
    """also the models the paper names but does not train"""
    override: tuple[str, ...] = ()
    """changes to recipes: field=value, or data/model:field=value"""
    runs: Path = Path("runs/reproduce")
    """where the run folders go"""
    ledger: Path = Path("results/runs")
    """folder of the ledger's entries; of a study results/studies/NAME unless this is given"""

    def run(self) -> int:
        """Plan, run, and print the table."""
        from deeprnn.console import console, width
        from deeprnn.reproduction import tables
        from deeprnn.reproduction.run import Settings, default_jobs, describe, plan_of, reproduce
        from deeprnn.training.session import pick_device

        ahead = self.plan and self.device.startswith("cuda")  # the time on a GPU, wherever the plan is shown
        device = self.device if ahead else str(pick_device(self.device))
        jobs = self.jobs if self.jobs is not None else default_jobs(device)
        settings = Settings(
            self.only,
            self.extras,
            self.seeds,
            self.budget or self.minutes,
            device,
            jobs,
            self.override,
            self.runs,
            self.ledger,
        )
        if self.study:
            return self._study(settings)
        if self.plan:
            console().print(describe(plan_of(settings), settings))
            return 0
        outcome = reproduce(settings, say=lambda text: print(text, flush=True))
        print("\n" + tables.text_tables(tables.read_ledger(self.ledger), width()))
        for name, error in outcome.failed.items():
            print(f"failed: {name}: {error}")
        if outcome.unfinished:
            print(f"not finished: {', '.join(outcome.unfinished)}. The same command goes on with them.")
        return outcome.status

    def _study(self, settings: Settings) -> int:
        """Go on with a study, or show its plan."""
        from dataclasses import replace

        from deeprnn.console import console
        from deeprnn.errors import UserError
        from deeprnn.reproduction.study.analysis import results, text
        from deeprnn.reproduction.study.plan_file import read_study
        from deeprnn.reproduction.study.run import describe_study, read_runs, run_study, study_ledger

        study, ledger = read_study(self.study), study_ledger(self.study, self.ledger)
        if self.seeds is not None or self.override or self.extras:
            raise UserError("--seeds, --override and --extras are not for a study: its plan says what is run")
        if settings.root == Reproduce.runs:
            settings = replace(settings, root=Path("runs/studies") / study.name)
        if self.plan:
            console().print(describe_study(study, settings, ledger))
            return 0
        outcome = run_study(study, settings, ledger, say=lambda line: print(line, flush=True))
        print("\n" + text(results(study, read_runs(ledger))))
        for name, error in outcome.failed.items():
            print(f"failed: {name}: {error}")
        if outcome.unfinished:
            print(f"not finished: {len(outcome.unfinished)} populations. The same command goes on with them.")
        return outcome.status
