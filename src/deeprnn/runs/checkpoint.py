"""Checkpoints: safetensors beside JSON with its checksum, the previous one kept.

A checkpoint is two files; the JSON names the tensors by their sha256, so that a pair is whole under whatever names
a kill left it. Nothing here executes what it reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.files import explained, sync_folder, write_atomically, write_temporary
from deeprnn.runs.reading import open_regular, read_json, read_regular, regular

logger = logging.getLogger("deeprnn")

FORMAT = 1
MOST_JSON = 2**26
"""bytes of a JSON file that are read"""
ATTEMPTS = 3
"""at reading two files that a trainer may be replacing meanwhile"""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors, plain data, and the JSON file it came from."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path


# ---- pairs


def _pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    packed = safetensors.torch.save({k: t.detach().cpu().contiguous() for k, t in tensors.items()})
    sidecar = {
        "format": FORMAT,
        "sha256": hashlib.sha256(packed).hexdigest(),
        "bytes": len(packed),
        "meta": dict(meta),
        "meta_sha256": _digest(dict(meta)),
    }
    return packed, sidecar


def _unpack(packed: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors of a file; one that was forged agrees with its checksum and may yet be anything."""
    try:
        return safetensors.torch.load(packed)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{path} holds no tensors ({error}), though its checksum agrees: do not use it"
        ) from error


def _digest(meta: Any) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _encode(sidecar: Mapping[str, Any]) -> bytes:
    return (json.dumps(sidecar, indent=1) + "\n").encode()


def save_state(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `last`, after the newest whole checkpoint has become `previous`.

    Whatever renames of this save and of earlier ones a kill or a loss of power has left out, some JSON file and its
    tensors are both there: until `previous` is whole and on disk, nothing is renamed over either of them.
    """
    packed, sidecar = _pack(tensors, meta)
    new_tensors = write_temporary(folder / "last.safetensors", packed)
    try:
        new_json = write_temporary(folder / "last.json", _encode(sidecar))
    except BaseException:
        new_tensors.unlink()
        raise
    with explained(folder / "last.json"):
        _keep_newest(folder)
        os.replace(new_tensors, folder / "last.safetensors")
        os.replace(new_json, folder / "last.json")
        sync_folder(folder)


def _keep_newest(folder: Path) -> None:
    """Bring the newest whole checkpoint under the names `previous.*`."""
    for path, sidecar, _ in _sidecars(folder):
        place = _tensors_of(folder, path, sidecar)
        if place is None:
            continue
        for current in (path, place):
            if current.stem == "last":
                os.replace(current, current.with_stem("previous"))
        sync_folder(folder)
        return


def load_state(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; None if none was ever written.

    A damaged or missing `last` is reported and `previous` used; if neither is whole, that is an error.
    """
    problems = []
    for path, sidecar, problem in _sidecars(folder):
        place = _tensors_of(folder, path, sidecar) if not problem else None
        if place is not None:
            if problems:
                logger.warning("%s; going on from %s", "; ".join(problems), path)
            packed = read_regular(place, place.stat().st_size)
            return Checkpoint(_unpack(packed, place), sidecar["meta"], path)
        tensors = path.with_suffix(".safetensors")
        problems.append(problem or f"{tensors} is missing, truncated or altered (checksum)")
    if problems:
        raise NoWholeCheckpoint(
            "no whole checkpoint: " + "; ".join(problems) + ". Start the run again, or restore a copy"
        )
    return None


class NoWholeCheckpoint(UserError):
    """Checkpoints were written, and every one has been damaged since."""


def remove_state(folder: Path) -> None:
    """Take a folder's checkpoints away, so that its run begins anew."""
    for name in ("last", "previous"):
        for suffix in (".json", ".safetensors"):
            (folder / name).with_suffix(suffix).unlink(missing_ok=True)


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The plain data of the newest checkpoint that can be read, without its tensors; None if there is none."""
    return next((sidecar["meta"] for _, sidecar, problem in _sidecars(folder) if not problem), None)


def _sidecars(folder: Path) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """The JSON files of a folder's checkpoints, newest first: path, content, and what is wrong with it."""
    for name in ("last", "previous"):
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        try:
            yield path, _read_sidecar(path), ""
        except _Damaged as damage:
            yield path, {}, str(damage)


def _tensors_of(folder: Path, path: Path, sidecar: Mapping[str, Any]) -> Path | None:
    """The file that holds a checkpoint's tensors: a kill between two renames leaves it under the other name."""
    if not sidecar:
        return None
    for name in (path.stem, "last", "previous"):
        place = folder / f"{name}.safetensors"
        if _may_be(place, sidecar) and _sha256(place) == sidecar["sha256"]:
            return place
    return None


def _may_be(path: Path, sidecar: Mapping[str, Any]) -> bool:
    """Whether a file is worth reading as a checkpoint's tensors; a pipe, a device or one of another size is not."""
    status = regular(path)
    return status is not None and sidecar.get("bytes") in (None, status.st_size)


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class _Damaged(Exception):
    """A checkpoint that is not what was written."""


def _read_sidecar(path: Path) -> dict[str, Any]:
    try:
        sidecar = read_json(path, MOST_JSON)
    except (OSError, UserError) as error:
        raise _Damaged(f"{path} is damaged: {error}") from None
    if not isinstance(sidecar, dict):
        raise _Damaged(f"{path} is damaged: it holds no table")
    for key in ("format", "sha256", "meta", "meta_sha256"):
        if key not in sidecar:
            raise _Damaged(f"{path} is damaged: it has no {key!r}")
    if sidecar["format"] != FORMAT:
        raise _Damaged(f"{path} has format {sidecar['format']!r}, this version reads {FORMAT}")
    if not isinstance(sidecar["meta"], dict) or _digest(sidecar["meta"]) != sidecar["meta_sha256"]:
        raise _Damaged(f"{path} does not match its own checksum")
    return sidecar


# ---- the best parameters, which other programs read


def save_best(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write best.safetensors and best.json.

    The JSON comes first and also accepts the tensors it is about to replace, so that a reader finds a
    matching pair even if the second rename never happens.
    """
    packed, sidecar = _pack(tensors, meta)
    path = folder / "best.safetensors"
    before = _sha256(path) if regular(path) else None
    new = write_temporary(path, packed)
    write_atomically(folder / "best.json", _encode({**sidecar, "replaces": before}))
    with explained(path):
        os.replace(new, path)
        sync_folder(folder)


def load_best(folder: Path) -> Checkpoint:
    """The best parameters, checked; needs neither the training data nor a GPU."""
    path = folder / "best.safetensors"
    if not os.path.lexists(path):
        raise UserError(f"{folder} has no best.safetensors: the run has not finished its first epoch")
    for _ in range(ATTEMPTS):
        try:
            sidecar = _read_sidecar(folder / "best.json")
        except _Damaged as damage:
            raise UserError(f"{damage}; `deeprnn resume {folder}` writes it again") from None
        if not _may_be(path, sidecar if sidecar.get("replaces") is None else {}):
            continue
        packed = read_regular(path, path.stat().st_size)
        if hashlib.sha256(packed).hexdigest() in (sidecar["sha256"], sidecar.get("replaces")):
            return Checkpoint(_unpack(packed, path), sidecar["meta"], folder / "best.json")
    raise UserError(f"{path} is truncated or altered (checksum): `deeprnn resume {folder}` writes it again")
