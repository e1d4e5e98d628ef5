"""What is known about the sets found on this machine: counts, density, sha256."""

from __future__ import annotations

from typing import Any

from deeprnn.data import load
from deeprnn.data.bach import corpus_folder
from deeprnn.data.music import MusicData
from deeprnn.data.sources import SOURCES, find_file, sha256_of
from deeprnn.data.splitting import duplicates_across_splits
from deeprnn.data.text import TextData
from deeprnn.errors import UserError


def describe(data: MusicData | TextData) -> dict[str, Any]:
    """Counts of a set: sequences, frames and density, or tokens and vocabulary."""
    if isinstance(data, MusicData):
        return {
            "kind": data.kind,
            "pitches": data.size,
            "grid": data.grid.to_dict() if data.grid else None,
            "sequences": {split: len(songs) for split, songs in data.splits.items()},
            "frames": data.sizes,
            "notes_per_frame": {split: round(songs.density, 3) for split, songs in data.splits.items()},
            "duplicates_across_splits": len(duplicates_across_splits(data)),
            "bytes": sum(songs.nbytes for songs in data.splits.values()),
        }
    return {
        "kind": data.kind,
        "vocabulary": data.size,
        "tokens": data.sizes,
        "bytes": sum(ids.nbytes for ids in data.splits.values()),
    }


def check(name: str) -> dict[str, Any]:
    """One named set: found or not, verified or not, and its counts."""
    if name == "bach":
        return _check_bach()
    files = SOURCES[name].files
    places = [find_file(file) for file in files]
    if any(place is None for place in places):
        missing = [file.path for file, place in zip(files, places, strict=True) if place is None]
        return {"name": name, "found": False, "missing": missing, "get": f"deeprnn data get {name}"}
    entry: dict[str, Any] = {"name": name, "found": True, "files": [str(place) for place in places]}
    entry["verified"] = all(
        sha256_of(place) == file.sha256
        for file, place in zip(files, places, strict=True)
        if place is not None
    )
    return _with_counts(entry)


def _check_bach() -> dict[str, Any]:
    try:
        folder, version = corpus_folder()
    except UserError as error:
        return {"name": "bach", "found": False, "missing": ["music21"], "get": str(error)}
    # The package manager checked the corpus when it was installed; there is no hash of ours.
    return _with_counts(
        {"name": "bach", "found": True, "files": [str(folder)], "verified": None, "music21": version}
    )


def _with_counts(entry: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**entry, **describe(load(entry["name"]))}
    except UserError as error:
        return {**entry, "error": str(error)}
