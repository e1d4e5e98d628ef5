"""Run folders: what a training run leaves behind, and how it is read again.

run = load_run("runs/jsb-dots-1")
model = run.model()                 # best parameters, on the CPU; needs no training data and no GPU
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.model.models import SequenceModel
from deeprnn.model.specs import ModelSpec
from deeprnn.runs.checkpoint import held, load_best, write_atomically, write_json

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """One trained (or training) model on disk."""

    path: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json."""
        return _read_json(self.path / "run.json")

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
    def kind(self) -> str:
        """music, char or word."""
        return self.info["data"]["kind"]

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return ModelSpec.from_dict(self.info["model"])

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data."""
        path = self.path / "recipe.toml"
        return tomllib.loads(path.read_text(encoding="utf-8"))

    def model(self) -> SequenceModel:
        """The model with its best parameters, for evaluation, on the CPU."""
        model = SequenceModel(self.spec, initialise=False)
        model.load_state_dict(load_best(self.path).tensors)
        return model.eval()

    def generate(self, **options: Any) -> Any:
        """Music or text by this run; the options are those of `deeprnn.generation.generate.from_run`."""
        # By name: generation lies outside of this module, which only offers the way there.
        return import_module("deeprnn.generation.generate").from_run(self, **options)

    @property
    def grid(self) -> Any:
        """The music's grid, None for text or where it is unknown."""
        from deeprnn.data.music import Grid

        path = self.path / "grid.json"
        return Grid.from_dict(_read_json(path)) if path.exists() else None

    @property
    def vocabulary(self) -> list[str] | None:
        """A text's symbols, None for music."""
        path = self.path / "vocabulary.json"
        return _read_json(path) if path.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        """One dict an epoch; a line that was being written when the run was cut off is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [json.loads(line) for line in lines[:-1] if line]
        except ValueError as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        if not all(isinstance(row, dict) and {"epoch", "valid"} <= row.keys() for row in rows):
            raise UserError(f"{path} holds lines that are no epoch's")
        return rows


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is not a run folder, or is not whole") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def load_run(path: str | Path) -> Run:
    """The run in a folder; for a population, its best member by validation."""
    folder = Path(path)
    if (folder / "run.json").exists():
        return Run(folder)
    if (folder / "population.json").exists():
        return best_member(folder)
    if not folder.exists():
        raise UserError(f"there is no run at {folder}: `deeprnn runs` lists the runs")
    raise UserError(f"{folder} holds no run.json: it is not a run folder. `deeprnn runs` lists the runs")


def population(folder: Path) -> list[Run]:
    """The members of a population."""
    return [Run(folder / name) for name in _read_json(folder / "population.json")["members"]]


def best_member(folder: Path) -> Run:
    """The member with the lowest validation metric so far."""
    scored = [
        (min((r["valid"] for r in run.metrics()), default=float("inf")), run) for run in population(folder)
    ]
    return min(scored, key=lambda pair: pair[0])[1]


def list_runs(root: str | Path = "runs") -> list[Run]:
    """Every run below a folder, members of populations and first stages included, oldest first."""
    found = [Run(p.parent) for p in Path(root).rglob("run.json")]
    return sorted(found, key=lambda run: (_created(run), str(run.path)))


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
    write_json(folder / "run.json", {"format": FORMAT, **info, "created": now(), "updated": now()})


def change_run(folder: Path, **changes: Any) -> None:
    """Replace fields of run.json."""
    info = _read_json(folder / "run.json")
    write_json(folder / "run.json", {**info, **changes, "updated": now()})


def start_population(folder: Path, members: Sequence[str], recipe_toml: str) -> None:
    """The small parent file of a population."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "recipe.toml", recipe_toml.encode())
    write_json(folder / "population.json", {"format": FORMAT, "members": list(members)})


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware that a number may depend on."""
    import numpy
    import torch

    out = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    if device.startswith("cuda"):
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = torch.version.cuda
    return out


def commit() -> str | None:
    """The commit of the code, None outside a git checkout; `+` marks a checkout with changes."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None or git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed somewhere inside another project's checkout
    return f"{head}+" if git("status", "--porcelain", "--untracked-files=no", "--", str(here)) else head
