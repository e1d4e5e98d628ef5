"""Bring entries of the ledger's first format to the second, and back from history whatever was written over.

    python scripts/migrate_ledger.py            # results/runs, from this checkout's git history
    python scripts/migrate_ledger.py --check    # change nothing; fail if a result of the history is not there

An entry of the first format has neither the command that made it, nor whether the code had changes, nor what its
first stage cost, and its file is named by an identity that leaves the first stage out. What can be known is filled in,
what cannot is null; every other field stays as it is, and `migrated` says from which file and how.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from deeprnn.reproduction.entries import read_entry, record  # noqa: E402
from deeprnn.reproduction.identity import identity  # noqa: E402
from deeprnn.runs.ledger import FORMAT  # noqa: E402
from deeprnn.training.recipe import Recipe  # noqa: E402

FOLDER = "results/runs"
UNKNOWN = {"epochs": None, "updates": None, "seconds": None}


def git(*words: str) -> str:
    """What git answers in this checkout."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def history() -> dict[str, str]:
    """Every content that a file of the ledger ever had, with the name of that file."""
    lines = git(
        "log", "--all", "--raw", "--no-abbrev", "--no-renames", "--format=", "--", FOLDER
    ).splitlines()
    blobs: dict[str, str] = {}
    for line in lines:
        _, _, _, blob, change, path = line.split(maxsplit=5)
        if change != "D" and path.endswith(".json"):
            blobs.setdefault(blob, path)
    return {git("cat-file", "blob", blob): Path(path).name for blob, path in blobs.items()}


def key(raw: Mapping[str, Any]) -> str:
    """What no migration may change or lose: whose result it is, and the result."""
    names = ("name", "seed", "recipe", "finished", "commit", "stopped", "epochs", "result", "curve")
    return json.dumps([raw.get("first_stage"), *(raw[name] for name in names)], sort_keys=True)


def dirty(commit: str | None) -> bool | None:
    """Whether the code had changes; a commit of other than 12 digits is a caller's word, who did not say."""
    if commit is None or not re.fullmatch(r"[0-9a-f]{12}\+?", commit):
        return None
    return commit.endswith("+")


def first_cost(raw: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str]:
    """What a first stage cost, and how that is known."""
    wanted = identity(Recipe.from_dict(raw["first_stage"]))
    alike = [
        o for o in others if not o.get("first_stage") and identity(Recipe.from_dict(o["recipe"])) == wanted
    ]
    device = raw["environment"]["device"]
    for other in (o for o in alike if o["seed"] == raw["seed"]):
        cost = {"epochs": other["epochs"], "updates": other["curve"][-1]["step"], "seconds": other["seconds"]}
        same = (other["commit"], other["environment"]["device"]) == (raw["commit"], device)
        if same and other["finished"] <= raw["finished"]:
            return cost, f"first stage: the entry {other['name']}, of the same commit and device"
        if all(o["stopped"].startswith("all ") and o["epochs"] == other["epochs"] for o in alike):
            text = "the recipe's full length, as every entry of it; which run was started from is not known"
            return {**cost, "seconds": None}, f"first stage: {text}"
    return dict(UNKNOWN), "first stage: the run that was started from is not in the ledger"


def migrated(raw: Mapping[str, Any], name: str, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An entry of the first format in the second."""
    own = {"epochs": raw["epochs"], "updates": raw["curve"][-1]["step"], "seconds": raw["seconds"]}
    first, notes = raw.get("first_stage"), ["command: not recorded"]
    code = dirty(raw["commit"])
    if code is None:
        notes.append("dirty: the commit is the caller's word, who did not say")
    stages = [own]
    if first is not None:
        cost, note = first_cost(raw, others)
        stages, notes = [cost, own], [*notes, note]
    added = {"command": None, "dirty": code, "first_stage": first, "stages": stages}
    return {**raw, "format": FORMAT, **added, "migrated": {"from": name, "notes": notes}}


def check(contents: Mapping[str, str], folder: Path) -> int:
    """How many results of the history the ledger lacks, each one named."""
    here = {key(read_entry(path).raw) for path in folder.glob("*.json")}
    lost = sorted({name for content, name in contents.items() if key(json.loads(content)) not in here})
    for name in lost:
        print(f"not in {folder}: {name}")
    print(f"{len(contents)} contents in the history, {len(here)} results in {folder}, {len(lost)} lost")
    return len(lost)


def migrate(contents: Mapping[str, str], folder: Path) -> None:
    """Write every entry of the first format anew beside the ledger and, once all are there, into its place."""
    old = [(json.loads(content), name) for content, name in contents.items()]
    old = [(raw, name) for raw, name in old if raw["format"] < FORMAT]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        for raw, name in old:
            record(migrated(raw, name, [other for other, _ in old]), Path(place))
        made = {key(read_entry(path).raw): path for path in Path(place).glob("*.json")}
        if len(made) != len({key(raw) for raw, _ in old}):
            raise SystemExit("two entries share an identity, a seed and a length: nothing was changed")
        present = {key(read_entry(path).raw): path for path in folder.glob("*.json")}
        for result, path in made.items():
            before = present.get(result)
            if before is not None and read_entry(before).raw["format"] == FORMAT:
                continue
            os.replace(path, folder / path.name)
            if before is not None and before.name != path.name:
                before.unlink()


def main() -> int:
    """Migrate, or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a result is not there")
    folder, contents = ROOT / FOLDER, history()
    if not parser.parse_args().check:
        migrate(contents, folder)
    return int(check(contents, folder) > 0)


if __name__ == "__main__":
    sys.exit(main())
