"""Models in memory: loaded once, the least recently used put away first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.errors import UserError
from deeprnn.model.structure import dissect
from deeprnn.runs.reading import open_regular, read_json, regular
from deeprnn.web.library import ListedRun
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal
from deeprnn.web.summary import spec_of

if TYPE_CHECKING:
    from deeprnn.data import Grid
    from deeprnn.model.sequence_model import SequenceModel
    from deeprnn.model.specs import ModelSpec
    from deeprnn.runs.folder import Run

LARGEST_VOCABULARY = 16_000_000  # bytes
LARGEST_HEADER = 1_000_000  # bytes of a safetensors file's table of contents


class Loaded:
    """A run with its best model, ready to be asked.

    Every part is checked against the others: a grid of another width or parameters that are no numbers would
    fail in the middle of an answer.
    """

    def __init__(self, run: Run, spec: ModelSpec) -> None:
        self.kind: str = run.kind
        text = self.kind in ("char", "word")
        if not text and self.kind != "music":
            raise UserError(f"it was trained on {self.kind!r}, which is neither music nor text")
        if (
            spec.symbols != text
            or (spec.output == "categorical") != text
            or spec.input_size != spec.output_size
        ):
            raise UserError(f"its model is none of {'text' if text else 'music'}")
        self.vocabulary: list[str] = run.vocabulary or []
        self.grid: Grid | None = None if text else run.grid
        if self.grid is not None and self.grid.size != spec.input_size:
            raise UserError(f"its grid has {self.grid.size} keys but its model takes {spec.input_size}")
        self.most_notes: int | None = run.info["data"].get("most_notes")
        self.model: SequenceModel = run.model()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            raise UserError("some of its parameters are not finite numbers")

    @property
    def keys(self) -> int:
        """Width of a frame."""
        return self.model.spec.input_size


class Shelf:
    """A bounded number of loaded runs, renewed when their best parameters change. Used from threads."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.loads = limits, 0
        self._models: OrderedDict[str, tuple[Any, Loaded]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._models)

    def get(self, entry: ListedRun) -> Loaded:
        """The loaded run; the lock is held while loading, so that fifty askers load it once."""
        weights = entry.path / "best.safetensors"
        with self._lock:
            status = regular(weights)
            if status is None:
                raise Refusal(409, f"the run {entry.summary['name']} has no trained parameters yet: "
                                   "they appear after its first epoch")  # fmt: skip
            mark = (status.st_mtime_ns, status.st_size)
            known = self._models.pop(entry.id, None)
            loaded = known[1] if known and known[0] == mark else self._load(entry)
            self._models[entry.id] = (mark, loaded)
            while len(self._models) > self.limits.models:
                self._models.popitem(last=False)
            return loaded

    def _load(self, entry: ListedRun) -> Loaded:
        from deeprnn.runs.folder import Run

        self.loads += 1
        try:
            return Loaded(Run(entry.path), self._check(entry.path))
        except (OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            message = str(error).replace(str(entry.path), entry.summary["name"])  # a damaged folder
            raise Refusal(422, f"the run {entry.summary['name']} cannot be loaded: {message}") from error

    def _check(self, folder: Path) -> ModelSpec:
        """The model of a run whose files are what they should be: regular, bounded, and of one size."""
        for name in ("run.json", "best.json", "grid.json", "vocabulary.json"):
            if os.path.lexists(folder / name):
                read_json(folder / name, LARGEST_VOCABULARY)
        spec = spec_of(read_json(folder / "run.json", LARGEST_VOCABULARY), self.limits.layers)
        if spec is None:
            raise UserError(f"run.json describes no model of at most {self.limits.layers} layers")
        with open_regular(folder / "best.safetensors") as file:
            size, header = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if size > self.limits.model_bytes:
            raise UserError(
                f"best.safetensors has {size:,} bytes; at most {self.limits.model_bytes:,} are loaded"
            )
        if header > LARGEST_HEADER:
            raise UserError(f"best.safetensors is altered: its table of contents would have {header:,} bytes")
        parameters = dissect(spec).parameters
        if (
            2 * parameters > size
        ):  # bytes a number, at least: nothing is allocated for a model that is not there
            raise UserError(
                f"best.safetensors has {size:,} bytes, too few for the {parameters:,} parameters of run.json"
            )
        return spec

    def music(self, entry: ListedRun) -> Loaded:
        """A loaded music run; refuses others."""
        loaded = self.get(entry)
        if loaded.kind != "music":
            raise Refusal(409, f"the run {entry.summary['name']} was trained on text, not on music")
        return loaded

    def text(self, entry: ListedRun) -> Loaded:
        """A loaded text run; refuses others."""
        loaded = self.get(entry)
        if loaded.kind not in ("char", "word"):
            raise Refusal(409, f"the run {entry.summary['name']} was trained on music, not on text")
        return loaded
