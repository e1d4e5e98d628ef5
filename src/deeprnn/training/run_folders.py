"""A run's folders, one a member: laid out before the first update, closed with results after the last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deeprnn import __version__
from deeprnn.cells import lookup
from deeprnn.data.music import MusicData, Songs
from deeprnn.data.openings import openings
from deeprnn.files import write_json
from deeprnn.model import notation, paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import Dropout
from deeprnn.runs import ledger
from deeprnn.runs.folder import Run
from deeprnn.runs.provenance import command_line, commit, environment
from deeprnn.runs.run_files import change_run, now, start_population, start_run
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import Trainer, Watcher
from deeprnn.training.members import MemberName, members_of
from deeprnn.training.recipe import Recipe, override, to_toml


def member_folders(recipe: Recipe, folder: Path) -> list[Path]:
    """Each member's own folder: the run's, or one below it."""
    members = members_of(recipe)
    return [folder] if len(members) == 1 else [folder / member.name for member in members]


def create_folders(recipe: Recipe, data: Data, folder: Path, device: torch.device | str) -> None:
    """Create the folder (and the members') with everything known before the first update."""
    members = members_of(recipe)
    spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    if len(members) > 1:
        start_population(folder, [m.name for m in members], to_toml(recipe))
    shared = {
        "status": "running",
        "data": {
            "name": data.name,
            "kind": data.kind,
            "path": own_path(recipe),
            "fingerprint": fingerprint(data),
            "most_notes": most_notes(data),
        },
        "model": spec.to_dict(),
        "label": label(recipe),
        "parameters": sum(p.numel() for p in SequenceModel(spec, "meta", initialise=False).parameters()),
        "version": __version__,
        "commit": commit(),
        "command": command_line(),
        "environment": environment(str(device)),
        "paper": paper.result(data.name, recipe.model.kind) if is_paper(recipe) else None,
        "metric": HEADLINE[data.kind].name,
        "result": None,
    }
    for member, home in zip(members, member_folders(recipe, folder), strict=True):
        toml = to_toml(member_recipe(recipe, member))
        name = folder.name if home == folder else f"{folder.name}/{member.name}"
        start_run(home, {"name": name, **shared, "seed": member.seed}, toml, side_files(data))


def member_recipe(recipe: Recipe, member: MemberName) -> Recipe:
    """The recipe that trains one member alone."""
    changes = {"seeds": [member.seed], "rates": [], "transpositions": []}
    return override(
        recipe,
        {**changes, "optimiser.rate": member.rate, "data.random_transpose": member.transposed},
    )


def fingerprint(data: Data) -> str:
    """A hash of the data in a few characters: another text or other songs have another."""
    digest = hashlib.sha256()
    for name, split in data.splits.items():
        digest.update(name.encode())
        arrays = (split.lengths, split.packed) if isinstance(split, Songs) else (np.asarray(split, np.int64),)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
    if not isinstance(data, MusicData):
        digest.update(json.dumps(data.vocabulary).encode())
    return digest.hexdigest()[:16]


def most_notes(data: Data) -> int | None:
    """Notes that sound at once in the training part, at the most: music that is generated has no more."""
    if not isinstance(data, MusicData):
        return None
    return max((int(song.sum(1).max(initial=0)) for song in data.splits["train"]), default=0) or None


def own_path(recipe: Recipe) -> str | None:
    """Where a person's own data lies, None for a named set."""
    from deeprnn.data import names

    return None if recipe.data.name in names() else recipe.data.name


def side_files(data: Data) -> dict[str, Any]:
    """What generation needs of the data: a music's grid, a text's vocabulary, some beginnings."""
    beginnings = {"openings.json": openings(data)}
    if isinstance(data, MusicData):
        return beginnings if data.grid is None else {"grid.json": data.grid.to_dict(), **beginnings}
    return {"vocabulary.json": data.vocabulary, **beginnings}


def label(recipe: Recipe) -> str:
    """The model's name as the paper would print it, or the recipe's own word where it has one."""
    if recipe.model.cell:
        return lookup.label(recipe.model.cell) + notation.NADE * (recipe.model.output == "nade")
    shape = replace(recipe.model, embedding=0, tied=False)  # the name depends on neither data nor embedding
    spec = shape.spec(1, False, Dropout())
    has_own_name = recipe.model.kind not in (notation.short_name(spec), *paper.LABELS)
    return recipe.model.kind if has_own_name else notation.label(spec)


def is_paper(recipe: Recipe) -> bool:
    """Whether the model has Table 1's size, so that the paper's number stands beside its own."""
    if recipe.model.cell or recipe.model.output != "plain":
        return False
    if recipe.model.kind == "dots-star":
        return True  # its sizes are not published
    try:
        published = paper.spec(recipe.data.name, recipe.model.kind)
    except (KeyError, StopIteration):
        return False
    categorical = published.output == "categorical"
    return recipe.model.spec(published.input_size, categorical, published.dropout) == published


def finish(trainer: Trainer, folder: Path, watchers: Sequence[Watcher] = ()) -> list[dict[str, Any] | None]:
    """Score the best parameters, write each run's ledger entry and close its folder."""
    results = trainer.results(watchers)
    if not trainer.ranks.lead:
        return results
    for p, (home, result) in enumerate(zip(member_folders(trainer.recipe, folder), results, strict=True)):
        changes: dict[str, Any] = {
            "status": "failed" if result is None else "finished",
            "result": result,
            "reason": trainer.schedule.members[p].finished,
            "seconds": round(trainer.seconds, 1),
            "updated": now(),
        }
        if result is not None:  # before run.json says that all is done: a kill in between is made good
            run = Run(home)
            write_json(home / "ledger.json", ledger.entry(run, {**run.info, **changes}))
        change_run(home, **changes)
    return results
