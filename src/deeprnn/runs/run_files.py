"""The files of a run folder: what run.json and its neighbours hold, read with checks and written.

Whatever cannot be read is an error that names the file, what is wrong with it, and the command that writes it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json
from deeprnn.runs.checkpoint import MOST_JSON
from deeprnn.runs.reading import read_json, read_regular

Types = Mapping[str, type | tuple[type, ...]]
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
_NOTHING, NUMBER = type(None), (int, float)
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
    "paper": (*NUMBER, _NOTHING),
    "reason": (str, _NOTHING),
    "seconds": (*NUMBER, _NOTHING),
    "created": str,
    "updated": str,
    "recipe_sha256": str,
    "result.best_epoch": int,
}
"""what it may have besides that somebody relies on"""
ROW = {"epoch": int, "valid": NUMBER}
"""what every line of metrics.jsonl has; its other values are numbers, too, or nothing"""
_ABSENT = object()
MOST_METRICS = 2**25
"""bytes of metrics.jsonl that are read: 100,000 epochs"""


def read_file(path: Path) -> Any:
    """A JSON file's content."""
    try:
        return read_json(path, MOST_JSON)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: {path.parent} is not a run folder, or is not whole. {remedy(path)}"
        ) from None
    except UserError as error:
        raise UserError(f"{path} is damaged: {error}. {remedy(path)}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One dict an epoch; nothing where there is no file, and without the last line where that was cut off."""
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


def _is_epoch(row: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl says what an epoch came to."""
    return all(isinstance(row.get(name), kind) for name, kind in ROW.items()) and all(
        value is None or isinstance(value, NUMBER) for value in row.values()
    )


def read_table(path: Path, keys: Types, optional: Types = MappingProxyType({})) -> dict[str, Any]:
    """A JSON object that has these keys, each with a value of its type; anything else is damage."""
    table = read_file(path)
    if not isinstance(table, dict):
        raise UserError(f"{path} is damaged: it holds no table. {remedy(path)}")
    for name, kind in {**keys, **optional}.items():
        value: Any = table
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is _ABSENT and name in keys:
            raise UserError(f"{path} is damaged: it has no {name!r}. {remedy(path)}")
        if value is not _ABSENT and not isinstance(value, kind):
            raise UserError(f"{path} is damaged: {name!r} is {value!r:.40}. {remedy(path)}")
    return table


def remedy(path: Path) -> str:
    """What to do about a damaged file."""
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
    info = read_file(folder / "run.json")
    write_json(folder / "run.json", {**info, "updated": now(), **changes})


def change_population(folder: Path, **changes: Any) -> None:
    """Replace fields of population.json."""
    path = folder / "population.json"
    write_json(path, {**read_file(path), **changes})


def start_population(folder: Path, members: Sequence[str], recipe_toml: str) -> None:
    """The small parent file of a population."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", recipe_toml.encode())
    digest = recipe_digest(tomllib.loads(recipe_toml))
    write_json(
        folder / "population.json", {"format": FORMAT, "members": list(members), "recipe_sha256": digest}
    )
