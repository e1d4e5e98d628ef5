"""A run folder in which something was lost, damaged or changed: noticed, named, and written again where possible.

Everything here that writes is called by the process that holds the folder's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deeprnn.errors import UserError
from deeprnn.files import remove_leftovers, write_atomically, write_json
from deeprnn.runs import checkpoint, ledger
from deeprnn.runs.folder import Run, population
from deeprnn.runs.reading import read_json
from deeprnn.runs.run_files import change_population, change_run, read_recipe, recipe_digest
from deeprnn.training import run_folders, saving
from deeprnn.training.evaluate import Data
from deeprnn.training.loop import Trainer
from deeprnn.training.members import members_of
from deeprnn.training.recipe import Recipe, to_toml
from deeprnn.training.recipe.continuing import check_goes_on, lost_fields

logger = logging.getLogger("deeprnn")


def whole_recipe(folder: Path) -> Recipe:
    """The recipe of a run folder: recipe.toml, or the checkpoint's copy where that has lost something."""
    path = folder / "recipe.toml"
    saved = (checkpoint.read_meta(folder) or {}).get("recipe")
    try:
        written = read_recipe(path)
        lost = lost_fields(saved or {}, written)
        damage = (
            f"{path} has lost {', '.join(lost[:3])}{' and more' if len(lost) > 3 else ''}" if lost else ""
        )
    except UserError as error:
        if saved is None:
            raise
        written, damage = {}, str(error)
    if damage:
        logger.warning("%s: going on by the recipe that the checkpoint holds", damage)
        return Recipe.from_dict(saved or {})
    try:
        recipe = Recipe.from_dict(written)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if saved is not None:
        check_goes_on(saved, recipe, path)
    elif _digest_of(folder) not in (None, recipe_digest(written)):
        raise UserError(
            f"{path} is not what the run began with (checksum), and nothing was saved yet: train it again"
        )
    return recipe


def _digest_of(folder: Path) -> str | None:
    """The checksum of its recipe that a run or population wrote down."""
    for name in ("population.json", "run.json"):
        table = _readable(folder / name)
        if isinstance(table, dict):
            return table.get("recipe_sha256")
    return None


def _readable(path: Path) -> Any:
    """What a JSON file holds, None where it cannot be read."""
    try:
        return read_json(path, checkpoint.MOST_JSON)
    except (OSError, UserError):
        return None


def folders_are_whole(recipe: Recipe, folder: Path) -> bool:
    """Whether every run.json, and a population's own file, are there and whole."""
    places = run_folders.member_folders(recipe, folder)
    if len(places) > 1 and not _is_whole(
        folder / "population.json", lambda: [run.path for run in population(folder)] == places
    ):
        return False
    return all(_is_whole(home / "run.json", lambda home=home: bool(Run(home).info)) for home in places)


def _is_whole(path: Path, check: Callable[[], bool]) -> bool:
    if not os.path.lexists(path):
        return False
    try:
        problem = "" if check() else f"{path} is damaged"
    except UserError as error:
        problem = str(error)
    if problem:
        logger.warning("%s is written anew (%s)", path, problem)
    return not problem


def sweep(recipe: Recipe, folder: Path) -> None:
    """Remove what killed processes left half written."""
    for place in {folder, *run_folders.member_folders(recipe, folder)}:
        remove_leftovers(place)


def mend_recipes(recipe: Recipe, folder: Path) -> None:
    """Write recipe.toml again wherever it does not say what the run is trained by, and its checksum."""
    places = run_folders.member_folders(recipe, folder)
    for member, home in zip(members_of(recipe), places, strict=True):
        digest = _mend_recipe(home / "recipe.toml", run_folders.member_recipe(recipe, member))
        if Run(home).info.get("recipe_sha256") != digest:
            change_run(home, recipe_sha256=digest)
    if len(places) > 1:
        digest = _mend_recipe(folder / "recipe.toml", recipe)
        if _digest_of(folder) != digest:
            change_population(folder, recipe_sha256=digest)


def _mend_recipe(path: Path, recipe: Recipe) -> str:
    data = recipe.to_dict()
    try:
        unchanged = read_recipe(path) == data
    except UserError:
        unchanged = False
    if not unchanged:
        write_atomically(path, to_toml(recipe))
    return recipe_digest(data if not unchanged else read_recipe(path))


def mend_side_files(recipe: Recipe, data: Data, folder: Path) -> None:
    """Write again what generation needs of the data, where it was lost or damaged."""
    for home in run_folders.member_folders(recipe, folder):
        for name, content in run_folders.side_files(data).items():
            if _readable(home / name) != content:
                write_json(home / name, content)


def mend_finished(recipe: Recipe, folder: Path, data: Data, device: torch.device) -> None:
    """Write a finished run's best parameters and ledger entry again where they were lost or damaged."""
    finished = [
        home for home in run_folders.member_folders(recipe, folder) if Run(home).info["result"] is not None
    ]
    try:
        for home in finished:
            checkpoint.load_best(home)
    except UserError as damage:
        saver = saving.RunSaver(Trainer(recipe, data, device=device), folder)
        if not saver.restore():
            raise
        logger.warning("%s; written again from %s", str(damage).partition(":")[0], folder / "last.json")
        saver.save()
    for home in finished:
        entry = ledger.entry(Run(home))
        if _readable(home / "ledger.json") != entry:
            write_json(home / "ledger.json", entry)


def check_data(recipe: Recipe, data: Data, folder: Path) -> None:
    """Refuse to go on with other data than the run began with: that would be another run."""
    marks = {(checkpoint.read_meta(folder) or {}).get("fingerprint")}
    for home in run_folders.member_folders(recipe, folder):
        with contextlib.suppress(UserError):  # a lost or damaged run.json, which is mended later
            marks.add(Run(home).info["data"].get("fingerprint"))
    # Nothing is known of a new run, and of one by an earlier version.
    if marks - {None, run_folders.fingerprint(data)}:
        raise UserError(
            f"{recipe.data.name} has changed since {folder} began, which therefore cannot go on exactly: "
            "put the data back, or train a new run"
        )
