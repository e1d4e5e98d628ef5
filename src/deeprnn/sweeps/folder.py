"""A sweep's folder: what is searched, where its trials are written down, and by which name it calls trials its own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json
from deeprnn.runs.reading import read_json
from deeprnn.sweeps.spec import Spec, load_spec, recipe_text
from deeprnn.sweeps.study import Study
from deeprnn.sweeps.trial_storage import JOURNAL, same_place, storage_note, without_password

SWEEP, OWNER = "sweep.toml", "owner.json"
HIDDEN_PASSWORD = ":***@"
"""where a storage's password is not kept"""


@dataclass(frozen=True)
class Owner:
    """A sweep's folder among those that share a study."""

    name: str
    storage: str
    """as it is kept: without password; empty for the folder's own journal"""


def read_owner(folder: Path) -> Owner | None:
    """Who owns the folder's trials, and where they are; None where no sweep has begun."""
    path = folder / OWNER
    if not path.exists():
        return None
    plain = read_json(path, 2**16)
    name, storage = (plain.get("owner"), plain.get("storage")) if isinstance(plain, dict) else (None, None)
    if not isinstance(name, str) or not name or not isinstance(storage, str):
        raise UserError("it names no storage")
    return Owner(name, storage)


def _read_owner_unless_lost(folder: Path, storage: str) -> Owner | None:
    """`read_owner`, but None where the file is lost and the trials can be found without it."""
    try:
        owner, lost = read_owner(folder), f"{folder / OWNER} is missing"
    except UserError as error:
        owner, lost = None, f"{folder / OWNER} is damaged ({error})"
    if owner is None and (folder / SWEEP).exists() and not storage and not (folder / JOURNAL).exists():
        raise UserError(f"{lost}: it said where the trials are; give their --storage, or put it back")
    return owner


def open_study(spec: Spec, folder: Path, storage: str = "") -> Study:
    """The folder's trials, in the storage that is named or that the folder was begun with.

    Refuses another sweep than the folder's, another storage, and a search that goes on after its winner was scored.
    """
    if (folder / SWEEP).exists():
        changed = load_spec(folder / SWEEP).difference(spec)
        if changed:
            raise UserError(
                f"{folder} holds another sweep: its {changed} differs. Only `trials` may change; choose another --out"
            )
    owner = _read_owner_unless_lost(folder, storage)
    study = Study(spec, folder, _storage_of(folder, owner, storage), owner.name if owner else "")
    with study.answering():
        study.owner = study.owner or study.previous_owner() or secrets.token_hex(8)
        _check_search(study, folder, owner, storage)
    if owner is None or owner.storage != storage_note(study.url):
        write_json(folder / OWNER, {"owner": study.owner, "storage": storage_note(study.url)})
    return study


def _storage_of(folder: Path, owner: Owner | None, storage: str) -> str:
    """The named storage, or the folder's own."""
    if storage or owner is None:
        return storage
    if HIDDEN_PASSWORD in owner.storage:
        raise UserError(
            f"the trials of {folder} are in {owner.storage}: give that --storage with its password, or without one "
            "where PGPASSWORD or ~/.pgpass has it"
        )
    return owner.storage


def _check_search(study: Study, folder: Path, owner: Owner | None, storage: str) -> None:
    begun, most = study.begun, study.spec.trials
    # A storage may move, a password may come or go; but the trials that were begun must be there.
    if (
        owner is not None
        and storage
        and (folder / "packs").exists()
        and not same_place(storage, owner.storage or str(folder / JOURNAL))
        and not any(trial.owner == owner.name for trial in study.trials())
    ):
        before = owner.storage or folder / JOURNAL
        raise UserError(
            f"the trials of {folder} are in {before}, not in {without_password(storage)}: give that --storage, or "
            "choose another --out"
        )
    if most < begun:
        raise UserError(f"{most} trials are fewer than the {begun} that have begun: trials can only be added")
    if study.score is not None and most > begun:
        raise UserError(
            f"{folder}: the winner was scored on test, so this search is over ({begun} trials): begin another, with "
            "an --out of its own"
        )


def write_sweep(spec: Spec, folder: Path) -> None:
    """The sweep's file and its recipe, from which it can be gone on with."""
    write_atomically(folder / "recipe.toml", recipe_text(spec))
    write_atomically(folder / SWEEP, spec.to_toml("recipe.toml"))
