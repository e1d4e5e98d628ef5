"""Which runs to make, in which order: one population a recipe, first stages shared, what is done left out."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from deeprnn.errors import UserError, did_you_mean
from deeprnn.model import paper
from deeprnn.reproduction.cells import model_spec
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.extras import LABELS as EXTRAS
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.kernels import Loop, loop_of
from deeprnn.runs.folder import Run
from deeprnn.training.members import members_of
from deeprnn.training.pretrain import first_stage
from deeprnn.training.recipe import Recipe, load_recipe, override, packaged, parse_value
from deeprnn.training.run_folders import member_recipe

SEEDS = {"music": 5, "text": 3}
"""seeds of a cell unless --seeds says otherwise"""


@dataclass
class Job:
    """One population to train."""

    name: str
    """data/model, with the size where it is a first stage of its own"""
    recipe: Recipe
    """with the seeds still to be trained"""
    needs: Job | None = None
    """the first stage that must have been trained before"""
    stage: Recipe | None = None
    """that first stage's recipe, also where it is trained already"""
    why: str = "cell"
    expected: float = 0.0
    """seconds, estimated"""
    estimate: str = ""
    """where that comes from"""

    @property
    def identity(self) -> str:
        """Of the recipe and its first stage, whatever the seeds."""
        return identity(self.recipe, self.stage)

    @property
    def loop(self) -> Loop | None:
        """How a GPU goes through time with it; None for data of somebody's own, whose model is not known yet."""
        return _loop(self.recipe)

    @property
    def alone(self) -> bool:
        """Whether a GPU should train it with nothing beside it."""
        return (loop := self.loop) is not None and loop.alone

    @property
    def wide(self) -> bool:
        """Whether its kernels leave others less than half of the card."""
        return (loop := self.loop) is not None and loop.wide

    @property
    def folder_name(self) -> str:
        """Of the run folder: the same for the same recipe and seeds."""
        return f"{self.name.replace('/', '-')}-{self.identity}-seeds-{spans(self.recipe.seeds, '-', '_')}"


@lru_cache(maxsize=4096)
def _loop(recipe: Recipe) -> Loop | None:
    spec = model_spec(recipe)
    return None if spec is None else loop_of(spec, recipe.data.lanes, len(members_of(recipe)))


def spans(seeds: Sequence[int], to: str = "..", and_: str = ", ") -> str:
    """Seeds as a person writes them: 1..5, or 1..3, 7."""
    out: list[list[int]] = []
    for seed in sorted(seeds):
        if out and seed == out[-1][-1] + 1:
            out[-1].append(seed)
        else:
            out.append([seed])
    return and_.join(to.join(str(s) for s in dict.fromkeys((run[0], run[-1]))) for run in out)


@dataclass
class JobPlan:
    """The jobs to run, each after what it needs, and what is done already."""

    jobs: list[Job] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def cells_named(only: Sequence[str] = (), extras: bool = False) -> list[str]:
    """The recipes to run: all cells, or those of data sets (`jsb`), cells (`jsb/dots`) or models (`*/rnn`)."""
    cells = [f"{c.data}/{c.model}" for c in paper.CELLS]
    known = packaged()
    more = [n.removeprefix("extra/") for n in known if n.startswith("extra/")]
    everything = cells + more
    if not only:
        return everything if extras else cells
    out: list[str] = []
    for word in only:
        pool = everything if extras or "/" in word else cells
        matching = [n for n in pool if n == word or n.split("/")[0] == word or fnmatch.fnmatchcase(n, word)]
        if not matching:
            names = [*paper.INPUTS, *everything]
            hint = did_you_mean(word, names, cutoff=0.4)
            raise UserError(f"--only {word!r} matches nothing{hint}: use a data set ({', '.join(paper.INPUTS)}), "
                            f"or data/model with model one of {', '.join([*paper.LABELS, *EXTRAS])}")  # fmt: skip
        out += [n for n in matching if n not in out]
    return out


def recipe_for(name: str) -> Recipe:
    """The packaged recipe of `data/model`."""
    stem = "extra" if name.partition("/")[2] in EXTRAS else "paper"
    return load_recipe(f"{stem}/{name}")


def changed(recipe: Recipe, name: str, overrides: Sequence[str]) -> Recipe:
    """The recipe with those overrides that are meant for it: `field=value`, or `ptb-*/rnn:field=value`."""
    changes = {}
    for text in overrides:
        place, equals, value = text.partition("=")
        pattern, colon, dotted = place.rpartition(":")
        if not equals:
            raise UserError(f"--override {text!r} needs the form field=value or data/model:field=value")
        if not colon or fnmatch.fnmatchcase(name, pattern) or name.split("/")[0] == pattern:
            changes[dotted] = parse_value(value)
    return override(recipe, changes) if changes else recipe


