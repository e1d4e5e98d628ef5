"""The ledger: one finished run per JSON file under results/runs/, written once and read without mercy.

A number in a table must be traceable to a run, so an entry that is malformed is an error naming its file,
never a row left out.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_new
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction.identity import identity
from deeprnn.runs.summary import is_cut_off, marks
from deeprnn.training.recipe import Recipe

FOLDER = Path("results/runs")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Entry:
    """One run of the ledger."""

    path: Path
    raw: Mapping[str, Any]
    recipe: Recipe
    seed: int
    kind: str
    """music, char or word"""
    first: Recipe | None = None
    """of the first stage that it started from"""

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
        return is_cut_off(self.raw["stopped"])

    @property
    def alone(self) -> bool:
        """Whether the run trained by itself, not as a member of a population."""
        return "/" not in str(self.raw["name"])

    @property
    def stages(self) -> list[Mapping[str, Any]]:
        """What each stage cost, first stages first: `epochs`, `updates` and `seconds`, None where it is not known."""
        last = {"epochs": self.epochs, "updates": self.curve[-1]["step"], "seconds": self.seconds}
        unknown = [{"epochs": None, "updates": None, "seconds": None}] if self.first else []
        return list(self.raw.get("stages") or [*unknown, last])

    def total(self, what: str) -> int | None:
        """Epochs or updates over all stages; None where one of them is not known."""
        counts = [stage[what] for stage in self.stages]
        return None if None in counts else sum(counts)

    @property
    def command(self) -> str | None:
        """The command that made it; None where it was not recorded."""
        return self.raw.get("command")

    @property
    def dirty(self) -> bool | None:
        """Whether the code had changes that are in no commit; None where nobody knows."""
        return self.raw.get("dirty")

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know wherever this run is shown."""
        return marks(self.cut_off, self.dirty is True)

    @cached_property
    def identity(self) -> str:
        """Equal for runs that differ in their seed alone."""
        return identity(self.recipe, self.first)


def entry_path(entry: Mapping[str, Any], folder: Path) -> Path:
    """Where a run's entry goes: by data, model, recipe and seed; where the ledger has that run, its own place."""
    made = _entry(folder / "the new entry", entry)
    stem = f"{entry['data']['name']}-{entry['model']}".replace("/", "-")
    for path in sorted(folder.glob(f"{glob.escape(stem)}-*.json")):
        if _same_run(read_entry(path), made):
            return path
    cut = f"-cut-off-{made.epochs}" if made.cut_off else ""
    return folder / f"{stem}-{made.identity}-seed-{made.seed}{cut}.json"


def _same_run(a: Entry, b: Entry) -> bool:
    """The same recipe and seed, both finished or both cut off after as many epochs."""
    if (a.identity, a.seed, a.cut_off) != (b.identity, b.seed, b.cut_off):
        return False
    return not a.cut_off or a.epochs == b.epochs


def record(entry: Mapping[str, Any], folder: Path) -> Path:
    """Enter a run, unless the ledger has it; its file. Nothing is ever written over, not even a run cut off."""
    path = entry_path(entry, folder)
    if not path.exists():
        write_new(path, json.dumps(entry, indent=1, ensure_ascii=False) + "\n")
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
    first = raw.get("first_stage")
    first = None if first is None else Recipe.from_dict(first)
    entry = Entry(path, raw, Recipe.from_dict(raw["recipe"]), _whole(raw["seed"], "seed"), kind, first)
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
    if raw.get("format", 1) > 1:
        _check_origin(entry)
    return entry


def _check_origin(entry: Entry) -> None:
    """What a second-format entry says of its making: null is an honest answer, nothing at all is none."""
    raw = entry.raw
    for name, kind in (("command", str), ("dirty", bool)):
        if raw[name] is not None and not isinstance(raw[name], kind):
            raise UserError(f"{name} must be null or of type {kind.__name__}, got {raw[name]!r}")
    wanted = 1 if entry.first is None else 2
    if len(raw["stages"]) != wanted:
        raise UserError(f"stages must be as many as were trained, {wanted}, got {len(raw['stages'])}")
    for stage in raw["stages"]:
        for name in ("epochs", "updates"):
            if stage[name] is not None:
                _whole(stage[name], f"stages.{name}")
    if raw["stages"][-1]["epochs"] != entry.epochs:
        raise UserError(f"epochs is {entry.epochs} but the last stage has {raw['stages'][-1]['epochs']}")


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name} must be a whole number, got {value!r}")
    return value


def groups(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries of one recipe together, seeds in order; of a run that was cut off first, the longest it came to."""
    by_identity: dict[str, dict[int, Entry]] = {}
    for entry in entries:
        seeds = by_identity.setdefault(entry.identity, {})
        other = seeds.get(entry.seed)
        if other is not None and not (other.cut_off or entry.cut_off):
            raise UserError(
                f"ledger entries {other.path} and {entry.path} are the same recipe and seed: remove one"
            )
        if other is None or (not entry.cut_off, entry.epochs) > (not other.cut_off, other.epochs):
            seeds[entry.seed] = entry
    return {name: [seeds[seed] for seed in sorted(seeds)] for name, seeds in by_identity.items()}
