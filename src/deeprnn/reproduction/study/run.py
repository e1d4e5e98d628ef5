"""Running a study: in pieces, by one process, and only while its plan is what it was at the first run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeprnn import __version__
from deeprnn.data import sources
from deeprnn.errors import UserError
from deeprnn.files import write_json
from deeprnn.reproduction.entries import FOLDER, Entry, read_ledger
from deeprnn.reproduction.job import Say
from deeprnn.reproduction.plan import Job, member_recipes
from deeprnn.reproduction.run import minutes, run_plan
from deeprnn.reproduction.runner import Outcome, Settings
from deeprnn.reproduction.study.dynamic import score_dynamic
from deeprnn.reproduction.study.jobs import Runs, study_plan
from deeprnn.reproduction.study.plan_file import Study
from deeprnn.reproduction.times import estimate, makespan, ordered
from deeprnn.runs.folder import Run
from deeprnn.runs.locking import lock
from deeprnn.runs.provenance import commit, has_changes
from deeprnn.runs.run_files import now
from deeprnn.training import run_folders
from deeprnn.training.members import members_of
from deeprnn.training.recipe import DataPart, Recipe, override

STARTED, DIVERGED, ENTRIES = "started.json", "diverged.json", "runs"


def study_ledger(name: str, ledger: Path = FOLDER) -> Path:
    """A study's own folder, unless another than the tables' is given."""
    return Path("results/studies") / Path(name).stem if ledger == FOLDER else ledger


def read_runs(ledger: Path) -> Runs:
    """What a study's ledger holds."""
    entries = read_ledger(ledger / ENTRIES)
    _check_data(entries)
    return Runs.of(entries, [Recipe.from_dict(raw) for raw in _diverged(ledger)])


def _check_data(entries: Sequence[Entry]) -> None:
    """Refuse runs by other data under one name; runs of a search, which see no test part, among themselves."""
    seen: dict[tuple[DataPart, bool], Entry] = {}
    for entry in entries:
        read = replace(
            entry.recipe.data, chunk=1, lanes=1, order="shared", order_seed=0, random_transpose=0
        )  # how it is cut and ordered changes no content
        first = seen.setdefault((read, entry.has_test), entry)
        prints = [e.raw["data"].get("fingerprint") for e in (first, entry)]
        if None not in prints and prints[0] != prints[1]:
            raise UserError(
                f"{first.path.name} and {entry.path.name} were trained on different data, both named {entry.data!r}: "
                "take one of them away, or begin the study anew in a --ledger of its own"
            )


def _diverged(ledger: Path) -> list[dict[str, Any]]:
    """The recipes of members that ended without a result."""
    path = ledger / DIVERGED
    if not path.exists():
        return []
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        for raw in noted:
            Recipe.from_dict(raw)
        return list(noted)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r:.80}): put it back, or remove it, and what diverged is run again"
        ) from None


def check_plan(study: Study, ledger: Path) -> None:
    """Refuse a plan that is not the one that the first run began with."""
    path = ledger / STARTED
    if not path.exists():
        if any((ledger / ENTRIES).glob("*.json")):
            raise UserError(f"{path} is missing, but there are runs: put it back, or take another --ledger")
        return
    try:
        began = json.loads(path.read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r:.80}): put it back as it was") from None
    if began != study.digest:
        raise UserError(
            f"{study.path} or a recipe it names was changed after the first run of the study ({path}): put it back, "
            "or plan another study, in a file and a --ledger of its own"
        )


def begun(ledger: Path) -> str:
    """When the plan was frozen by its first run, and by which code; empty where nothing has been run."""
    path = ledger / STARTED
    if not path.exists():
        return ""
    start = json.loads(path.read_text(encoding="utf-8"))  # whole: `check_plan` has read it
    by = start.get("commit") or "a commit that nobody noted"
    dirty = " (code with changes in no commit)" if by.endswith("+") else ""
    return f"The plan is that of the first run, {start.get('began', 'at an unknown time')}, by {by}{dirty}."


def describe_study(study: Study, settings: Settings, ledger: Path) -> str:
    """Who competes, what is left, and how long it is expected to take; nothing is run."""
    check_plan(study, ledger)
    runs = read_runs(ledger)
    plan, undecided = study_plan(study, runs, settings.root, settings.only, ahead=True)
    for job in plan.jobs:
        estimate(job, [], settings.device.partition(":")[0])
    lines = [f"{study.name}: {study.question}"]
    for family in study.families:
        names = [c.label for c in study.contenders if c.family == family.name]
        grid = " × ".join(f"{n} {', '.join(f'{v:g}' for v in values)}" for n, values in family.grid.items())
        lines.append(f"  {family.name}: {', '.join(names)}; on {', '.join(family.data)}")
        lines.append(
            f"    {len(family.trials)} trials each ({grid or 'the recipes as they are'}), never scored on test"
        )
    lines.append(
        f"  then seeds {', '.join(map(str, study.seeds))} of what validation chose, test scored once"
    )
    if not plan.jobs:
        return "\n".join([*lines, "nothing is left to run"])
    lines.append(f"left on {settings.device} (estimated; one after another, the shortest row first):")
    lines += _rows_left(study, runs, settings)
    seconds = makespan(ordered(plan.jobs), settings.jobs, settings.device)
    lines.append(f"in all {minutes(seconds)} with {settings.jobs} at once")
    if undecided:
        lines.append(
            f"(the seeds of {undecided} contenders, not chosen yet, by their first trial's settings)"
        )
    return "\n".join(lines)


