"""The paper's experiments again: from settings to a plan, the plan in words, and its run."""

from __future__ import annotations

from collections.abc import Callable

from deeprnn.data import sources
from deeprnn.errors import UserError
from deeprnn.reproduction.entries import read_ledger
from deeprnn.reproduction.job import Say
from deeprnn.reproduction.plan import JobPlan, cells_named, make_plan, spans
from deeprnn.reproduction.runner import Outcome, Runner, Settings
from deeprnn.reproduction.times import estimate, makespan, ordered
from deeprnn.training.recipe import parse_value
from deeprnn.training.saving import catch_signals

MOST_SEEDS = 1000
"""of a cell: more is a slip of the keyboard"""


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """`5` is how many, counted from 1; `11..15` and `3,7` are which."""
    value = parse_value(text)
    seeds = value if isinstance(value, list) else []
    is_count = type(value) is int
    if not is_count and not (seeds and all(type(v) is int and v >= 0 for v in seeds)):
        raise UserError(f"--seeds must be how many (5) or which (11..15, or 3,7), got {text!r}")
    count = int(value) if is_count else len(seeds)
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(f"--seeds must be from 1 to {MOST_SEEDS:,}, got {count:,}")
    return count if is_count else tuple(sorted(set(seeds)))


def default_jobs(device: str) -> int:
    """Populations at once; on a GPU what results/bench/h200-one-seed.json was measured with."""
    return 4 if device.startswith("cuda") else 1


def plan_of(settings: Settings) -> JobPlan:
    """The jobs still to be done, with their expected times."""
    if settings.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {settings.jobs}")
    if settings.budget is not None and not settings.budget > 0:
        raise UserError(f"--budget must be above zero minutes, got {settings.budget:g}")
    entries = read_ledger(settings.ledger)
    names = cells_named(settings.only, settings.extras)
    plan = make_plan(names, entries, settings.root, seeds=settings.seeds, overrides=settings.overrides)
    if settings.published is not None:
        if settings.published.resolve() == settings.ledger.resolve():
            raise UserError(f"--fresh needs a ledger of its own, not the published {settings.published}")
        entries = [*entries, *read_ledger(settings.published)]  # which know how long a run takes
    for job in plan.jobs:
        estimate(job, entries, settings.device.partition(":")[0])
    plan.jobs = ordered(plan.jobs)
    return plan


def describe(plan: JobPlan, settings: Settings) -> str:
    """The plan as lines for a person."""
    lines = [f"in the ledger already: {', '.join(plan.done)}"] if plan.done else []
    if not plan.jobs:
        return "\n".join([*lines, "nothing is left to run"])
    lines.append(f"{len(plan.jobs)} populations on {settings.device}, {settings.jobs} at once:")
    width = max(len(job.name) for job in plan.jobs)
    for job in plan.jobs:
        seeds = spans(job.recipe.seeds)
        notes = [] if job.why == "cell" else [job.why]
        notes += [f"after {job.needs.name}"] if job.needs else []
        lines.append(f"  {job.name:<{width}}  seeds {seeds:<6}  {minutes(job.expected):>8} ({job.estimate})"
                     f"{'  ' + ', '.join(notes) if notes else ''}")  # fmt: skip
    lines.append(f"expected: {minutes(makespan(plan.jobs, settings.jobs, settings.device))} in all")
    if settings.budget:
        lines.append(
            f"budget: {settings.budget:g} minutes; what is not finished then is saved and goes on next time"
        )
    return "\n".join(lines)


def minutes(seconds: float) -> str:
    """A time for a person."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def reproduce(
    settings: Settings,
    say: Say = print,
    entered: Callable[[], None] = lambda: None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run the plan; `entered` is called after every job, when the ledger may have grown.

    `outcome` is filled in as jobs end, for who wants to look at it meanwhile.
    """
    plan = plan_of(settings)
    say(describe(plan, settings))
    for name in dict.fromkeys(job.recipe.data.name for job in plan.jobs):
        sources.find(name)  # missing data is an error now, not after an hour
    return run_plan(plan, settings, say, entered, outcome)


def run_plan(
    plan: JobPlan,
    settings: Settings,
    say: Say = print,
    entered: Callable[[], None] = lambda: None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run jobs in the order they are given, each after what it needs."""
    outcome = Outcome() if outcome is None else outcome
    if plan.jobs:
        with catch_signals() as received:
            Runner(settings, plan, say, entered, received, outcome).run()
    return outcome
