"""How long jobs are expected to take, and the order in which they start."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.plan import Job
from deeprnn.training.loop import members_of
from deeprnn.training.recipe import Recipe

# ---- how long


@dataclass(frozen=True)
class Cost:
    """Seconds of training, by parts."""

    update: float
    step: float
    """of the sequence, forward and backward, for two transition layers"""
    start: float = 0.0
    """compiling kernels and capturing graphs"""
    lane: float = 1.0
    """what each further lane adds to a step, as a share of the first"""
    member: float = 1.0
    """what each further member adds to the population, as a share of the first"""


COSTS = {
    "cpu": Cost(2.0e-3, 1.2e-4),
    "music": Cost(2.8e-4, 3.1e-6, start=6.0, lane=0.0, member=0.15),
    "text": Cost(1.9e-3, 3.1e-6, start=6.0, lane=0.0, member=0.15),
    "stepwise": Cost(3.0e-4, 4.5e-5, start=6.0, lane=0.0, member=0.15),
}
"""on a CPU's core; the others on a GPU, where stepwise models run alone and the rest in fours: fitted to
results/bench/h200-one-seed.json, `member` to five seeds in the ledger"""
EPOCHS = {"jsb": 60, "nottingham": 105, "musedata": 70}
"""until patience ends them"""
STEPS = {
    "jsb": 387 * 50,
    "nottingham": 1166 * 200,
    "musedata": 1478 * 200,
    "ptb-char": 5_059_550,
    "ptb-word": 929_589,
}
"""of an epoch on one lane; for music updates times the chunk's length"""


def estimate(job: Job, entries: Iterable[Entry], device: str) -> None:
    """Fill in a job's expected seconds: from the ledger's own times where it has some, else from a formula."""
    members = len(members_of(job.recipe))
    recorded = [
        e.seconds * (members if device == "cpu" and e.alone else 1)
        for e in entries
        if (e.data, e.recipe.model) == (job.recipe.data.name, job.recipe.model)
        and str(e.raw["environment"].get("device", "")).startswith(device)
        and not e.cut_off  # its seconds say when time was up, not how long the run takes
    ]
    if recorded:
        job.expected, job.estimate = sum(recorded) / len(recorded), "recorded"
        return
    limit = 60 * job.recipe.stop.minutes
    seconds = _by_formula(job.recipe, members, _cost(job, device))
    job.expected, job.estimate = min(seconds, limit or seconds), "estimated"


def _cost(job: Job, device: str) -> Cost:
    if device == "cpu":
        return COSTS["cpu"]
    text = job.recipe.data.name.startswith("ptb")
    return COSTS["stepwise" if job.stepwise else "text" if text else "music"]


def _by_formula(recipe: Recipe, members: int, cost: Cost) -> float:
    data, model = recipe.data, recipe.model
    updates = STEPS.get(data.name, 10**6) / (data.chunk * data.lanes)
    layers = len(model.hidden) * (1 + len(model.intermediate)) / 2
    step = cost.step * layers * (1 + cost.lane * (data.lanes - 1))
    epoch = updates * (cost.update + data.chunk * step) * (1 + cost.member * (members - 1))
    return cost.start + epoch * _epochs(recipe)


def _epochs(recipe: Recipe) -> int:
    """All of them under a schedule that is made for so many, else what patience leaves."""
    usual, most = EPOCHS.get(recipe.data.name, 50), recipe.stop.epochs
    return most if most and (most < usual or recipe.schedule.name == "cosine") else usual


# ---- in which order


def ordered(jobs: Sequence[Job]) -> list[Job]:
    """Longest chain first, a first stage before its second."""
    remaining: Mapping[str, float] = {j.identity: _chain(j, jobs) for j in jobs}
    return sorted(jobs, key=lambda j: (-remaining[j.identity], j.needs is not None))


def _chain(job: Job, jobs: Sequence[Job]) -> float:
    after = [_chain(other, jobs) for other in jobs if other.needs is job]
    return job.expected + max([0.0, *after])


def next_job(
    waiting: Iterable[Job], running: Collection[Job], device: str, lost: Iterable[Job] = ()
) -> Job | None:
    """The first job whose first stage is there and that the running ones leave its share of the device."""
    waiting = list(waiting)
    absent = {id(job) for job in (*waiting, *running, *lost)}
    for job in waiting:
        if (job.needs is None or id(job.needs) not in absent) and _bears(job, running, device):
            return job
    return None


def _bears(job: Job, running: Collection[Job], device: str) -> bool:
    if not device.startswith("cuda"):
        return True
    return not running or not any(j.stepwise for j in (job, *running))


def makespan(jobs: Sequence[Job], workers: int, device: str) -> float:
    """Expected seconds of the whole plan with that many jobs at once, started as the runner starts them."""
    now, waiting, ends = 0.0, ordered(jobs), list[tuple[float, Job]]()
    while waiting or ends:
        running = [job for _, job in ends]
        job = next_job(waiting, running, device) if len(running) < workers else None
        if job is not None:
            waiting.remove(job)
            ends.append((now + job.expected, job))
            continue
        first = min(ends, key=lambda end: end[0])
        ends.remove(first)
        now = first[0]
    return now
