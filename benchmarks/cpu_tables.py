"""The tables of a document of `cpu_peers.py`, as Markdown: minima of microseconds a step, and goals beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def tables(report: Mapping[str, Any]) -> str:
    """All tables of what was measured."""
    machine = report["machine"]
    parts = [
        f"{machine['cpu']}, {machine['threads']} thread(s), commit {report['commit']}, torch "
        f"{report['versions']['torch']}, jax {report['versions']['jax']}, {report['products']['gigaflops']} GFLOP/s in "
        f"large products, {machine['cores_used_by_others']} cores used by others; µs a step, forward / forward and "
        "backward, least of each run; in brackets how many times ours a peer takes, the median of both."
    ]
    if "cells" in report:
        parts.append(_cells(report["cells"]))
    if "single" in report:
        parts.append("One step, microseconds a call without gradients:\n\n" + _single(report["single"]))
    if "compiled" in report:
        parts.append("The step by torch.compile:\n\n" + _cells(report["compiled"]))
    return "\n\n".join(parts)


def _groups(rows: Iterable[Row]) -> dict[tuple[str, int, int], dict[str, Row]]:
    """By cell, width and batch: each peer's row."""
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["cell"], row["hidden"], row["batch"]), {})[row["peer"]] = row
    return dict(sorted(found.items()))


def _cells(rows: Iterable[Row]) -> str:
    groups = _groups(rows)
    names = list(dict.fromkeys(_kind(name) for group in groups.values() for name in group))
    lines = ["| cell | H | B | T | " + " | ".join(names) + " |", "|---" * (len(names) + 4) + "|"]
    for (cell, H, B), group in groups.items():
        by_kind = {_kind(name): row for name, row in group.items()}
        entries = " | ".join(_entry(by_kind.get(name)) for name in names)
        lines.append(f"| {cell} | {H} | {B} | {group['ours']['steps']} | {entries} |")
    return "\n".join(lines)


def _kind(peer: str) -> str:
    return "torch.nn" if peer.startswith("nn.") else peer


def _entry(row: Row | None) -> str:
    if row is None:
        return ""
    if row["failed"]:
        return row["failed"][:40]
    times = f"{_short(row['forward_us_min'])} / {_short(row['train_us_min'])}"
    if row["peer"] == "ours":
        return f"**{times}**"
    return f"{times} ({row['forward_ratio']:.1f}x, {row['train_ratio']:.1f}x)"


def _short(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _single(rows: Iterable[Row]) -> str:
    lines = [
        "| cell | H | B | layer(x) | layer.step(x) | torch.nn | ratios |",
        "|---|---|---|---|---|---|---|",
    ]
    for (cell, H, B), group in _groups(rows).items():
        theirs = next((row for name, row in group.items() if name.startswith("nn.")), None)
        own = [group["ours"], group["ours, .step"]]
        if theirs is None or any(row["failed"] for row in (*own, theirs)):
            lines.append(f"| {cell} | {H} | {B} | {[row['failed'] for row in own]} | | | |")
            continue
        us = [row["forward_us_min"] for row in (*own, theirs)]
        ratios = ", ".join(f"{x / us[2]:.2f}" for x in us[:2])
        lines.append(
            f"| {cell} | {H} | {B} | {us[0]:.0f} | {us[1]:.0f} | {us[2]:.0f} ({theirs['peer']}) | {ratios} |"
        )
    return "\n".join(lines)
