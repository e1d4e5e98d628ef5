"""From a study's plan and its ledger to the jobs that are left: the search, then the seeds of what was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from deeprnn.reproduction import statistics
from deeprnn.reproduction.cells import model_spec
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.kernels import loop_of
from deeprnn.reproduction.plan import Job, JobPlan, finished_members, member_recipes
from deeprnn.reproduction.study.plan_file import RATE, Contender, Study, Trial, member_key, members
from deeprnn.training.recipe import Recipe, override


@dataclass(frozen=True)
class Runs:
    """What a study's ledger holds: entries by what they were trained by, and what diverged."""

    entries: Mapping[Recipe, Entry]
    diverged: frozenset[Recipe] = frozenset()

    @classmethod
    def of(cls, entries: Iterable[Entry], diverged: Iterable[Recipe] = ()) -> Runs:
        """A run that time cut off is no run of a study."""
        return cls(
            {member_key(e.recipe): e for e in entries if not e.cut_off}, frozenset(map(member_key, diverged))
        )

    def ended(self, recipe: Recipe, stage: Recipe | None) -> bool:
        """Whether nothing is left to train of a member, its first stage's end included."""
        recipes = (recipe,) if stage is None else (recipe, stage)
        return member_key(recipe) in self.entries or any(member_key(r) in self.diverged for r in recipes)


def has_diverged(runs: Runs, recipe: Recipe, stage: Recipe | None) -> bool:
    """Whether a member ended without a result, or its first stage did."""
    return member_key(recipe) not in runs.entries and runs.ended(recipe, stage)


class Candidate(NamedTuple):
    """A trial, and its cost on validation."""

    trial: Trial
    cost: float

    @property
    def hopeless(self) -> bool:
        """Whether it stands for a search of which every trial diverged."""
        return self.cost == float("inf")


def ranking(study: Study, contender: Contender, data: str, runs: Runs) -> list[Candidate]:
    """The trials that have ended with a result, best first; one that diverged at any search seed has none."""
    trials = []
    for trial in study.family(contender).trials:
        recipes = members(study, contender, data, trial)
        entries = [runs.entries.get(member_key(recipe)) for recipe, _ in recipes]
        if None not in entries:
            trials.append(Candidate(trial, statistics.mean([e.value("valid") for e in entries if e])))
    return sorted(trials, key=lambda candidate: candidate.cost)


def chosen(study: Study, contender: Contender, data: str, runs: Runs) -> Candidate | None:
    """The trial that is best on validation; None until all trials have ended, a hopeless one where all diverged."""
    for trial in study.family(contender).trials:
        if not all(runs.ended(*pair) for pair in members(study, contender, data, trial)):
            return None
    return next(iter(ranking(study, contender, data, runs)), Candidate({}, float("inf")))


class Planner:
    """Collects jobs, each population once, each after the first stage that it needs."""

    def __init__(self, study: Study, runs: Runs, root: Path) -> None:
        self.study, self.runs, self.trained = study, runs, finished_members(root)
        self.plan = JobPlan()
        self.known: dict[Recipe, Job] = {}

    def search(self, contender: Contender, data: str) -> None:
        """Add jobs for what is left of a contender's trials."""
        trials = self.study.family(contender).trials
        recipes = [pair for trial in trials for pair in members(self.study, contender, data, trial)]
        self._add(f"{data}/{contender.name}", recipes, "search")

    def final(self, contender: Contender, data: str, trial: Trial) -> None:
        """Add jobs for what is left of a contender's final seeds."""
        recipes = members(self.study, contender, data, trial, final=True)
        self._add(f"{data}/{contender.name}", recipes, "seeds")

    def _add(self, name: str, recipes: Sequence[tuple[Recipe, Recipe | None]], phase: str) -> None:
        unfinished = [pair for pair in recipes if not self.runs.ended(*pair)]
        stages = [stage for _, stage in unfinished if stage is not None and self._untrained(stage)]
        self._populations(
            f"{name}-first-stage", [(stage, None) for stage in stages], f"first stage of {name}, {phase}"
        )
        self._populations(f"{name}-{phase}", unfinished, phase)

    def _untrained(self, stage: Recipe) -> bool:
        known = member_key(stage) in self.known
        return not known and (identity(stage), stage.seeds[0]) not in self.trained

    def _populations(self, name: str, recipes: Sequence[tuple[Recipe, Recipe | None]], why: str) -> None:
        """Members that train in lockstep as one job: seeds and rates, where order and first stages allow it."""
        groups: dict[Any, list[tuple[Recipe, Recipe | None]]] = {}
        for recipe, stage in recipes:
            if member_key(recipe) not in self.known:
                groups.setdefault(_group(recipe, stage), []).append((recipe, stage))
        for group in groups.values():
            recipe, stage = group[0]
            seeds = sorted({r.seeds[0] for r, _ in group})
            rates = sorted({r.optimiser.rate for r, _ in group})
            grid = {"rates": rates} if len(rates) > 1 else {"optimiser.rate": rates[0]}
            population = override(recipe, {"seeds": seeds, **grid})
            first = None if stage is None else override(stage, {"seeds": seeds})
            job = Job(name, population, self._needed(first), first, why)
            job.name = f"{name}-{job.identity}" + (f"-{seeds[0]}" if not _packs(recipe) else "")
            for seed_members in member_recipes(population).values():
                self.known |= {member_key(member): job for member in seed_members}
            self.plan.jobs.append(job)

    def _needed(self, stage: Recipe | None) -> Job | None:
        if stage is None:
            return None
        for seed in stage.seeds:
            job = self.known.get(member_key(override(stage, {"seeds": [seed]})))
            if job is not None:
                return job
        return None


def _packs(recipe: Recipe) -> bool:
    """Whether members train in lockstep.

    With lanes and an order each, their epochs differ in length; and what takes most of a GPU by itself, as wide models
    do, takes longer in twos than one after the other.
    """
    if recipe.data.order != "shared" and recipe.data.lanes > 1:
        return False
    spec = model_spec(recipe)
    if spec is None:
        return True
    alone, together = (loop_of(spec, recipe.data.lanes, members) for members in (1, 2))
    return together.small_kernels is None and together.step < 2 * alone.step


def _group(recipe: Recipe, stage: Recipe | None) -> Any:
    """Equal for members of one population. A first stage has one rate, so that its second has, too."""
    if not _packs(recipe):
        return recipe
    erased = {"seeds": [0]} if stage is not None else {"seeds": [0], RATE: 1.0}
    return override(recipe, erased), None if stage is None else replace(stage, seeds=(0,))


def study_plan(
    study: Study, runs: Runs, root: Path, only: Sequence[str] = (), ahead: bool = False
) -> tuple[JobPlan, int]:
    """The jobs that can be run now, and how many contenders are not chosen yet.

    `only` names a slice (`Study.entrants`). `ahead` also takes the seeds of those, with the first trial's settings.
    """
    planner = Planner(study, runs, root)
    waiting = 0
    for contender, name in study.entrants(only):
        planner.search(contender, name)
    for contender, name in study.entrants(only):
        best = chosen(study, contender, name, runs)
        if best is None:
            waiting += 1
            if ahead:
                planner.final(contender, name, study.family(contender).trials[0])
        elif not best.hopeless:
            planner.final(contender, name, best.trial)
    return planner.plan, waiting
