"""Checkpoints: safetensors beside JSON with its checksum, written atomically, the previous one kept.

A file is written under another name, forced to disk and renamed, so it is whole or not there. A checkpoint
is two files; the JSON names the tensors by their sha256, and `last` is rotated to `previous` in an order
that leaves one matching pair at every moment. Nothing here executes what it reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
from torch import Tensor

from deeprnn.errors import UserError

logger = logging.getLogger("deeprnn")

FORMAT = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(UserError):
    """There was no room for a file; what stood before still stands."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors, plain data, and the JSON file it came from."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    path: Path


# ---- files


def write_atomically(path: Path, content: bytes) -> None:
    """Give `path` this content whole or not at all, and make it last."""
    temporary = _write_beside(path, content)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """A JSON file, atomically."""
    write_atomically(path, (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


def _write_beside(path: Path, content: bytes) -> Path:
    """Write to a temporary name in the same folder and force it to disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno in _FULL:
            raise DiskFull(
                f"no room to write {path} ({len(content):,} bytes: {error.strerror}); what was saved before is intact: "
                "free some space and resume the run"
            ) from error
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- pairs


def _pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    packed = safetensors.torch.save({k: t.detach().cpu().contiguous() for k, t in tensors.items()})
    sidecar = {"format": FORMAT, "sha256": hashlib.sha256(packed).hexdigest(), "meta": dict(meta)}
    return packed, sidecar | {"meta_sha256": _digest(sidecar["meta"])}


def _digest(meta: Any) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _encode(sidecar: Mapping[str, Any]) -> bytes:
    return (json.dumps(sidecar, indent=1) + "\n").encode()


def save_state(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write `last`, after the old one has become `previous`."""
    packed, sidecar = _pack(tensors, meta)
    new_tensors = _write_beside(folder / "last.safetensors", packed)
    new_json = _write_beside(folder / "last.json", _encode(sidecar))
    # Between any two of these renames one JSON file and its tensors both exist, under some pair of names.
    for kind in ("json", "safetensors"):
        if (folder / f"last.{kind}").exists():
            os.replace(folder / f"last.{kind}", folder / f"previous.{kind}")
    os.replace(new_tensors, folder / "last.safetensors")
    os.replace(new_json, folder / "last.json")
    _sync_folder(folder)


def load_state(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; None if none was ever written.

    A damaged or missing `last` is reported and `previous` used; if neither is whole, that is an error.
    """
    names = [n for n in ("last", "previous") if (folder / f"{n}.json").exists()]
    problems = []
    for name in names:
        try:
            found = _read_pair(folder, name)
        except _Damaged as damage:
            problems.append(str(damage))
            continue
        if problems:
            logger.warning("%s; going on from %s", "; ".join(problems), found.path)
        return found
    if problems:
        raise UserError(
            "no whole checkpoint: " + "; ".join(problems) + ". Start the run again, or restore a copy"
        )
    return None


class _Damaged(Exception):
    """A checkpoint that is not what was written."""


def _read_sidecar(path: Path) -> dict[str, Any]:
    try:
        sidecar = json.loads(path.read_bytes())
        whole = sidecar["format"] == FORMAT and _digest(sidecar["meta"]) == sidecar["meta_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{path} cannot be read ({error})") from None
    if not whole:
        raise _Damaged(f"{path} does not match its own checksum")
    return sidecar


def _read_pair(folder: Path, name: str) -> Checkpoint:
    path = folder / f"{name}.json"
    sidecar = _read_sidecar(path)
    for place in (folder / f"{name}.safetensors", folder / "last.safetensors"):
        packed = place.read_bytes() if place.exists() else b""
        if packed and hashlib.sha256(packed).hexdigest() == sidecar["sha256"]:
            return Checkpoint(safetensors.torch.load(packed), sidecar["meta"], path)
    raise _Damaged(f"{path.with_suffix('.safetensors')} is missing, truncated or altered (checksum)")


# ---- the best parameters, which other programs read


def save_best(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write best.safetensors and best.json.

    The JSON comes first and also accepts the tensors it is about to replace, so that a reader finds a
    matching pair even if the second rename never happens.
    """
    packed, sidecar = _pack(tensors, meta)
    path = folder / "best.safetensors"
    before = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    new = _write_beside(path, packed)
    write_atomically(folder / "best.json", _encode({**sidecar, "replaces": before}))
    os.replace(new, path)
    _sync_folder(folder)


def load_best(folder: Path) -> Checkpoint:
    """The best parameters, checked; needs neither the training data nor a GPU."""
    path = folder / "best.safetensors"
    if not path.exists():
        raise UserError(f"{folder} has no best.safetensors: the run has not finished its first epoch")
    try:
        sidecar = _read_sidecar(folder / "best.json")
    except _Damaged as damage:
        raise UserError(f"{damage}; `deeprnn resume {folder}` writes it again") from None
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() not in (sidecar["sha256"], sidecar.get("replaces")):
        raise UserError(
            f"{path} is truncated or altered (checksum): `deeprnn resume {folder}` writes it again"
        )
    return Checkpoint(safetensors.torch.load(packed), sidecar["meta"], folder / "best.json")


# ---- one process a folder


def _lock_file(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / ".lock", "a+")
    except OSError as error:
        full = error.errno in _FULL
        remedy = "free some space" if full else "choose another folder, or give it the right to be written"
        raise (DiskFull if full else UserError)(
            f"cannot write in {folder} ({error.strerror}): {remedy}"
        ) from None


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a run folder for this process; a second one is refused, and a killed one leaves nothing behind."""
    import fcntl

    with _lock_file(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise UserError(
                f"{folder} is in use by process {owner}: wait for it, stop it, or choose another folder"
            ) from None
        # Unbuffered: on a full disk the holder's name is left out, and nothing is left for close() to fail on.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def held(folder: Path) -> bool:
    """Whether some process holds a run folder now."""
    import fcntl

    path = folder / ".lock"
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
