"""Run folders: what a training run leaves behind, and how it is read again.

run = load_run("runs/jsb-dots-1")
model = run.model()                 # best parameters, on the CPU; needs no training data and no GPU
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import dissect
from deeprnn.runs import shipped
from deeprnn.runs.checkpoint import MOST_JSON, load_best
from deeprnn.runs.locking import held
from deeprnn.runs.reading import read_json, read_regular

if TYPE_CHECKING:
    from deeprnn.generation.options import GenerateOptions
    from deeprnn.generation.outputs import Music, Text

FORMAT = 1
KEYS = {
    "status": str,
    "data": dict,
    "data.name": str,
    "data.kind": str,
    "model": dict,
    "label": str,
    "parameters": int,
    "metric": str,
    "seed": int,
    "result": (dict, type(None)),
}
"""what every run.json has, with the types of the values"""
_NOTHING, _NUMBER = type(None), (int, float)
OPTIONAL = {
    "name": str,
    "data.path": (str, _NOTHING),
    "data.fingerprint": (str, _NOTHING),
    "data.most_notes": (int, _NOTHING),
    "version": str,
    "commit": (str, _NOTHING),
    "command": (str, _NOTHING),
    "first_stage": dict,
    "first_stage.recipe": dict,
    "first_stage.epochs": (int, _NOTHING),
    "first_stage.updates": (int, _NOTHING),
    "environment": dict,
    "environment.threads": int,
    "paper": (*_NUMBER, _NOTHING),
    "reason": (str, _NOTHING),
    "seconds": (*_NUMBER, _NOTHING),
    "created": str,
    "updated": str,
    "recipe_sha256": str,
    "result.best_epoch": int,
}
"""what it may have besides that somebody relies on"""
ROW = {"epoch": int, "valid": _NUMBER}
"""what every line of metrics.jsonl has; its other values are numbers, too, or nothing"""
_ABSENT = object()
MOST_METRICS = 2**25
"""bytes of metrics.jsonl that are read: 100,000 epochs"""


@dataclass(frozen=True)
class Run:
    """One trained (or training) model on disk."""

    path: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json."""
        path = self.path / "run.json"
        info = _read_table(path, KEYS, OPTIONAL)
        kind, result = info["data"]["kind"], info["result"] or {}
        if kind not in HEADLINE:
            raise UserError(f"{path} is damaged: 'data.kind' is {kind!r:.40}. {_mend(path)}")
        for split in result.keys() & {"train", "valid", "test"}:
            score = result[split]
            if not isinstance(score, dict) or not isinstance(score.get(HEADLINE[kind].key), _NUMBER):
                raise UserError(
                    f"{path} is damaged: 'result.{split}' has no {HEADLINE[kind].key}. {_mend(path)}"
                )
        return info

    @property
    def name(self) -> str:
        """As the run was named."""
        return self.info.get("name", self.path.name)

    @property
    def status(self) -> str:
        """running, finished, stopped or failed; interrupted where it was killed and nobody trains it now."""
        written = self.info["status"]
        # A population holds one lock for all members, a run also that of its first stage.
        if written == "running" and not any(held(p) for p in (self.path, *self.path.parents[:2])):
            return "interrupted"
        return written

    @property
    def concluded(self) -> bool:
        """Whether training has come to its end: with a result, or with a reason why there is none."""
        return self.info["result"] is not None or bool(self.info.get("reason"))

    @property
    def kind(self) -> str:
        """music, char or word."""
        return self.info["data"]["kind"]

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return ModelSpec.from_dict(self.info["model"])

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data, checked against what the run wrote."""
        path = self.path / "recipe.toml"
        recipe = read_recipe(path)
        if self.info.get("recipe_sha256") not in (None, recipe_digest(recipe)):
            raise UserError(
                f"{path} is not what the run was trained by (checksum): `deeprnn resume {self.path}` mends it"
            )
        return recipe

    def model(self) -> SequenceModel:
        """The model with its best parameters, for evaluation, on the CPU."""
        spec, tensors = self.spec, load_best(self.path).tensors
        other = UserError(
            f"{self.path / 'run.json'} describes another model than best.safetensors holds: one of them was altered"
        )
        # Before anything is built: a forged description may have more layers, or wider ones, than there is memory for.
        sizes = [size for level in spec.levels for size in (level.hidden_size, *level.intermediate_sizes)]
        entries = sum(tensor.numel() for tensor in tensors.values())
        if len(sizes) > len(tensors) or dissect(spec).parameters != entries:
            raise other
        model = SequenceModel(spec, initialise=False)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise other from error
        return model.eval()

    def generate(self, **options: Unpack[GenerateOptions]) -> Music | Text:
        """Music or text by this run; the options are those of `deeprnn.generation.generate.from_run`."""
        # By name: generation lies outside of this module, which only offers the way there.
        return import_module("deeprnn.generation.generate").from_run(self, **options)

    @property
    def grid(self) -> Any:
        """The music's grid, None for text or where it is unknown."""
        from deeprnn.data.music import Grid

        path = self.path / "grid.json"
        if not path.exists():
            return None
        read = _read_json(path)
        try:
            return Grid.from_dict(read)
        except UserError as error:
            raise UserError(f"{path} is damaged: {error}. {_mend(path)}") from None

    @property
    def vocabulary(self) -> list[str] | None:
        """A text's symbols, None for music."""
        if self.kind == "music":
            return None
        path, size = self.path / "vocabulary.json", self.spec.output_size
        symbols = _read_json(path)
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise UserError(f"{path} is damaged: it is no list of symbols. {_mend(path)}")
        if len(symbols) != size:
            raise UserError(
                f"{path} is damaged: it has {len(symbols):,} symbols, and the model {size:,}. {_mend(path)}"
            )
        return symbols

    def metrics(self) -> list[dict[str, Any]]:
        """One dict an epoch; a line that was being written when the run was cut off is left out."""
        path = self.path / "metrics.jsonl"
        if not os.path.lexists(path):
            return []
        try:
            lines = read_regular(path, MOST_METRICS).decode().split("\n")
            rows = [json.loads(line) for line in lines[:-1] if line]
        except (ValueError, RecursionError) as error:  # of a line of brackets within brackets
            raise UserError(f"{path} cannot be read: {error}") from None
        if not all(isinstance(row, dict) and _is_epoch(row) for row in rows):
            raise UserError(f"{path} holds lines that are no epoch's")
        return rows


