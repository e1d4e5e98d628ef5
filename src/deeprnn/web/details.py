"""One run in full: where its number stands beside the paper's, its equations and its picture."""

from __future__ import annotations

import json
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

from deeprnn.data import SPLITS, Grid
from deeprnn.model import notation, structure
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.paper import CELLS, LABELS
from deeprnn.model.specs import ModelSpec
from deeprnn.runs.reading import number, printable, read_regular, text
from deeprnn.web.library import Library, ListedRun
from deeprnn.web.refusals import Refusal
from deeprnn.web.summary import scalars, spec_of

LARGEST_RECIPE = 100_000  # bytes
LONGEST_OPENING = 400  # frames or characters

DATA_NAMES = {
    "nottingham": "Nottingham",
    "jsb": "JSB Chorales",
    "musedata": "MuseData",
    "ptb-char": "Penn Treebank, characters",
    "ptb-word": "Penn Treebank, words",
}


def paper() -> dict[str, Any]:
    """Tables 2 and 3 of the paper."""
    cells = [
        {
            "data": c.data,
            "label": LABELS[c.model],
            "value": c.value,
            "metric": HEADLINE[c.kind].name,
            "table": c.table,
        }
        for c in CELLS
    ]
    return {"labels": list(LABELS.values()), "names": DATA_NAMES, "cells": cells}


def describe(library: Library, entry: ListedRun) -> dict[str, Any]:
    """Everything the page tells about a run."""
    info = library.info(entry)
    spec = spec_of(info, library.limits.layers)
    data = entry.summary["data"]
    return {
        **entry.summary,
        "data_name": DATA_NAMES.get(data, data),
        "result": _result(info.get("result")),
        "environment": scalars(info.get("environment")),
        "version": text(info.get("version")) or None,
        "commit": text(info.get("commit")) or None,
        "equations": notation.equations(spec) if spec else [],
        "layers": _layers(spec) if spec else [],
        "keys": spec.input_size if spec and spec.output != "categorical" else None,
        "chords": spec is not None and spec.output == "nade",
        "symbols": spec.output_size if spec and spec.output == "categorical" else None,
        "grid": _grid(library, entry),
        "openings": _openings(library.json(entry, "openings.json"), spec),
        "recipe": _recipe(entry.path / "recipe.toml"),
        "drawn": spec is not None,
    }


def drawing(library: Library, entry: ListedRun) -> str:
    """The model as SVG."""
    from deeprnn.render.model_diagram import model_svg

    spec = spec_of(library.info(entry), library.limits.layers)
    if spec is None:
        raise Refusal(404, f"the run {entry.summary['name']} describes no model that can be drawn")
    return model_svg(spec)


def _result(value: Any) -> dict[str, Any] | None:
    """Scores by split, each alone or in several conventions."""
    if not isinstance(value, dict):
        return None
    scored = {split: value[split] for split in SPLITS if split in value}
    return {
        split: v if (v := number(score)) is not None else scalars(score) for split, score in scored.items()
    }


def _layers(spec: ModelSpec) -> list[dict[str, Any]]:
    return [
        {"name": notation.symbol(layer), "size": layer.size, "unit": layer.unit, "role": layer.role}
        for layer in structure.dissect(spec).layers
    ]


def _grid(library: Library, entry: ListedRun) -> dict[str, Any] | None:
    try:
        return Grid.from_dict(library.json(entry, "grid.json")).to_dict()
    except (TypeError, ValueError):  # absent, or no grid
        return None


def _openings(stored: Any, spec: ModelSpec | None) -> list[dict[str, Any]]:
    """Beginnings from the run's own data that its model can take."""
    keys = spec.input_size if spec else 0

    def fits(item: Any) -> bool:
        if not isinstance(item, dict):
            return False
        frames = item.get("frames")
        if isinstance(frames, list):
            lists = len(frames) <= LONGEST_OPENING and all(
                isinstance(f, list) and len(f) <= keys for f in frames
            )
            return lists and all(type(key) is int and 0 <= key < keys for frame in frames for key in frame)
        words = item.get("text")
        return (
            isinstance(words, str)
            and 0 < len(words) <= LONGEST_OPENING
            and words == printable(words, LONGEST_OPENING)
        )

    playable = [item for item in islice(stored, 20) if fits(item)] if isinstance(stored, list) else []
    content = ({k: item[k] for k in ("frames", "text") if k in item} for item in playable)
    return [{"name": text(item.get("name")), **rest} for item, rest in zip(playable, content, strict=True)]


def _recipe(path: Path) -> dict[str, dict[str, str]]:
    """The settings of recipe.toml as text, section by section."""
    try:
        recipe = tomllib.loads(read_regular(path, LARGEST_RECIPE).decode())
    except (OSError, ValueError, RecursionError):  # absent, or no recipe
        return {}
    sections = {"": {k: v for k, v in recipe.items() if not isinstance(v, dict)}}
    sections |= {k: v for k, v in recipe.items() if isinstance(v, dict)}
    return {
        printable(name): {printable(k): _shown(v) for k, v in islice(values.items(), 50)}
        for name, values in islice(sections.items(), 30)
    }


def _shown(value: Any) -> str:
    """A setting as TOML spells it, nearly."""
    return printable(json.dumps(value, ensure_ascii=False, default=str).strip('"'))
