"""The paper's experiments from plan to table: jobs in dependency order, several at once, inside a budget."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from deeprnn.data import sources
from deeprnn.errors import UserError
from deeprnn.reproduction.entries import FOLDER, read_ledger
from deeprnn.reproduction.job import Place, Say, run_job
from deeprnn.reproduction.plan import Job, JobPlan, make_plan, spans, wanted
from deeprnn.reproduction.times import estimate, makespan, next_job, ordered
from deeprnn.runs.locking import lock_of_the_dead
from deeprnn.sweeps.engines import INTERRUPT_POLL, Board, Engine, InterruptFlag, WorkerLost, make_engine
from deeprnn.training.loop import NonFinite
from deeprnn.training.recipe import DataPart, Recipe, parse_value
from deeprnn.training.saving import catch_signals

ROOT = Path("runs/reproduce")
POLL_SECONDS = 0.5
"""seconds between two checks of the clock"""
MOST_SEEDS = 1000
"""of a cell: more is a slip of the keyboard"""


@dataclass(frozen=True)
class Settings:
    """What to run and where; the command line and other programs fill it in."""

    only: tuple[str, ...] = ()
    extras: bool = False
    seeds: int | tuple[int, ...] | None = None
    """how many, counted from 1, or which"""
    budget: float | None = None
    """minutes"""
    device: str = "cpu"
    jobs: int = 1
    overrides: tuple[str, ...] = ()
    root: Path = ROOT
    ledger: Path = FOLDER
    engine: str = "local"
    """`ray`: jobs are tasks of a Ray cluster"""
    address: str = ""
    published: Path | None = None
    """of a rerun with a ledger of its own: the ledger that it is compared with"""
    record_cut_off: bool = True
    """score what the budget ends and enter it, marked; a study does not, whose runs are scored once"""
    commit: str | None = None
    """of the code, by the caller's word, where the copy knows none"""


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """`5` is how many, counted from 1; `11..15` and `3,7` are which."""
    value = parse_value(text)
    seeds = value if isinstance(value, list) else []
    whole = type(value) is int
    if not whole and not (seeds and all(type(v) is int and v >= 0 for v in seeds)):
        raise UserError(f"--seeds must be how many (5) or which (11..15, or 3,7), got {text!r}")
    count = int(value) if whole else len(seeds)
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(f"--seeds must be from 1 to {MOST_SEEDS:,}, got {count:,}")
    return count if whole else tuple(sorted(set(seeds)))


def default_jobs(device: str) -> int:
    """Populations at once; on a GPU what results/bench/h200-one-seed.json was measured with."""
    return 4 if device.startswith("cuda") else 1


class Span(NamedTuple):
    """When a job ran, in seconds since the runner began."""

    job: str
    start: float
    end: float
    finished: bool


@dataclass
class Outcome:
    """How it ended."""

    finished: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)
    """of those that failed, the ones all of whose members diverged"""
    over: bool = False
    """whether the budget ended it"""
    signal: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def status(self) -> int:
        """For the shell: 0, 1 where a job failed, 128 + n after signal n."""
        return 128 + self.signal if self.signal else int(bool(self.failed))


def plan_of(settings: Settings) -> JobPlan:
    """The jobs still to be done, with their expected times."""
    if settings.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {settings.jobs}")
    if settings.budget is not None and not settings.budget > 0:
        raise UserError(f"--budget must be above zero minutes, got {settings.budget:g}")
    entries = read_ledger(settings.ledger)
    names = wanted(settings.only, settings.extras)
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
            _Runner(settings, plan, say, entered, received, outcome).run()
    return outcome


