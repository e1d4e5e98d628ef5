"""Models in memory: loaded once, the least recently used put away first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from deeprnn.web.library import Entry
from deeprnn.web.refusals import Refusal

if TYPE_CHECKING:
    from deeprnn.data import Grid
    from deeprnn.model.models import SequenceModel
    from deeprnn.runs.folder import Run


class Loaded:
    """A run with its best model, ready to be asked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model: SequenceModel = run.model()
        self.vocabulary: list[str] = run.vocabulary or []
        self.grid: Grid | None = run.grid

    @property
    def kind(self) -> str:
        """music, char or word."""
        return self.run.kind

    @property
    def keys(self) -> int:
        """Width of a frame."""
        return self.model.spec.input_size


class Shelf:
    """A bounded number of loaded runs, renewed when their best parameters change. Used from threads."""

    def __init__(self, most: int) -> None:
        self.most, self.loads = most, 0
        self._kept: OrderedDict[str, tuple[Any, Loaded]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, entry: Entry) -> Loaded:
        """The loaded run; the lock is held while loading, so that fifty askers load it once."""
        weights = entry.path / "best.safetensors"
        with self._lock:
            try:
                status = weights.stat()
            except OSError:
                raise Refusal(409, f"the run {entry.summary['name']} has no trained parameters yet: "
                                   "they appear after its first epoch") from None  # fmt: skip
            mark = (status.st_mtime_ns, status.st_size)
            known = self._kept.pop(entry.id, None)
            loaded = known[1] if known and known[0] == mark else self._load(entry)
            self._kept[entry.id] = (mark, loaded)
            while len(self._kept) > self.most:
                self._kept.popitem(last=False)
            return loaded

    def _load(self, entry: Entry) -> Loaded:
        from deeprnn.runs.folder import load_run

        self.loads += 1
        try:
            return Loaded(load_run(entry.path))
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:  # a damaged folder
            message = str(error).replace(str(entry.path), entry.summary["name"])
            raise Refusal(422, f"the run {entry.summary['name']} cannot be loaded: {message}") from error

    def music(self, entry: Entry) -> Loaded:
        """A loaded music run; refuses others."""
        loaded = self.get(entry)
        if loaded.kind != "music":
            raise Refusal(409, f"the run {entry.summary['name']} was trained on text, not on music")
        return loaded

    def text(self, entry: Entry) -> Loaded:
        """A loaded text run; refuses others."""
        loaded = self.get(entry)
        if loaded.kind not in ("char", "word"):
            raise Refusal(409, f"the run {entry.summary['name']} was trained on music, not on text")
        return loaded
