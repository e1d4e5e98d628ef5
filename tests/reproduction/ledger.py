"""Made-up ledger entries for the tests of report and reproduce; no number here was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.training.recipe import Recipe

SHAPES: dict[str, dict[str, Any]] = {
    "rnn": {},
    "dts": {"shortcut": "last", "input_to": "all"},
    "dots": {"shortcut": "last", "input_to": "all"},
    "srnn": {},
    "dots-star": {
        "shortcut": "last",
        "input_to": "all",
        "intermediate_unit": "lp:2",
        "output_unit": "maxout:2",
    },
    "dt": {},
    "dts3": {"shortcut": "last", "input_to": "all"},
}


def recipe(data: str, model: str, seed: int = 1, **changes: Any) -> dict[str, Any]:
    """A resolved recipe with Table 1's sizes; `changes` are dotted fields with __ for the dot."""
    base = {"dots-star": "dots", "dt": "dts", "dts3": "dts"}.get(model, model)
    units = paper.size(data, base).units
    part: dict[str, Any] = {"kind": model, "hidden": list(units[:1]), **SHAPES[model]}
    if base == "srnn":
        part["hidden"] = list(units * 2)
    if base in ("dts", "dots"):
        part["intermediate"] = [units[1]] * (2 if model == "dts3" else 1)
    if base == "dots":
        part["output_hidden"] = [units[2]]
        part.setdefault("output_unit", "relu" if data == "ptb-char" else "sigmoid")
    full = Recipe.from_dict({"data": {"name": data}, "model": part, "seeds": [seed]}).to_dict()
    full["pretrain"]["recipe"] = {"dots": f"paper/{data}/dts", "srnn": f"paper/{data}/rnn"}.get(model, "")
    for name, value in changes.items():
        section, _, key = name.partition("__")
        full[section][key] = value
    return full


def entry(
    data: str, model: str, seed: int, test: float, valid: float | None = None, **changes: Any
) -> dict[str, Any]:
    """One entry as training writes it."""
    kind = paper.KINDS[data]
    reason = changes.pop("reason", "no new best in 20 epochs")
    valid = test if valid is None else valid
    rows = [{"epoch": e, "step": 100 * e, "train": valid + 3 / e - 0.2, "valid": valid + 2 / e, "rate": 1.0,
             "grad_norm": 0.5, "clipped": 0.1, "seconds": 2.0 * e} for e in range(1, 31)]  # fmt: skip
    key = HEADLINE[kind].key
    return {
        "format": 1, "name": f"{data}-{model}/seed-{seed}", "label": model, "parameters": 1, "seed": seed,
        "metric": HEADLINE[kind].name, "paper": None, "version": "0", "commit": "0" * 12,
        "environment": {"device": "cpu"}, "data": {"name": data, "kind": kind}, "model": model,
        "recipe": recipe(data, model, seed, **changes), "finished": "2026-01-01T00:00:00+00:00", "seconds": 60.0,
        "stopped": reason, "epochs": 30, "result": {"best_epoch": 28} | {s: {key: v} for s, v in
                                                     (("train", valid - 0.2), ("valid", valid), ("test", test))},
        "curve": rows,
    }  # fmt: skip


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    """Lay entries down as a ledger folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, made in enumerate(entries):
        (folder / f"{made['data']['name']}-{made['model']}-{number:03}.json").write_text(json.dumps(made))
    return folder