class _Runner:
    """Starts jobs whose first stage is there, and stops all of them when time or a signal says so."""

    def __init__(
        self,
        settings: Settings,
        plan: JobPlan,
        say: Say,
        entered: Callable[[], None],
        received: list[int],
        outcome: Outcome,
    ) -> None:
        self.settings, self.plan, self.entered = settings, plan, entered
        self.received, self.outcome = received, outcome
        self.began = time.monotonic()
        self.budget_over = False
        self.lock = threading.Lock()
        self.print = say
        self.waiting = list(plan.jobs)
        self.running: dict[Future[bool], Job] = {}
        self.started: dict[str, float] = {}

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        with self.lock:
            self.print(_timed(text, self.began))

    def run(self) -> None:
        """Until nothing runs and nothing can be started."""
        s = self.settings
        with make_engine(s.engine, s.device, s.jobs, s.address) as engine:
            while True:
                self._check_clock(engine)
                while not self.received and len(self.running) < s.jobs and (job := self._ready()):
                    self.waiting.remove(job)
                    self.say(f"{job.name}: starts, {len(job.recipe.seeds)} seeds")
                    self.started[job.name] = time.monotonic() - self.began
                    self.running[self._submit(engine, job)] = job
                if not self.running:
                    break
                done, _ = wait(self.running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    self._ended(future, self.running.pop(future))
        self.outcome.unfinished += [job.name for job in self.waiting]
        self.outcome.over = self.budget_over
        if self.received and not self.budget_over:
            self.outcome.signal = self.received[0]

    def _check_clock(self, engine: Engine) -> None:
        budget = self.settings.budget
        over = bool(budget) and not self.received and time.monotonic() - self.began >= 60 * budget
        if over:
            self.say(f"the budget of {budget:g} minutes is over: saving what runs")
            self.budget_over = True
        if over or self.received:  # why it is comes before the wish itself, which a thread sees at once
            recorded = self.budget_over and self.settings.record_cut_off
            with suppress(WorkerLost):  # then the jobs are lost too, and say so
                engine.board.interrupt(f"cut off when {budget:g} minutes had passed" if recorded else "")
        if over:
            self.received.append(int(signal.SIGTERM))

    def _ready(self) -> Job | None:
        lost = [job for job in self.plan.jobs if job.name in self.outcome.failed]
        return next_job(self.waiting, self.running.values(), self.settings.device, lost)

    def _ended(self, future: Future[bool], job: Job) -> None:
        error = future.exception()
        if error is not None:  # one job's failure costs the others nothing
            plain = isinstance(error, UserError | WorkerLost)
            told = str(error) if plain else "".join(traceback.format_exception(error))
            self.outcome.failed[job.name] = told.strip()
            if isinstance(error, NonFinite):
                self.outcome.diverged.append(job.name)
            self.say(f"{job.name}: failed: {told.strip()}")
        elif future.result():
            self.outcome.finished.append(job.name)
        else:
            self.outcome.unfinished.append(job.name)
        ended = time.monotonic() - self.began
        finished = error is None and future.result()
        self.outcome.spans.append(Span(job.name, round(self.started[job.name], 1), round(ended, 1), finished))
        self.entered()

    def _submit(self, engine: Engine, job: Job) -> Future[bool]:
        """Threads speak and hear through this process; a process or another machine can only print and ask."""
        s, say, received = self.settings, partial(_print_timed, began=self.began), None
        if s.engine == "ray":
            s, say = replace(s, root=s.root.absolute(), ledger=s.ledger.absolute()), print
        elif isinstance(engine.board, Board):
            say, received = self.say, self.received
        folder = s.root / job.folder_name
        return engine.submit(_train, job.name, job.recipe, job.stage, folder, s, say, received)


def _train(
    board: Any,
    device: str,
    name: str,
    recipe: Recipe,
    stage: Recipe | None,
    folder: Path,
    settings: Settings,
    say: Say,
    received: Sequence[int] | None,
) -> bool:
    """A job as an engine's work; on a cluster a later attempt goes on from what an earlier one saved."""
    if received is None:
        received = InterruptFlag(board.interrupted, INTERRUPT_POLL)
    if settings.engine == "ray":
        with lock_of_the_dead(folder, received):
            pass  # the job itself would not wait for the worker of an attempt that died
    place = Place(settings.root, settings.ledger, settings.device, received, board.why)
    return run_job(name, recipe, stage, folder, data_of(recipe.data), place, say)


def _timed(text: str, began: float) -> str:
    return f"[{time.monotonic() - began:6.1f} s] {text}"


def _print_timed(text: str, began: float) -> None:
    sys.stdout.write(_timed(text, began) + "\n")  # at once: lines of several processes do not mix
    sys.stdout.flush()


_LOADING = threading.Lock()


def data_of(part: DataPart) -> Any:
    """The data of a recipe, read once for all jobs."""
    with _LOADING:
        return _load(DataPart(name=part.name, level=part.level))


@cache
def _load(part: DataPart) -> Any:
    from deeprnn.training.session import load_data

    return load_data(part)
