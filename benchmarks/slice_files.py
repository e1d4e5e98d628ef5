"""The few files in which a slice of a borrowed machine leaves what it did: results, and a state to go on from.

`results.tar.gz` is a folder of results: `runs/` with an entry for each finished run, and JSON files beside it.
`state-N.part` are pieces of one tar of run folders. Each begins with a line that says which set it belongs to, so that
pieces of two sets, as a kill between two renames leaves them, are never put together.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json, write_new
from deeprnn.reproduction import clean_scores
from deeprnn.reproduction.entries import read_entry, record
from deeprnn.reproduction.replications import CALLS, RUNS
from deeprnn.reproduction.study.dynamic import FILE as DYNAMIC
from deeprnn.reproduction.study.run import DIVERGED, STARTED

RESULTS = "results.tar.gz"
PART = 15 * 2**20
"""bytes of one piece of the state: what comes back from such a machine has a limit for each file"""


# ---- results


def pack_results(out: Path, files: Mapping[str, bytes]) -> None:
    """Write the results as they are now, whole or not at all."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            _add(tar, name, content)
    write_atomically(out / RESULTS, gzip.compress(buffer.getvalue(), 6, mtime=0))


def read_results(folder: Path) -> dict[str, bytes]:
    """The files of a slice's results by name."""
    path = folder / RESULTS
    if not path.exists():
        raise UserError(f"{folder} has no {RESULTS}: give the folder that a slice wrote its files into")
    with tarfile.open(path) as tar:
        members = [m for m in tar.getmembers() if m.isfile()]
        return {m.name: tar.extractfile(m).read() for m in members}  # type: ignore[union-attr]


# ---- into a folder of results


def enter(files: Mapping[str, bytes], home: Path) -> tuple[list[Path], list[Path]]:
    """Enter results into a folder, each entry checked, over nothing: those now there, and those it has otherwise."""
    if STARTED in files:
        _enter_start(files[STARTED], home / STARTED)
    entered, other = _enter_runs(files, home / RUNS)
    for name, key in ((CALLS, "began"), (DYNAMIC, "entry"), (DIVERGED, None)):
        if name in files:
            replaced = _merge(home / name, json.loads(files[name]), key, stay=name != CALLS)
            other += [home / name] * replaced
    if clean_scores.FILE in files:
        new = [clean_scores.CleanScore(**row) for row in json.loads(files[clean_scores.FILE])]
        known = {row.entry: row for row in clean_scores.add_scores(home / clean_scores.FILE, new)}
        other += [home / clean_scores.FILE] * any(known[row.entry] != row for row in new)
    return entered, other


def _enter_start(content: bytes, path: Path) -> None:
    """Slices that began each by itself are one study where plan and recipes are the same; the first beginning stays."""
    if write_new(path, content):
        return
    try:
        new, known = json.loads(content), json.loads(path.read_bytes())
        same, earlier = new["digest"] == known["digest"], _moment(new) < _moment(known)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} and the slice's cannot be compared: {error!r:.80}") from None
    if not same:
        raise UserError(f"{path.parent} began with another plan or other recipes: these are not its runs")
    if earlier:
        write_atomically(path, content)


def _moment(start: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(start["began"])


def read_folder(home: Path) -> dict[str, bytes]:
    """The files of a study's folder of results that another machine goes on from."""
    paths = [*sorted((home / RUNS).glob("*.json")), *(home / name for name in (STARTED, DIVERGED, DYNAMIC))]
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in paths if path.exists()}


def _enter_runs(files: Mapping[str, bytes], ledger: Path) -> tuple[list[Path], list[Path]]:
    entered, other = list[Path](), list[Path]()
    for name, content in sorted(files.items()):
        if name.startswith(f"{RUNS}/"):
            raw = json.loads(content)
            path = record(raw, ledger)
            (entered if read_entry(path).raw == raw else other).append(path)
    return entered, other


