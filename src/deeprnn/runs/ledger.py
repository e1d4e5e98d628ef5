"""A run's entry in the ledger, from which tables and figures are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deeprnn.errors import UserError
from deeprnn.runs.folder import Run

FORMAT = 2
"""1 had neither command, nor `dirty`, nor stages"""
POINTS = 200
"""most points of a learning curve that are kept"""


def entry(run: Run, info: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is kept of a run for good: how it was made, on what, what it reached and how it got there.

    `info` stands for the run's run.json where that is yet to be written.
    """
    info = run.info if info is None else info
    if info.get("result") is None:
        raise UserError(
            f"{run.path} has no result yet (status {info['status']}): `deeprnn resume {run.path}`"
        )
    rows, first, code = run.metrics(), info.get("first_stage"), info.get("commit")
    copied = ("name", "label", "parameters", "seed", "metric", "paper", "version", "commit", "environment")
    stage = cost(rows, info.get("seconds"))
    return {
        "format": FORMAT,
        **{key: info.get(key) for key in copied},
        "dirty": None if code is None else code.endswith("+"),
        "command": info.get("command"),
        "data": {key: info["data"].get(key) for key in ("name", "kind", "fingerprint")},
        "model": run.recipe["model"]["kind"],
        "recipe": run.recipe,
        "first_stage": None if first is None else first["recipe"],
        "finished": info["updated"],
        "seconds": info.get("seconds"),
        "stopped": info.get("reason"),
        "epochs": len(rows),
        "stages": [stage] if first is None else [{k: first[k] for k in stage}, stage],
        "result": info["result"],
        "curve": thin(rows),
    }


def origin(run: Run) -> dict[str, Any] | None:
    """What a run that starts from this one's parameters keeps of it: its recipe, and what training it took."""
    try:
        return {"recipe": run.recipe, **cost(run.metrics(), run.info.get("seconds"))}
    except UserError:  # parameters that are whole may be used, even where their history is not
        return None


def cost(rows: Sequence[Mapping[str, Any]], seconds: float | None) -> dict[str, Any]:
    """Epochs and updates of one stage, also those after the best, and its time; None where nothing is left to tell."""
    return {
        "epochs": len(rows) or None,
        "updates": rows[-1].get("step") if rows else None,
        "seconds": seconds,
    }


def thin(rows: Sequence[Mapping[str, Any]], points: int = POINTS) -> list[dict[str, Any]]:
    """At most about `points` epochs, evenly spread; the first, the last and the best always among them."""
    if not rows:
        return []
    best = min(range(len(rows)), key=lambda i: rows[i]["valid"])
    step = max(1, -(-len(rows) // points))
    kept_rows = sorted({*range(0, len(rows), step), len(rows) - 1, best})
    keys = ("epoch", "step", "train", "valid", "rate", "grad_norm", "clipped", "seconds")
    return [{k: _short(rows[i].get(k)) for k in keys} for i in kept_rows]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
