"""The runs below some folders: found by walking, kept by what changed, addressed by opaque ids."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.runs.reading import printable, read_json, read_regular, regular
from deeprnn.runs.shipped import FOLDER as SHIPPED
from deeprnn.runs.summary import Curve, summarise
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal
from deeprnn.web.summary import clean_tags, parse_rows

LARGEST_JSON = 1_000_000
LARGEST_METRICS = 16_000_000
CURVES_KEPT = 4  # whole learning curves in memory; of the others a summary


@dataclass(frozen=True)
class ListedRun:
    """One run folder as the page lists it."""

    id: str
    path: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Read:
    """What was made of a file, or why nothing was; `mark` tells whether the file has changed since."""

    mark: tuple[int, ...]
    value: Any = None
    problem: str | None = None


class Library:
    """All runs below the given folders.

    A request never names a path: ids are digests of where a run lies, looked up among the runs found.
    A file is read again only when its time or size changed, and folders are walked at most once a second.
    Whatever a folder holds, the worst that comes of it is its own row of the list, with the reason.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        limits: Limits,
        pause: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folders = [Path(folder).resolve() for folder in folders]
        self.limits = limits
        self.reads = 0
        """files opened so far"""
        self._pause, self._clock = pause, clock
        self._last = float("-inf")
        self._lock = threading.Lock()
        self._entries: dict[str, ListedRun] | None = None
        self._cache: dict[Path, _Read] = {}
        self._curves: OrderedDict[Path, _Read] = OrderedDict()

    def entries(self) -> list[ListedRun]:
        """All runs, newest first."""
        return list(self._fresh().values())

    def get(self, id: str) -> ListedRun:
        """The run of an id."""
        run = (self._entries or {}).get(id)
        if run is None or not run.path.is_dir():
            run = self._fresh().get(id)
        if run is None or not run.path.is_dir():
            raise Refusal(404, "there is no such run: it may have been moved or deleted")
        return run

    def forget(self) -> None:
        """Walk anew when next asked: a run was moved or deleted."""
        self._last = float("-inf")

    def again(self, entry: ListedRun) -> dict[str, Any]:
        """The run's summary as it is now."""
        return {"id": entry.id, "name": entry.summary["name"], **self._summary(entry.path)}

    def metrics(self, entry: ListedRun) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a line that is still being written is left out."""
        path = entry.path / "metrics.jsonl"
        curve = self._read(path, self._curves.pop(path, None), _rows)
        if curve is None:
            return []
        self._curves[path] = curve
        while len(self._curves) > CURVES_KEPT:
            self._curves.popitem(last=False)
        return curve.value or []

    def info(self, entry: ListedRun) -> dict[str, Any]:
        """The run's run.json."""
        stored = self._cached(entry.path / "run.json", _json)
        if stored is None or not isinstance(stored.value, dict):
            reason = stored.problem if stored and stored.problem else "run.json is missing or holds no table"
            raise Refusal(422, f"the run {entry.summary['name']} cannot be shown: {reason}")
        return stored.value

    def json(self, entry: ListedRun, name: str) -> Any:
        """A small JSON file of the run, None where it is absent or broken."""
        stored = self._cached(entry.path / name, _json)
        return stored.value if stored else None

    def _fresh(self) -> dict[str, ListedRun]:
        """The runs by id, from a walk that is at most a pause old."""
        # Who comes while another walks takes the list as it was, once there is one: a long walk holds up nobody.
        if self._lock.acquire(blocking=self._entries is None):
            try:
                if self._entries is None or self._clock() - self._last >= self._pause:
                    self._last = self._clock()
                    self._entries = self._scan()
            finally:
                self._lock.release()
        return self._entries or {}

    def _scan(self) -> dict[str, ListedRun]:
        runs, several_folders = [], sum(folder != SHIPPED for folder in self.folders) > 1
        for folder in self.folders:
            for path in _walk(folder, self.limits):
                name = path.name if path == folder else path.relative_to(folder).as_posix()
                name = f"{folder.name}/{name}" if several_folders and path != folder else name
                id = run_id(path)
                runs.append(ListedRun(id, path, {"id": id, "name": printable(name), **self._summary(path)}))
        runs.sort(key=lambda e: (e.summary["updated"] or "", e.summary["name"]), reverse=True)
        listed = {entry.path for entry in runs}
        self._cache = {path: value for path, value in self._cache.items() if path.parent in listed}
        return {entry.id: entry for entry in runs}

    def _summary(self, path: Path) -> dict[str, Any]:
        info = self._cached(path / "run.json", _json)
        if info is None or not isinstance(info.value, dict):
            reason = info.problem if info and info.problem else "run.json is missing or holds no table"
            return {"status": "unreadable", "updated": None, "error": reason}
        metrics = self._cached(path / "metrics.jsonl", _curve)
        curve = metrics.value if metrics and metrics.value else Curve.of([])
        summary = summarise(info.value, curve)
        summary["spark"] = list(curve.spark)
        summary["playable"] = regular(path / "best.safetensors") is not None
        summary["error"] = metrics.problem if metrics else None
        tags = self._cached(path / "tags.json", _json)
        summary["tags"] = clean_tags(tags.value) if tags else []
        if summary["status"] == "running" and _abandoned(path):
            summary["status"] = "interrupted"
        if summary["status"] == "running" and metrics:  # run.json rests while a run goes on
            news = datetime.fromtimestamp(metrics.mark[0] / 1e9, UTC).isoformat(timespec="seconds")
            summary["updated"] = max(summary["updated"] or "", news)
        return summary

    def _cached(self, path: Path, read: Callable[[Path], Any]) -> _Read | None:
        """What `read` makes of a file, remembered until the file changes; None where there is none."""
        entry = self._read(path, self._cache.get(path), read)
        if entry is None:
            self._cache.pop(path, None)
        else:
            self._cache[path] = entry
        return entry

    def _read(self, path: Path, known: _Read | None, read: Callable[[Path], Any]) -> _Read | None:
        try:
            status = os.lstat(path)
        except OSError:
            return None
        mark = (status.st_mtime_ns, status.st_size, status.st_ino)
        if known is not None and known.mark == mark:
            return known
        self.reads += 1
        try:
            return _Read(mark, read(path))
        except UserError as error:
            return _Read(mark, problem=printable(str(error)))
        except OSError as error:
            return _Read(mark, problem=f"{path.name} cannot be read: {error.strerror}")


