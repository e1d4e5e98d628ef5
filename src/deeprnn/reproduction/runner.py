"""Jobs of a reproduction on an engine: started when what they need is there, stopped by budget or signal."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from deeprnn.errors import UserError
from deeprnn.reproduction.entries import FOLDER
from deeprnn.reproduction.job import Place, Say, run_job
from deeprnn.reproduction.plan import Job, JobPlan
from deeprnn.reproduction.times import next_job
from deeprnn.runs.locking import lock_of_the_dead
from deeprnn.sweeps.engines import INTERRUPT_POLL, Board, Engine, InterruptFlag, WorkerLost, make_engine
from deeprnn.training.loading import load_data_once
from deeprnn.training.loop import NonFinite
from deeprnn.training.recipe import Recipe

ROOT = Path("runs/reproduce")
POLL_SECONDS = 0.5
"""seconds between two checks of the clock"""


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


class Span(NamedTuple):
    """When a job ran, in seconds since the runner began."""

    job: str
    start: float
    end: float
    finished: bool


@dataclass
class Outcome:
    """How a reproduction ended, job by job."""

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


class Runner:
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
                    self._job_ended(future, self.running.pop(future))
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

    def _job_ended(self, future: Future[bool], job: Job) -> None:
        error = future.exception()
        if error is not None:  # one job's failure costs the others nothing
            plain = isinstance(error, UserError | WorkerLost)
            reason = str(error) if plain else "".join(traceback.format_exception(error))
            self.outcome.failed[job.name] = reason.strip()
            if isinstance(error, NonFinite):
                self.outcome.diverged.append(job.name)
            self.say(f"{job.name}: failed: {reason.strip()}")
        elif future.result():
            self.outcome.finished.append(job.name)
        else:
            self.outcome.unfinished.append(job.name)
        ended = time.monotonic() - self.began
        finished = error is None and future.result()
        self.outcome.spans.append(Span(job.name, round(self.started[job.name], 1), round(ended, 1), finished))
        self.entered()

    def _submit(self, engine: Engine, job: Job) -> Future[bool]:
        """A thread says lines and hears signals through this process; another one prints, and asks the board."""
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
    return run_job(name, recipe, stage, folder, load_data_once(recipe.data), place, say)


def _timed(text: str, began: float) -> str:
    return f"[{time.monotonic() - began:6.1f} s] {text}"


def _print_timed(text: str, began: float) -> None:
    sys.stdout.write(_timed(text, began) + "\n")  # at once: lines of several processes do not mix
    sys.stdout.flush()
