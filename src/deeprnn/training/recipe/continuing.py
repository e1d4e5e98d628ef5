"""Whether a recipe may go on with what a checkpoint holds: its fields compared with those saved there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.training.recipe import Recipe

CHANGEABLE = ("stop.", "save.", "data.name")
"""what may differ: when to stop, when to save, and where the data lies, whose content has a checksum of its own"""


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by their dotted names; one that is written in two ways, "a.b" = … and a = {b = …}, is refused."""
    out: dict[str, Any] = {}
    for name, value in tables.items():
        inner = (
            {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
        )
        for key in inner.keys() & out.keys():
            raise UserError(f"{key} is given twice: keep one of the two")
        out |= inner
    return out


def lost_fields(saved: Mapping[str, Any], written: Mapping[str, Any]) -> list[str]:
    """Fields of a saved recipe that a recipe file lacks: a run writes every field out, so it was cut."""
    return [name for name in flat(saved) if name not in flat(written)]


def check_goes_on(saved: Mapping[str, Any], recipe: Recipe, place: Path) -> None:
    """Refuse to go on by a recipe that would have trained another model; a field of a later version is new."""
    now = flat(recipe.to_dict())
    for name, before in flat(saved).items():
        if name.startswith(CHANGEABLE) or now.get(name) == before:
            continue
        raise UserError(
            f"{place}: {name} is {now.get(name)!r}, but the run was trained with {before!r}: put that back, or "
            f"train a new run (only {', '.join(c.rstrip('.') for c in CHANGEABLE)} may change in a run)"
        )