def make_plan(
    names: Sequence[str],
    entries: Iterable[Entry],
    root: Path,
    *,
    seeds: int | Sequence[int] | None = None,
    overrides: Sequence[str] = (),
) -> JobPlan:
    """Jobs for the named recipes, less what the ledger has; `root` holds the run folders.

    `seeds` is how many, counted from 1, or which.
    """
    entries = list(entries)
    have = {(e.identity, e.seed) for e in entries if not e.cut_off}
    plan, by_identity, trained = JobPlan(), dict[str, Job](), finished_members(root)
    for name in names:
        recipe = changed(_with_seeds(recipe_for(name), seeds), name, overrides)
        members, stage = member_recipes(recipe), stage_of(recipe, overrides)
        missing = tuple(
            s for s in recipe.seeds if any((identity(m, stage), s) not in have for m in members[s])
        )
        if not missing:
            plan.done.append(name)
            continue
        _add(plan, by_identity, Job(name, replace(recipe, seeds=missing)), trained, overrides)
    return plan


def _with_seeds(recipe: Recipe, seeds: int | Sequence[int] | None) -> Recipe:
    if seeds is None:
        seeds = SEEDS["text" if recipe.data.name.startswith("ptb") else "music"]
    return replace(recipe, seeds=tuple(range(1, seeds + 1) if isinstance(seeds, int) else seeds))


def stage_of(recipe: Recipe, overrides: Sequence[str] = ()) -> Recipe | None:
    """The recipe of the first stage as it will be trained, with those overrides that are meant for it."""
    stage = first_stage(recipe)
    if stage is None:
        return None
    stage = _labelled(stage)
    kind = f"{stage.data.name}/{stage.model.kind}"  # what holds for the RNN holds for one of another size
    return changed(stage, kind, [o for o in overrides if not _second_stage_field(o)])


def member_recipes(recipe: Recipe) -> dict[int, list[Recipe]]:
    """What each seed's members are trained by: one recipe, or one for each place of a grid."""
    members = members_of(recipe)
    return {seed: [member_recipe(recipe, m) for m in members if m.seed == seed] for seed in recipe.seeds}


def _add(
    plan: JobPlan,
    known: dict[str, Job],
    job: Job,
    trained: Collection[tuple[str, int]],
    overrides: Sequence[str],
) -> Job:
    """Append a job after the first stage it needs; a stage that is itself wanted is used for both."""
    job.stage = stage = stage_of(job.recipe, overrides)
    if stage is not None:
        name = _stage_name(stage)
        lacking = tuple(s for s in stage.seeds if (identity(stage), s) not in trained)
        if lacking:
            first_job = Job(name, replace(stage, seeds=lacking), why=f"first stage of {job.name}")
            job.needs = known.get(first_job.identity) or _add(plan, known, first_job, trained, overrides)
            _widen(job.needs, lacking)
    listed = known.get(job.identity)
    if listed is not None:  # a first stage came earlier than the cell it also is
        listed.name, listed.why = job.name, job.why
        _widen(listed, job.recipe.seeds)
        return listed
    known[job.identity] = job
    plan.jobs.append(job)
    return job


def _widen(job: Job, seeds: tuple[int, ...]) -> None:
    job.recipe = replace(job.recipe, seeds=tuple(sorted({*job.recipe.seeds, *seeds})))


def _second_stage_field(text: str) -> bool:
    """Whether an override changes the model or the seeds, which a first stage takes from its second."""
    dotted = text.partition("=")[0].rpartition(":")[2]
    return dotted.startswith("model.") or dotted in ("seeds", "rates", "transpositions")


def _labelled(stage: Recipe) -> Recipe:
    """The stage at its own rate, under the name its model has by itself: without shortcuts a DT, not a DT(S)."""
    plain = stage.model.kind == "dts" and stage.model.shortcut == "none"
    kind = "dt" if plain else stage.model.kind
    return replace(stage, model=replace(stage.model, kind=kind), rates=())


def _stage_name(stage: Recipe) -> str:
    """`jsb/dts` where the stage is a cell's own model, `jsb/rnn-400` where it is of another size."""
    data, kind = stage.data.name, stage.model.kind
    units = paper.size(data, "dts" if kind == "dt" else kind).units if data in paper.INPUTS else ()
    own = stage.model.hidden[:1] + stage.model.intermediate[:1]
    return f"{data}/{kind}" if own == units else f"{data}/{kind}-{'-'.join(map(str, own))}"


def find_member(root: Path, recipe_identity: str, seed: int) -> Path | None:
    """The folder of a finished member, by recipe and seed; None where there is none."""
    return finished_members(root).get((recipe_identity, seed))


def finished_members(root: Path) -> dict[tuple[str, int], Path]:
    """The folders of all finished members, by recipe and seed."""
    folders: dict[tuple[str, int], Path] = {}
    for path in sorted(root.rglob("run.json")):
        known = _member_at(path.parent, path.stat().st_mtime_ns)
        if known is not None:
            folders.setdefault(known, path.parent)
    return folders


@lru_cache(maxsize=4096)
def _member_at(home: Path, changed: int) -> tuple[str, int] | None:
    """Recipe and seed of a finished run, as of the time its run.json was `changed`."""
    info = Run(home).info
    return None if info["result"] is None else (identity(load_recipe(home / "recipe.toml")), info["seed"])