def _merge(path: Path, new: list[Any], key: str | None, stay: bool) -> bool:
    """A list of rows, one for each value of `key`: of a call the later word counts, a score stays as it is.

    Whether a row that stayed is another than the new one.
    """

    def named(rows: list[Any]) -> dict[str, Any]:
        return {json.dumps(row if key is None else row[key], sort_keys=True): row for row in rows}

    known = named(json.loads(path.read_text(encoding="utf-8")) if path.exists() else [])
    given = named(new)
    write_json(path, list(({**known, **given, **known} if stay else {**known, **given}).values()))
    return stay and any(known[name] != row for name, row in given.items() if name in known)


def collect(folder: Path, home: Path) -> int:
    """Enter a slice's results into a folder of results; where it has another result of a run, that one stays."""
    files = read_results(folder)
    published = home.name == RUNS  # entries alone
    entered, other = _enter_runs(files, home) if published else enter(files, home)
    print(f"{len(entered)} entries from {folder} are in {home if published else home / RUNS}")
    for path in other:
        print(f"not entered: {path} is otherwise already (a rerun goes --into a folder of its own)")
    return int(bool(other))


# ---- state


def read_whole(files: Iterable[Path]) -> dict[Path, bytes] | None:
    """The content of a run's files; None where a trainer replaced its checkpoint in between."""
    content = {path: path.read_bytes() for path in files if path.exists()}
    for path, data in content.items():
        if path.name in ("last.json", "best.json"):
            tensors = content.get(path.with_suffix(".safetensors"))
            if tensors is None or json.loads(data)["sha256"] != hashlib.sha256(tensors).hexdigest():
                return None
    return content


Groups = Sequence[tuple[str, Sequence[Path]]]
"""names and files"""


def pack_state(out: Path, root: Path, groups: Groups, room: int) -> tuple[list[str], list[str]]:
    """Pack groups of files below `root`, the most valuable first, up to `room` bytes: names kept, and lost."""
    kept, lost = list[str](), list[str]()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, paths in groups:
            content = read_whole(paths)
            if content is None:
                lost.append(f"{name} (its checkpoint was being replaced)")
                continue
            size = sum(len(data) + 1024 for data in content.values())
            if size > room:
                lost.append(f"{name} ({size / 2**20:.1f} MiB do not fit)")
                continue
            room -= size
            kept.append(name)
            for path, data in content.items():
                _add(tar, str(path.relative_to(root)), data)
    _write_parts(out, buffer.getvalue())
    return kept, lost


def _write_parts(out: Path, content: bytes) -> None:
    pieces = [content[start : start + PART] for start in range(0, len(content), PART)]
    digest = hashlib.sha256(content).hexdigest()[:16]
    waiting = []
    for number, piece in enumerate(pieces):
        header = json.dumps({"set": digest, "part": number, "of": len(pieces)}).encode() + b"\n"
        path = out / f".state-{number}.new"
        path.write_bytes(header + piece)
        waiting.append((path, out / f"state-{number}.part"))
    for path, place in waiting:
        os.replace(path, place)
    for path in out.glob("state-*.part"):
        if int(path.stem.partition("-")[2]) >= len(pieces):
            path.unlink()


def unpack_state(folder: Path, root: Path) -> list[str]:
    """Unpack the state below `root`; run folders that are there already stay as they are. The folders that came."""
    paths = sorted(folder.glob("state-*.part"), key=lambda p: int(p.stem.partition("-")[2]))
    if not paths:
        return []
    headers, pieces = zip(*(_split(path) for path in paths), strict=True)
    first = headers[0]
    if any(h["set"] != first["set"] for h in headers) or len(pieces) != first["of"]:
        raise UserError(
            f"{folder}: its state is not whole (pieces of two sets, or one is missing): go on without it"
        )
    root.mkdir(parents=True, exist_ok=True)
    there = {path.name for path in root.iterdir()}
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        members = [m for m in tar.getmembers() if m.isfile() and m.name.partition("/")[0] not in there]
        tar.extractall(root, members=members, filter="data")
    return sorted({m.name.partition("/")[0] for m in members})


def _split(path: Path) -> tuple[dict[str, object], bytes]:
    header, _, piece = path.read_bytes().partition(b"\n")
    return json.loads(header), piece


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
