"""`deeprnn reproduce`: the paper's experiments again, from plan to table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments: plan, train in dependency order, end with the table.

    What the ledger has is skipped; an interrupted call goes on where it stopped. For example:
    `deeprnn reproduce --only jsb --seeds 1`, `deeprnn reproduce --only nottingham/dts --budget 30`,
    `deeprnn reproduce --plan` to see the plan and the time it expects.
    """

    only: tuple[str, ...] = ()
    """data sets (jsb), cells (jsb/dots) or patterns (*/rnn); everything when empty"""
    seeds: int | None = None
    """seeds of each cell (5 for music, 3 for language)"""
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
    runs: Path = Path("runs/reproduce")
    """where the run folders go"""
    ledger: Path = Path("results/runs")
    """folder of the ledger's entries"""

    def run(self) -> int:
        """Plan, run, and print the table."""
        from deeprnn.console import console, width
        from deeprnn.reproduction import tables
        from deeprnn.reproduction.run import Settings, default_jobs, describe, plan_of, reproduce
        from deeprnn.training.session import pick_device

        device = str(pick_device(self.device))
        jobs = self.jobs if self.jobs is not None else default_jobs(device)
        settings = Settings(
            self.only,
            self.extras,
            self.seeds,
            self.budget,
            device,
            jobs,
            self.override,
            self.runs,
            self.ledger,
            self.engine,
            self.address,
        )
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