def _rows_left(study: Study, runs: Runs, settings: Settings) -> list[str]:
    """A line for each family and data set; a first stage that two of them share counts in both."""
    rows = dict.fromkeys((c.family, data) for c, data in study.entrants(settings.only))
    named = {(c.family, data, c.name) for c, data in study.entrants(settings.only)}
    rows_left = []
    for family, data in rows:
        only = [f"{f}/{d}/{name}" for f, d, name in named if (f, d) == (family, data)]
        jobs = study_plan(study, runs, settings.root, only, ahead=True)[0].jobs
        for job in jobs:
            estimate(job, [], settings.device.partition(":")[0])
        phases = {"search": [0, 0.0], "seeds": [0, 0.0]}
        for job in jobs:
            phase = phases["seeds" if job.why.endswith("seeds") else "search"]
            phase[0], phase[1] = phase[0] + 1, phase[1] + job.expected
        phases_text = ", ".join(
            f"{name} {count} populations {minutes(s)}" for name, (count, s) in phases.items()
        )
        rows_left.append((sum(s for _, s in phases.values()), f"{family}/{data}", phases_text))
    width = max(len(name) for _, name, _ in rows_left)
    return [
        f"  {name:<{width}}  {minutes(seconds):>8}: {phases_text}"
        for seconds, name, phases_text in sorted(rows_left)
    ]


def run_study(
    study: Study,
    settings: Settings,
    ledger: Path,
    say: Say = print,
    entered: Callable[[], None] = lambda: None,
    total: Outcome | None = None,
) -> Outcome:
    """Run what is left, search before seeds, until nothing is or the time is over.

    What several words of `settings.only` name is run one after another, so that time that ends leaves whole rows.
    `entered` is called after every job; `total` is filled in for who wants to look at it meanwhile.
    """
    settings = replace(settings, ledger=ledger / ENTRIES, record_cut_off=False)
    total, began_at = Outcome() if total is None else total, time.monotonic()
    with lock(ledger):
        check_plan(study, ledger)
        if not (ledger / STARTED).exists():
            if has_changes(study.path):
                raise UserError(
                    f"{study.path} has changes that are in no commit: commit the plan before its first run"
                )
            began = {"digest": study.digest, "study": study.name, "plan": study.path.read_text(encoding="utf-8"),
                     "began": now(), "commit": commit() or settings.commit, "version": __version__}  # fmt: skip
            write_json(ledger / STARTED, began)
        slices = [(word,) for word in settings.only] or [()]
        while True:
            runs = read_runs(ledger)
            score_dynamic(study, runs, settings, ledger, say, lambda: _over(settings, began_at))
            plan, _ = study_plan(study, runs, settings.root, slices[0])
            plan.jobs = [job for job in plan.jobs if job.name not in total.failed]
            if not plan.jobs:
                slices.pop(0)
                if slices:
                    continue
                return total
            for job in plan.jobs:
                estimate(job, [], settings.device.partition(":")[0])
            plan.jobs = ordered(plan.jobs)
            for name in {job.recipe.data.name for job in plan.jobs} & set(sources.SOURCES):
                sources.find(name)  # missing data is an error now, not after an hour
            say(f"{len(plan.jobs)} populations can be run now{''.join(f' of {word}' for word in slices[0])}")
            since = time.monotonic() - began_at
            outcome = run_plan(plan, _with_time_left(settings, began_at), say, entered)
            total.spans += [
                s._replace(start=round(s.start + since, 1), end=round(s.end + since, 1))
                for s in outcome.spans
            ]
            _note_diverged(
                [job for job in plan.jobs if job.name in (*outcome.finished, *outcome.diverged)],
                settings,
                ledger,
            )
            total.finished += outcome.finished
            runs, jobs = read_runs(ledger), {job.name: job for job in plan.jobs}
            total.failed |= {n: why for n, why in outcome.failed.items() if not _has_ended(jobs[n], runs)}
            if outcome.signal or outcome.over:
                total.unfinished, total.signal, total.over = outcome.unfinished, outcome.signal, outcome.over
                return total


def _over(settings: Settings, began: float) -> bool:
    return settings.budget is not None and time.monotonic() - began >= 60 * settings.budget


def _with_time_left(settings: Settings, began: float) -> Settings:
    """Seeds follow a search within one budget."""
    if settings.budget is None:
        return settings
    return replace(settings, budget=max(1e-9, settings.budget - (time.monotonic() - began) / 60))


def _has_ended(job: Job, runs: Runs) -> bool:
    """Whether a job that failed did so because it, or the first stage it needs, diverged: nothing is left of it."""
    stage = job.stage
    return all(
        runs.ended(member, stage and override(stage, {"seeds": [seed]}))
        for seed, seed_members in member_recipes(job.recipe).items()
        for member in seed_members
    )


def _note_diverged(jobs: Sequence[Job], settings: Settings, ledger: Path) -> None:
    """Enter members that ended without a result, so that nobody waits for them, here or in a copy of the ledger."""
    noted = _diverged(ledger)
    before = len(noted)
    for job in jobs:
        folder = settings.root / job.folder_name
        for member, home in zip(
            members_of(job.recipe), run_folders.member_folders(job.recipe, folder), strict=True
        ):
            if Run(home).info["result"] is None:
                noted.append(run_folders.member_recipe(job.recipe, member).to_dict())
    if len(noted) > before:
        write_json(ledger / DIVERGED, noted)
