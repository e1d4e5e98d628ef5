"""How long jobs are expected to take, and the order in which they start."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from deeprnn.model.structure import dissect
from deeprnn.reproduction.cells import model_spec
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.plan import Job
from deeprnn.training.members import members_of
from deeprnn.training.recipe import Recipe

# ---- how long


CPU_UPDATE, CPU_PARAMETER, CPU_MULTIPLICATION = 1.5e-3, 1.4e-8, 7.1e-11
"""seconds of an update on one CPU core: at least, for each parameter (noise, optimiser), and for each entry of a matrix
and symbol (forward and backward). Rough: fitted to fifteen recipes, few updates each, a fifth off at most there"""
CPU_SCORING = 1.1
"""an epoch with its validation, as a multiple of its updates"""
UNKNOWN_INPUTS = 88
"""of data that are no benchmark set"""
START = 5.0
"""seconds until a GPU trains: building, capturing graphs, the first launches of everything"""
UPDATE = {"music": 2.8e-4, "text": 1.8e-3}
"""seconds of an update on a GPU beside its steps, three others at once: fitted to results/bench/h200-one-seed.json"""
SHARED_STEP = 1.2
"""how much longer a step takes there than alone"""
WORK = 6e13
"""operations a second of the products outside the loop, as wide layers reach in results/bench/h200-layers.jsonl"""
MEMBER = 0.15
"""what each further member of a population adds, as a share of the first: fitted to five seeds in the ledger"""
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
    seconds = _on_cpu(job.recipe, members) if device == "cpu" else _on_gpu(job, members)
    job.expected, job.estimate = min(seconds, limit or seconds), "estimated"


def _updates(recipe: Recipe) -> float:
    """Of an epoch."""
    return STEPS.get(recipe.data.name, 10**6) / (recipe.data.chunk * recipe.data.lanes)


def _on_cpu(recipe: Recipe, members: int) -> float:
    return members * _epochs(recipe) * _updates(recipe) * CPU_SCORING * cpu_update(recipe)


def cpu_update(recipe: Recipe) -> float:
    """Seconds of one member's update on a core that has nothing else to do, roughly."""
    data, model = recipe.data, recipe.model
    text = data.name.startswith("ptb")
    spec = model_spec(recipe) or model.spec(UNKNOWN_INPUTS, False, recipe.regulariser.dropout)
    parts = dissect(spec)
    # A symbol's column is looked up; a tied matrix is multiplied by as the output's.
    entries = sum(link.rows * link.columns for link in parts.links if not (text and link.source == "x"))
    work = data.chunk * data.lanes * entries
    return CPU_UPDATE + CPU_PARAMETER * parts.parameters + CPU_MULTIPLICATION * work


def _on_gpu(job: Job, members: int) -> float:
    recipe, spec, loop = job.recipe, model_spec(job.recipe), job.loop
    symbols = recipe.data.chunk * recipe.data.lanes
    update = UPDATE["text" if recipe.data.name.startswith("ptb") else "music"]
    if spec is None or loop is None:
        return START + _epochs(recipe) * _updates(recipe) * update
    # A persistent kernel's plan is that of all members; the rest is as long for one as for a few.
    update += 6 * dissect(spec).parameters * symbols / WORK
    update_of_all = update * (1 + MEMBER * (members - 1)) + SHARED_STEP * recipe.data.chunk * loop.step
    return START + _epochs(recipe) * _updates(recipe) * update_of_all


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


MOST_WIDE = 4
"""models at once whose kernels take most of a card, as in results/bench/h200-one-seed.json: they wait for each other"""
WIDE_BESIDE = 2
"""of them beside narrow ones, whose launches wait for every one of theirs"""


def next_job(
    waiting: Iterable[Job], running: Collection[Job], device: str, lost: Iterable[Job] = ()
) -> Job | None:
    """The first job whose first stage is there and that the running ones leave its share of the device.

    On a GPU narrow models come first: several fit side by side, and a wide one beside them slows them all.
    """
    waiting = list(waiting)
    absent = {id(job) for job in (*waiting, *running, *lost)}
    ready = [job for job in waiting if job.needs is None or id(job.needs) not in absent]
    if not device.startswith("cuda"):
        return next(iter(ready), None)
    ready.sort(key=lambda job: (job.alone, job.wide))
    return next((job for job in ready if _bears(job, running)), None)


def _bears(job: Job, running: Collection[Job]) -> bool:
    if any(j.alone for j in (job, *running)):
        return not running
    wide = sum(j.wide for j in running)
    most = MOST_WIDE if wide == len(running) else WIDE_BESIDE
    return not job.wide or wide < most


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
