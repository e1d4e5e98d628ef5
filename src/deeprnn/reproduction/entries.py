"""The ledger: one finished run per JSON file under results/runs/, written once and read without mercy.

A number in a table must be traceable to a run, so an entry that is malformed is an error naming its file,
never a row left out.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_json
from deeprnn.model.metrics import HEADLINE
from deeprnn.training.recipe import Recipe

FOLDER = Path("results/runs")
SPLITS = ("train", "valid", "test")
NOT_IDENTITY = ("seeds", "save")
"""fields of a recipe that do not change what a member of the population learns"""


@dataclass(frozen=True)
class Entry:
    """One run of the ledger."""

    path: Path
    raw: Mapping[str, Any]
    recipe: Recipe
    seed: int
    kind: str
    """music, char or word"""

    @property
    def data(self) -> str:
        """The data set's name."""
        return self.recipe.data.name

    @property
    def model(self) -> str:
        """The paper's short name for the model: rnn, dts, dots, srnn, dots-star, or an extra one."""
        return self.recipe.model.kind

    @property
    def has_test(self) -> bool:
        """Whether the test part was scored: a search's runs never do."""
        return self.recipe.evaluation.test

    def value(self, split: str = "test") -> float:
        """The headline metric of a split."""
        return float(self.raw["result"][split][HEADLINE[self.kind].key])

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The thinned learning curve."""
        return list(self.raw["curve"])

    @property
    def seconds(self) -> float:
        """Training time of the run; of a population's member, that of the whole population."""
        return float(self.raw["seconds"])

    @property
    def epochs(self) -> int:
        """Epochs trained."""
        return int(self.raw["epochs"])

    @property
    def best_epoch(self) -> int:
        """The epoch whose parameters are scored."""
        return int(self.raw["result"]["best_epoch"])

    @property
    def cut_off(self) -> bool:
        """Whether time, rather than the recipe's stop rule, ended the run."""
        return "minutes" in str(self.raw["stopped"])

    @property
    def alone(self) -> bool:
        """Whether the run trained by itself, not as a member of a population."""
        return "/" not in str(self.raw["name"])

    @cached_property
    def identity(self) -> str:
        """Equal for runs that differ in their seed alone."""
        return identity(self.recipe)


def identity(recipe: Recipe) -> str:
    """A short hash of everything in a recipe that decides what is learnt, except for the seed.

    Only what differs from the defaults is hashed, so a new field with a default changes no identity.
    """
    own, default = without_idle(recipe), Recipe().to_dict()
    plain: dict[str, Any] = {}
    for name, part in own.items():
        if name in NOT_IDENTITY:
            continue
        if isinstance(part, dict):
            part = {k: v for k, v in part.items() if v != default[name][k]}
        if part and part != default[name]:
            plain[name] = part
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:10]


SCHEDULES = {
    "paper": ("beta", "patience", "restore_best"),
    "halving": ("patience", "factor", "minimum", "restore_best"),
    "cosine": ("floor",),
    "constant": (),
}
"""what each schedule reads beside its name and the warm-up"""


def without_idle(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data; settings that nothing reads in this model and schedule at their defaults."""
    own, default, model = recipe.to_dict(), Recipe().to_dict(), recipe.model
    units = model.unit + model.intermediate_unit
    if model.output_hidden:
        units += model.output_unit
    else:
        own["model"]["output_unit"] = default["model"]["output_unit"]
        own["init"]["output_hidden_std"] = default["init"]["output_hidden_std"]
    if "relu" not in units:
        own["init"]["rectifier_bias"] = default["init"]["rectifier_bias"]
    read = ("name", "warmup", *SCHEDULES[recipe.schedule.name])
    own["schedule"] |= {k: v for k, v in default["schedule"].items() if k not in read}
    if recipe.evaluation.streams == 1:  # exact, however many steps are taken at a time
        own["evaluation"] = {**default["evaluation"], "test": recipe.evaluation.test}
    return own


def entry_path(entry: Mapping[str, Any], folder: Path) -> Path:
    """Where a run's entry goes: by data, model, recipe and seed; where the ledger has that run, its own place."""
    own = identity(Recipe.from_dict(entry["recipe"]))
    stem = f"{entry['data']['name']}-{entry['model']}".replace("/", "-")
    for path in sorted(folder.glob(f"{glob.escape(stem)}-*.json")):
        other = read_entry(path)
        if (other.identity, other.seed) == (own, entry["seed"]):
            return path
    return folder / f"{stem}-{own}-seed-{entry['seed']}.json"


def record(entry: Mapping[str, Any], folder: Path) -> Path:
    """Write an entry, unless a finished run's stands there already; its file."""
    path = entry_path(entry, folder)
    if path.exists() and not read_entry(path).cut_off:
        return path
    write_json(path, entry)
    return path


def read_ledger(folder: str | Path = FOLDER) -> list[Entry]:
    """Every entry of a ledger folder, in order of file names; no folder is an empty ledger."""
    return [read_entry(path) for path in sorted(Path(folder).glob("*.json"))]


def read_entry(path: Path) -> Entry:
    """One entry, checked field by field."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"ledger entry {path} cannot be read: {error}") from None
    try:
        return _entry(path, raw)
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"ledger entry {path} is malformed: {what}; mend it or remove the file") from None


def _entry(path: Path, raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise UserError(f"it must hold one JSON object, not {type(raw).__name__}")
    kind = raw["data"]["kind"]
    if kind not in HEADLINE:
        raise UserError(f"data.kind must be one of {', '.join(HEADLINE)}, got {kind!r}")
    entry = Entry(path, raw, Recipe.from_dict(raw["recipe"]), _whole(raw["seed"], "seed"), kind)
    if not entry.has_test and "test" in raw["result"]:
        raise UserError("recipe.evaluation.test is false, but there is a result.test")
    for split in SPLITS if entry.has_test else SPLITS[:2]:
        if not math.isfinite(entry.value(split)):
            raise UserError(f"result.{split} is {entry.value(split)}")
    _whole(raw["result"]["best_epoch"], "result.best_epoch")
    _whole(raw["epochs"], "epochs")
    if not math.isfinite(entry.seconds):
        raise UserError(f"seconds is {entry.seconds}")
    for name in ("stopped", "commit", "environment"):
        raw[name]  # a number whose origin is unknown is no evidence
    if not raw["curve"] or not all({"epoch", "step", "valid"} <= row.keys() for row in raw["curve"]):
        raise UserError("curve must be a list of rows that have an epoch, a step and a validation cost")
    if entry.recipe.seeds != (entry.seed,):
        raise UserError(f"seed is {entry.seed} but recipe.seeds is {list(entry.recipe.seeds)}")
    return entry


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name} must be a whole number, got {value!r}")
    return value


def groups(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries of one recipe together, seeds in order; the same seed twice is an error."""
    by_identity: dict[str, list[Entry]] = {}
    for entry in entries:
        by_identity.setdefault(entry.identity, []).append(entry)
    for members in by_identity.values():
        members.sort(key=lambda e: e.seed)
        for a, b in itertools.pairwise(members):
            if a.seed == b.seed:
                raise UserError(
                    f"ledger entries {a.path} and {b.path} are the same recipe and seed: remove one"
                )
    return by_identity
