"""The runs below some folders: found by walking, kept by what changed, addressed by opaque ids."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deeprnn.model.metrics import HEADLINE
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Refusal

SPARK = 48  # points of the small curve in the list
LARGEST_JSON = 4_000_000
LARGEST_METRICS = 64_000_000


@dataclass(frozen=True)
class Entry:
    """One run folder as the page lists it."""

    id: str
    path: Path
    summary: dict[str, Any]


class Library:
    """All runs below the given folders.

    A request never names a path: ids are digests of where a run lies, looked up among the runs found.
    A file is read again only when its time or size changed, and folders are walked at most once a second.
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
        self._entries: dict[str, Entry] = {}
        self._cache: dict[Path, tuple[tuple[int, int], Any]] = {}

    def entries(self) -> list[Entry]:
        """All runs, newest first."""
        with self._lock:
            if self._clock() - self._last >= self._pause:
                self._scan()
                self._last = self._clock()
            return list(self._entries.values())

    def get(self, id: str) -> Entry:
        """The run of an id."""
        found = self._entries.get(id)
        if found is None or not found.path.is_dir():
            with self._lock:
                self._scan()
            found = self._entries.get(id)
        if found is None:
            raise Refusal(404, "there is no such run: it may have been moved or deleted")
        return found

    def again(self, entry: Entry) -> dict[str, Any]:
        """The run's summary as it is now."""
        return {"id": entry.id, "name": entry.summary["name"], **self._summary(entry.path)}

    def metrics(self, entry: Entry) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a line that is still being written is left out."""
        return self._cached(entry.path / "metrics.jsonl", _rows, LARGEST_METRICS) or []

    def info(self, entry: Entry) -> dict[str, Any]:
        """The run's run.json."""
        found = self.json(entry, "run.json")
        if not isinstance(found, dict):
            raise Refusal(
                422, f"the run {entry.summary['name']} cannot be shown: its run.json cannot be read"
            )
        return found

    def json(self, entry: Entry, name: str) -> Any:
        """A small JSON file of the run, None where it is absent or broken."""
        return self._cached(entry.path / name, json.loads, LARGEST_JSON)

    def _scan(self) -> None:
        found = []
        for folder in self.folders:
            for path in _walk(folder, self.limits):
                name = path.name if path == folder else path.relative_to(folder).as_posix()
                name = f"{folder.name}/{name}" if len(self.folders) > 1 and path != folder else name
                id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
                found.append(Entry(id, path, {"id": id, "name": name, **self._summary(path)}))
        found.sort(key=lambda e: (e.summary["updated"] or "", e.summary["name"]), reverse=True)
        self._entries = {entry.id: entry for entry in found}
        kept = {entry.path for entry in found}
        self._cache = {path: value for path, value in self._cache.items() if path.parent in kept}

    def _summary(self, path: Path) -> dict[str, Any]:
        info = self._cached(path / "run.json", json.loads, LARGEST_JSON)
        if not isinstance(info, dict):
            return {"status": "unreadable", "updated": None, "error": "run.json is missing or broken"}
        rows = self._cached(path / "metrics.jsonl", _rows, LARGEST_METRICS) or []
        summary = summarise(info, rows, (path / "best.safetensors").is_file())
        if summary["status"] == "running" and _abandoned(path):
            summary["status"] = "interrupted"
        mark = self._cache.get(path / "metrics.jsonl")
        if summary["status"] == "running" and mark:  # run.json rests while a run goes on
            news = datetime.fromtimestamp(mark[0][0] / 1e9, UTC).isoformat(timespec="seconds")
            summary["updated"] = max(summary["updated"] or "", news)
        return summary

    def _cached(self, path: Path, read: Callable[[bytes], Any], largest: int) -> Any:
        """What `read` makes of a file, remembered until the file changes; None where it cannot be read."""
        try:
            status = path.stat()
        except OSError:
            return None
        mark = (status.st_mtime_ns, status.st_size)
        known = self._cache.get(path)
        if known is None or known[0] != mark:
            self.reads += 1
            value = None
            if status.st_size <= largest:
                try:
                    value = read(path.read_bytes())
                except (OSError, ValueError, RecursionError):
                    value = None
            known = self._cache[path] = (mark, value)
        return known[1]


