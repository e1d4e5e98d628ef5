"""The README's speed section, built from the measurements in results/bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError

FOLDER = Path("results/bench")
HIDDEN = 400
GPU = "h200-measure.json"
CPU = "cpu.json"
NAMES = {
    "eager loop": "PyTorch, the loop written out",
    "CUDA graph": "the same, captured in a CUDA graph",
    "torch.compile": "the same, each step by `torch.compile`",
    "JAX lax.scan": "JAX `lax.scan`",
    "nn.RNN": "`nn.RNN`: one **shallow** layer",
    "nn.RNN x2": "`nn.RNN`: two shallow layers",
    "nn.LSTM": "`nn.LSTM`: one layer",
}


def speed_markdown(folder: str | Path = FOLDER) -> str:
    """Tables of microseconds per step beside the peers, for each device that was measured."""
    parts = []
    for file, where in ((GPU, "one NVIDIA H200"), (CPU, "CPU")):
        path = Path(folder) / file
        if path.exists():
            parts.append(_device(_read(path), where))
    if not parts:
        return ""
    head = (
        "Forward and backward with all gradients of a DT(S)-RNN, 88 inputs, 400 + 400 units, 200 steps: "
        "microseconds per time step, in brackets how many times our time in the same run a peer takes. Every "
        "row was verified against float64 before it was timed; peers are called from Python unless the row "
        "says otherwise."
    )
    return "\n\n".join([head, *parts]) + "\n"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def _device(measured: Mapping[str, Any], where: str) -> str:
    rows = [r for r in measured["rows"] if _of(r, "hidden") == HIDDEN and r.get("train_us")]
    batches = sorted({int(_of(r, "batch")) for r in rows})
    names = [n for n in NAMES if any(r["peer"] == n for r in rows)]
    mine = {int(_of(r, "batch")): r["train_us"] for r in rows if r["peer"] == "ours"}
    lines = [f"| {_title(measured, where)} | " + " | ".join(f"batch {b}" for b in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    called = {int(_of(r, "batch")): r["called_us"] for r in rows if r["peer"] == "ours" and "called_us" in r}
    label = "**deeprnn** in a CUDA graph, as it trains" if called else "**deeprnn**"
    lines.append(f"| {label} | " + " | ".join(f"**{_us(mine.get(b))}**" for b in batches) + " |")
    if called:
        cells = [_us(called.get(b)) for b in batches]
        lines.append("| **deeprnn** called from Python, no graph | " + " | ".join(cells) + " |")
    for name in names:
        theirs = {int(_of(r, "batch")): r["train_us"] for r in rows if r["peer"] == name}
        cells = [_cell(theirs.get(b), mine.get(b)) for b in batches]
        lines.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _of(row: Mapping[str, Any], key: str) -> Any:
    """A field of the work, which the GPU's file holds in the row itself and the CPU's beside it."""
    return row[key] if key in row else row["work"][key]


def _title(measured: Mapping[str, Any], where: str) -> str:
    torch = measured["versions"]["torch"].partition("+")[0]
    if where == "CPU":
        machine = measured["machine"]
        return f"CPU, {machine['threads']} threads, torch {torch}"
    return f"{where}, torch {torch}"


def _us(value: float | None) -> str:
    return "—" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cell(theirs: float | None, ours: float | None) -> str:
    if theirs is None or ours is None:
        return "—"
    ratio = theirs / ours
    return f"{_us(theirs)} ({ratio:.0f}x)" if ratio >= 9.95 else f"{_us(theirs)} ({ratio:.1f}x)"
