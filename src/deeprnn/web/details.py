"""One run in full: where its number stands beside the paper's, its equations and its picture."""

from __future__ import annotations

import math
from typing import Any

from deeprnn.model import structure
from deeprnn.model.paper import CELLS, LABELS
from deeprnn.model.specs import ModelSpec
from deeprnn.web.library import Entry, Library
from deeprnn.web.refusals import Refusal

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
        {"data": c.data, "label": LABELS[c.model], "value": c.value, "metric": c.metric, "table": c.table}
        for c in CELLS
    ]
    return {"labels": list(LABELS.values()), "names": DATA_NAMES, "cells": cells}


def describe(library: Library, entry: Entry) -> dict[str, Any]:
    """Everything the page tells about a run."""
    info = library.info(entry)
    spec = _spec(info)
    result = info.get("result") if isinstance(info.get("result"), dict) else None
    return {
        **entry.summary,
        "data_name": DATA_NAMES.get(entry.summary.get("data", ""), entry.summary.get("data", "")),
        "result": result,
        "environment": info.get("environment"),
        "version": info.get("version"),
        "commit": info.get("commit"),
        "equations": structure.equations(spec) if spec else [],
        "layers": _layers(spec) if spec else [],
        "keys": spec.input_size if spec and spec.output == "bernoulli" else None,
        "symbols": spec.output_size if spec and spec.output == "categorical" else None,
        "grid": _grid(library, entry),
        "drawn": spec is not None,
    }


def drawing(library: Library, entry: Entry) -> str:
    """The model as SVG."""
    from deeprnn.render.model_diagram import model_svg

    spec = _spec(library.info(entry))
    if spec is None:
        raise Refusal(404, f"the run {entry.summary['name']} does not say what its model is")
    return model_svg(spec)


def _spec(info: dict[str, Any]) -> ModelSpec | None:
    model = info.get("model")
    if not isinstance(model, dict):
        return None
    try:
        return ModelSpec.from_dict(model)
    except (TypeError, AttributeError, ValueError):  # written by another version, or by hand
        return None


def _layers(spec: ModelSpec) -> list[dict[str, Any]]:
    return [
        {"name": structure.symbol(layer), "size": layer.size, "unit": layer.unit, "role": layer.role}
        for layer in structure.dissect(spec).layers
    ]


def _grid(library: Library, entry: Entry) -> dict[str, Any] | None:
    grid = library.json(entry, "grid.json")
    return grid if isinstance(grid, dict) else None


def plain(value: Any) -> Any:
    """Numbers that JSON cannot hold become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