def _read_json(path: Path) -> Any:
    try:
        return read_json(path, MOST_JSON)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: {path.parent} is not a run folder, or is not whole. {_mend(path)}"
        ) from None
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}. {_mend(path)}") from None


def _is_epoch(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl says what an epoch came to."""
    return all(isinstance(row.get(name), kind) for name, kind in ROW.items()) and all(
        value is None or isinstance(value, _NUMBER) for value in row.values()
    )


Types = Mapping[str, type | tuple[type, ...]]


def _read_table(path: Path, keys: Types, optional: Types = MappingProxyType({})) -> dict[str, Any]:
    """A JSON object that has these keys, each with a value of its type; anything else is damage."""
    table = _read_json(path)
    if not isinstance(table, dict):
        raise UserError(f"{path} is damaged: it holds no table. {_mend(path)}")
    for name, kind in {**keys, **optional}.items():
        value: Any = table
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is _ABSENT and name in keys:
            raise UserError(f"{path} is damaged: it has no {name!r}. {_mend(path)}")
        if value is not _ABSENT and not isinstance(value, kind):
            raise UserError(f"{path} is damaged: {name!r} is {value!r:.40}. {_mend(path)}")
    return table


def _mend(path: Path) -> str:
    return f"`deeprnn resume {path.parent}` writes it again"


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe file as plain data."""
    try:
        return tomllib.loads(read_regular(path, MOST_JSON).decode())
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is not a run folder, or is not whole") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """A checksum of what a recipe says, whatever its layout and comments."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def load_run(path: str | Path) -> Run:
    """The run in a folder; for a population, its best member by validation. "bach" comes with the package."""
    folder = shipped.find(path) or Path(path)
    if (folder / "run.json").exists():
        return Run(folder)
    if (folder / "population.json").exists():
        return best_member(folder)
    if not folder.exists():
        ours = " or ".join(shipped.names())
        raise UserError(
            f"there is no run at {folder}: `deeprnn runs` lists the runs, and {ours} comes with deeprnn"
        )
    raise UserError(f"{folder} holds no run.json: it is not a run folder. `deeprnn runs` lists the runs")


def population(folder: Path) -> list[Run]:
    """The members of a population."""
    path = folder / "population.json"
    names = _read_table(path, {"members": list})["members"]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{path} is damaged: 'members' are no names of folders. {_mend(path)}")
    return [Run(folder / name) for name in names]


def best_member(folder: Path) -> Run:
    """The member with the lowest validation metric so far."""
    scored = [
        (min((r["valid"] for r in run.metrics()), default=float("inf")), run) for run in population(folder)
    ]
    return min(scored, key=lambda pair: pair[0])[1]


def list_runs(root: str | Path = "runs") -> list[Run]:
    """Every run below a folder, members of populations and first stages included, oldest first."""
    runs = [Run(p.parent) for p in Path(root).rglob("run.json")]
    return sorted(runs, key=lambda run: (_created(run), str(run.path)))


def _created(run: Run) -> str:
    """When a run began; a folder that cannot be read is still listed, first."""
    try:
        return str(run.info.get("created") or "")
    except (UserError, AttributeError):
        return ""


def new_folder(root: str | Path, stem: str) -> Path:
    """A folder that does not exist yet: runs/jsb-dots-1, -2, ..."""
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot keep runs in {root} ({error.strerror}): choose another folder with --out"
        ) from None
    number = 1
    while True:
        folder = root / f"{stem}-{number}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


# ---- writing


def now() -> str:
    """The time as run.json has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def start_run(folder: Path, info: Mapping[str, Any], recipe_toml: str, side_files: Mapping[str, Any]) -> None:
    """Lay out a new run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", recipe_toml.encode())
    for name, content in side_files.items():
        write_json(folder / name, content)
    digest = recipe_digest(tomllib.loads(recipe_toml))
    times = {"created": now(), "updated": now()}
    write_json(folder / "run.json", {"format": FORMAT, **info, "recipe_sha256": digest, **times})


def change_run(folder: Path, **changes: Any) -> None:
    """Replace fields of run.json."""
    info = _read_json(folder / "run.json")
    write_json(folder / "run.json", {**info, "updated": now(), **changes})


def change_population(folder: Path, **changes: Any) -> None:
    """Replace fields of population.json."""
    path = folder / "population.json"
    write_json(path, {**_read_json(path), **changes})


def start_population(folder: Path, members: Sequence[str], recipe_toml: str) -> None:
    """The small parent file of a population."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", recipe_toml.encode())
    digest = recipe_digest(tomllib.loads(recipe_toml))
    write_json(
        folder / "population.json", {"format": FORMAT, "members": list(members), "recipe_sha256": digest}
    )
