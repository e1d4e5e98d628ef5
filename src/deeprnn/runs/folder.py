"""Run folders: one by its name, all below a folder, and what a run leaves behind, read again.

run = load_run("runs/jsb-dots-1")
model = run.model()                 # best parameters, on the CPU; needs no training data and no GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from deeprnn.errors import UserError
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import dissect
from deeprnn.runs import shipped
from deeprnn.runs.checkpoint import load_best
from deeprnn.runs.locking import held
from deeprnn.runs.run_files import (
    KEYS,
    NUMBER,
    OPTIONAL,
    read_file,
    read_metrics,
    read_recipe,
    read_table,
    recipe_digest,
    remedy,
)

if TYPE_CHECKING:
    from deeprnn.generation.options import GenerateOptions
    from deeprnn.generation.outputs import Music, Text


@dataclass(frozen=True)
class Run:
    """One trained (or training) model on disk."""

    path: Path

    @cached_property
    def info(self) -> dict[str, Any]:
        """run.json."""
        path = self.path / "run.json"
        info = read_table(path, KEYS, OPTIONAL)
        kind, result = info["data"]["kind"], info["result"] or {}
        if kind not in HEADLINE:
            raise UserError(f"{path} is damaged: 'data.kind' is {kind!r:.40}. {remedy(path)}")
        for split in result.keys() & {"train", "valid", "test"}:
            score = result[split]
            if not isinstance(score, dict) or not isinstance(score.get(HEADLINE[kind].key), NUMBER):
                raise UserError(
                    f"{path} is damaged: 'result.{split}' has no {HEADLINE[kind].key}. {remedy(path)}"
                )
        return info

    @property
    def name(self) -> str:
        """As the run was named."""
        return self.info.get("name", self.path.name)

    @property
    def status(self) -> str:
        """running, finished, stopped or failed; interrupted where it was killed and nobody trains it now."""
        status = self.info["status"]
        # A population holds one lock for all members, a run also that of its first stage.
        if status == "running" and not any(held(p) for p in (self.path, *self.path.parents[:2])):
            return "interrupted"
        return status

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
        mismatch = UserError(
            f"{self.path / 'run.json'} describes another model than best.safetensors holds: one of them was altered"
        )
        # Before anything is built: a forged description may have more layers, or wider ones, than there is memory for.
        sizes = [size for level in spec.levels for size in (level.hidden_size, *level.intermediate_sizes)]
        entries = sum(tensor.numel() for tensor in tensors.values())
        if len(sizes) > len(tensors) or dissect(spec).parameters != entries:
            raise mismatch
        model = SequenceModel(spec, initialise=False)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise mismatch from error
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
        plain = read_file(path)
        try:
            return Grid.from_dict(plain)
        except UserError as error:
            raise UserError(f"{path} is damaged: {error}. {remedy(path)}") from None

    @property
    def vocabulary(self) -> list[str] | None:
        """A text's symbols, None for music."""
        if self.kind == "music":
            return None
        path, size = self.path / "vocabulary.json", self.spec.output_size
        symbols = read_file(path)
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise UserError(f"{path} is damaged: it is no list of symbols. {remedy(path)}")
        if len(symbols) != size:
            raise UserError(
                f"{path} is damaged: it has {len(symbols):,} symbols, and the model {size:,}. {remedy(path)}"
            )
        return symbols

    def metrics(self) -> list[dict[str, Any]]:
        """One dict an epoch; a line that was being written when the run was cut off is left out."""
        return read_metrics(self.path / "metrics.jsonl")


def load_run(path: str | Path) -> Run:
    """The run in a folder; for a population, its best member by validation. "bach" comes with the package."""
    folder = shipped.find(path) or Path(path)
    if (folder / "run.json").exists():
        return Run(folder)
    if (folder / "population.json").exists():
        return best_member(folder)
    if not folder.exists():
        packaged = " or ".join(shipped.names())
        raise UserError(
            f"there is no run at {folder}: `deeprnn runs` lists the runs, and {packaged} comes with deeprnn"
        )
    raise UserError(f"{folder} holds no run.json: it is not a run folder. `deeprnn runs` lists the runs")


def population(folder: Path) -> list[Run]:
    """The members of a population."""
    path = folder / "population.json"
    names = read_table(path, {"members": list})["members"]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{path} is damaged: 'members' are no names of folders. {remedy(path)}")
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
