"""Renaming, tagging and deleting runs: run folders inside the served ones alone, and never one that is in use."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deeprnn.errors import UserError
from deeprnn.files import open_atomically
from deeprnn.runs.reading import read_json, regular
from deeprnn.runs.shipped import is_shipped
from deeprnn.training.tracking import TRACKERS
from deeprnn.web.library import LARGEST_JSON, Library, ListedRun, run_id
from deeprnn.web.refusals import Fields, Refusal
from deeprnn.web.summary import MOST_TAGS, clean_tags

NAME = re.compile(r"[^\W_][\w .,+=()@-]{0,79}")
# What training and its commands write into a run folder. Anything else belongs to somebody, and stops a deletion.
FILES = re.compile(
    r"run\.json|recipe\.toml|population\.json|metrics\.jsonl|progress\.jsonl|grid\.json|vocabulary\.json|openings\.json"
    r"|(best|last|previous)\.(json|safetensors)|ledger\.json|tags\.json|tracking-\w+\.json|curves\.png|\.lock|\..*\.tmp"
)
FOLDERS = re.compile(r"pretrain|start|seed-[\w.+-]+")


def rename(library: Library, entry: ListedRun, fields: Fields) -> dict[str, str]:
    """Give a run's folder another name beside its old one; the new id."""
    name = fields.text("name", 200)
    if not NAME.fullmatch(name) or name != name.strip():
        raise Refusal(422, f"{name!r} is no name for a run: use letters, digits, spaces and .,+=()@-_, at most 80, "
                           "a letter or digit first")  # fmt: skip
    place = entry.path.with_name(name)
    with _locked(library, entry):
        if os.path.lexists(place):
            raise Refusal(409, f"there is a {name!r} beside this run already: choose another name")
        info = read_json(entry.path / "run.json", LARGEST_JSON)
        if not isinstance(info, dict):
            raise Refusal(422, "run.json holds no table")
        with open_atomically(entry.path / "run.json") as file:
            file.write((json.dumps({**info, "name": name}, indent=1, ensure_ascii=False) + "\n").encode())
        os.rename(entry.path, place)
    library.forget()
    return {"id": run_id(place)}


def tag(library: Library, entry: ListedRun, fields: Fields) -> dict[str, list[str]]:
    """Keep these tags with a run, instead of those it had; they lie in a file of their own, so it may be training."""
    tags = fields.words("tags", 50)
    clean = clean_tags(tags)
    if clean != list(dict.fromkeys(tags)):
        raise Refusal(422, f"tags are up to {MOST_TAGS} short words or phrases without commas")
    _inside(library, entry)
    with _explained(entry), open_atomically(_regular(entry.path / "tags.json")) as file:
        file.write((json.dumps(clean, ensure_ascii=False) + "\n").encode())
    library.forget()
    return {"tags": clean}


def delete(library: Library, entry: ListedRun, fields: Fields) -> dict[str, str]:
    """Delete a run's folder for good; the request repeats its name, so that nobody deletes another than they see."""
    confirmed = fields.text("name", 2000)
    if confirmed != entry.summary["name"]:
        raise Refusal(409, f"this is the run {entry.summary['name']}, not {confirmed!r}: nothing was deleted")
    with _locked(library, entry):
        foreign = sorted(_foreign(entry.path))
        if foreign:
            shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if len(foreign) > 4 else "")
            raise Refusal(409, f"the folder also holds what no run writes ({shown}): move it elsewhere, or delete "
                               "the folder by hand. Nothing was deleted")  # fmt: skip
        # Under a hidden name first: a deletion that is cut off leaves no half of a run in the list.
        gone = entry.path.with_name(f".deleted-{secrets.token_hex(6)}")
        os.rename(entry.path, gone)
        shutil.rmtree(gone)
    library.forget()
    return {"deleted": confirmed}


@contextmanager
def _locked(library: Library, entry: ListedRun) -> Iterator[None]:
    """Hold a run's folder, so that nobody trains in it meanwhile."""
    from deeprnn.runs.locking import held, lock

    _inside(library, entry)
    above = entry.path.parent
    if regular(above / "run.json") or regular(above / "population.json"):
        raise Refusal(409, f"the run {entry.summary['name']} is a part of {above.name}, which needs it")
    if library.again(entry)["status"] == "running":
        raise Refusal(409, f"the run {entry.summary['name']} is training: stop it first")
    for folder in (entry.path, entry.path / "pretrain"):
        if regular(_regular(folder / ".lock")) and held(folder):
            raise Refusal(409, f"the run {entry.summary['name']} is in use: stop what uses it first")
    with _explained(entry), lock(entry.path):
        yield


def _inside(library: Library, entry: ListedRun) -> None:
    """Refuse a served folder itself, and anything that is not a real folder within one."""
    if is_shipped(entry.path):
        raise Refusal(409, f"{entry.summary['name']} comes with deeprnn and cannot be changed")
    real = entry.path.resolve()
    if real != entry.path or not any(folder in real.parents for folder in library.folders):
        raise Refusal(
            409, f"{entry.summary['name']} is the served folder itself: serve the one that holds it"
        )


@contextmanager
def _explained(entry: ListedRun) -> Iterator[None]:
    """What the file system or another process refuses, in words."""
    try:
        yield
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = reason.replace(str(entry.path), entry.summary["name"])
        raise Refusal(409, f"the run {entry.summary['name']} cannot be changed: {reason}") from error


def _regular(path: Path) -> Path:
    """A file that may be written: a link would lead elsewhere, a pipe would wait."""
    if os.path.lexists(path) and not regular(path):
        raise Refusal(409, f"{path.name} is not a regular file")
    return path


def _foreign(folder: Path) -> Iterator[str]:
    """What lies in a run folder and was not written by training."""
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                if FOLDERS.fullmatch(item.name):
                    yield from (f"{item.name}/{name}" for name in _foreign(Path(item.path)))
                elif item.name not in TRACKERS:
                    yield f"{item.name}/"
            elif not FILES.fullmatch(item.name):
                yield item.name