def run_id(path: Path) -> str:
    """What stands for a run's folder in addresses."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _json(path: Path) -> Any:
    return read_json(path, LARGEST_JSON)


def _rows(path: Path) -> list[dict[str, Any]]:
    return parse_rows(read_regular(path, LARGEST_METRICS))


def _curve(path: Path) -> Curve:
    return Curve.of(_rows(path))


def _abandoned(path: Path) -> bool:
    """Whether nobody trains a run any more that says it is running; one without a lock is believed.

    A population holds one lock for all members, a run also that of its first stage.
    """
    from deeprnn.runs.locking import held

    lock_folders = [folder for folder in (path, *path.parents[:2]) if regular(folder / ".lock")]
    # A folder further up may be locked by something else altogether.
    is_run = any(f == path or regular(f / "run.json") or regular(f / "population.json") for f in lock_folders)
    try:
        return is_run and not any(held(folder) for folder in lock_folders)
    except OSError:
        return False


def _walk(folder: Path, limits: Limits) -> Iterator[Path]:
    """Folders that hold a run.json, without following links; a run may hold others (its first stages)."""
    waiting, visited = [(folder, 0)], 0
    while waiting and visited < limits.folders:
        directory, depth = waiting.pop()
        visited += 1
        try:
            with os.scandir(directory) as items:
                inside = sorted(islice(items, limits.folders), key=lambda item: item.name, reverse=True)
        except OSError:
            continue
        if any(item.name == "run.json" and item.is_file(follow_symlinks=False) for item in inside):
            yield directory
        if depth < limits.depth:
            below = [
                item
                for item in inside
                if not item.name.startswith(".") and item.is_dir(follow_symlinks=False)
            ]
            waiting += [(Path(item.path), depth + 1) for item in below]