def _abandoned(path: Path) -> bool:
    """Whether nobody trains a run any more that says it is running; one without a lock is believed.

    A population holds one lock for all members, a run also that of its first stage.
    """
    from deeprnn.runs.checkpoint import held

    near = [folder for folder in (path, *path.parents[:2]) if (folder / ".lock").is_file()]
    # A folder further up may be locked by something else altogether.
    own = any(f == path or (f / "run.json").is_file() or (f / "population.json").is_file() for f in near)
    try:
        return own and not any(held(folder) for folder in near)
    except OSError:
        return False


def summarise(info: dict[str, Any], rows: list[dict[str, Any]], playable: bool) -> dict[str, Any]:
    """What the list shows of a run."""
    data = _object(info.get("data"))
    kind = str(data.get("kind") or "")
    result = _object(info.get("result"))
    valid = [float(row["valid"]) for row in rows if _finite(row.get("valid"))]
    return {
        "status": str(info.get("status") or "unknown"),
        "kind": kind,
        "data": str(data.get("name") or ""),
        "label": str(info.get("label") or ""),
        "parameters": info["parameters"] if _finite(info.get("parameters")) else None,
        "seed": info.get("seed"),
        "metric": str(info.get("metric") or ""),
        "paper": info.get("paper"),
        "created": info.get("created"),
        "updated": str(info.get("updated") or "") or None,
        "test": headline(result.get("test"), kind),
        "valid": headline(result.get("valid"), kind) if result else (min(valid) if valid else None),
        "best_epoch": result.get("best_epoch"),
        "epochs": rows[-1].get("epoch", len(rows)) if rows else 0,
        "spark": thin(valid, SPARK),
        "playable": playable,
    }


def headline(value: Any, kind: str) -> float | None:
    """The number that stands in tables, whether alone or among other conventions."""
    if isinstance(value, dict):
        value = value.get(HEADLINE.get(kind, ""))
    return float(value) if _finite(value) else None


def thin(values: list[float], most: int) -> list[float]:
    """At most `most` of the values, evenly chosen, ends kept, four digits each."""
    if len(values) > most:
        step = (len(values) - 1) / (most - 1)
        values = [values[round(i * step)] for i in range(most)]
    return [float(f"{value:.4g}") for value in values]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _finite(value: Any) -> bool:
    # Below what a float holds: JSON may spell a whole number that does not fit into one.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _rows(content: bytes) -> list[dict[str, Any]]:
    rows = []
    for text in content.splitlines():
        row = parse_row(text)
        if row is not None:
            rows.append(row)
    return rows


def parse_row(text: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl, None where it is torn; numbers that are not finite become null."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return {k: None if isinstance(v, float) and not _finite(v) else v for k, v in row.items()}


def _walk(folder: Path, limits: Limits) -> Iterator[Path]:
    """Folders that hold a run.json, without following links; a run may hold others (its first stages)."""
    waiting, seen = [(folder, 0)], 0
    while waiting and seen < limits.folders:
        here, depth = waiting.pop()
        seen += 1
        try:
            with os.scandir(here) as items:
                inside = sorted(items, key=lambda item: item.name, reverse=True)
        except OSError:
            continue
        if any(item.name == "run.json" and item.is_file(follow_symlinks=False) for item in inside):
            yield here
        if depth < limits.depth:
            below = [
                item
                for item in inside
                if not item.name.startswith(".") and item.is_dir(follow_symlinks=False)
            ]
            waiting += [(Path(item.path), depth + 1) for item in below]
