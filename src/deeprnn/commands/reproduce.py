"""`deeprnn reproduce`: the paper's experiments again, from plan to table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments: plan, train in dependency order, end with the table.

    What the ledger has is skipped; an interrupted call goes on where it stopped. For example:
    `deeprnn reproduce --fresh --seeds 11..15` trains everything anew and compares it with what is published,
    `deeprnn reproduce --only nottingham/dts --budget 30`, `deeprnn reproduce --plan` to see the plan.
    """

    only: tuple[str, ...] = ()
    """data sets (jsb), cells (jsb/dots) or patterns (*/rnn); everything when empty"""
    fresh: bool = False
    """train anew into a ledger of its own, and compare it with the published one"""
    seeds: str = ""
    """how many seeds of each cell, or which: 5, 11..15 or 3,7 (5 for music, 3 for language)"""
    budget: float | None = None
    """minutes after which nothing is started and what runs is saved"""
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
    """folder of the ledger's entries (results/runs, or ledger/ in the folder of the fresh runs)"""
    published: Path = Path("results/runs")
    """with --fresh: the ledger to compare with"""

    def run(self) -> int:
        """Plan, run, and print the table."""
        from deeprnn.console import console, width
        from deeprnn.reproduction import tables
        from deeprnn.reproduction.compare import compare, comparison_text
        from deeprnn.reproduction.entries import FOLDER
        from deeprnn.reproduction.run import (
            ROOT,
            Settings,
            default_jobs,
            describe,
            parse_seeds,
            plan_of,
            reproduce,
        )
        from deeprnn.training.session import pick_device

        device = str(pick_device(self.device))
        jobs = self.jobs if self.jobs is not None else default_jobs(device)
        root = self.runs or (Path("runs/fresh") if self.fresh else ROOT)
        settings = Settings(
            only=self.only,
            extras=self.extras,
            seeds=parse_seeds(self.seeds) if self.seeds else None,
            budget=self.budget,
            device=device,
            jobs=jobs,
            overrides=self.override,
            root=root,
            ledger=self.ledger or (root / "ledger" if self.fresh else FOLDER),
            published=self.published if self.fresh else None,
            engine=self.engine,
            address=self.address,
        )
        if self.plan:
            console().print(describe(plan_of(settings), settings))
            return 0
        outcome = reproduce(settings, say=lambda text: print(text, flush=True))
        entries = tables.read_ledger(settings.ledger)
        print("\n" + tables.text_tables(entries, width()))
        if settings.published is not None:
            print(f"\nThis rerun beside {settings.published}, mean ± deviation over seeds, test:")
            print(comparison_text(compare(entries, tables.read_ledger(settings.published))))
        for name, error in outcome.failed.items():
            print(f"failed: {name}: {error}")
        if outcome.unfinished:
            print(f"not finished: {', '.join(outcome.unfinished)}. The same command goes on with them.")
        return outcome.status
