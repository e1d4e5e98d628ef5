"""How figures of speed are written, as Markdown, and where they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.records import Results
from benchmarks.shapes import LABELS, OURS, Curve, Shape

KERNELS = (  # how a plan's description begins or what it has -> the kernel in a word, as docs/kernels.md names them
    ("stepwise", "stepwise"),
    ("hold one model", "whole card"),
    ("blocks multiply on the tensor cores", "whole card, tensor cores"),
    ("on the tensor cores", "cluster, tensor cores"),
    ("cluster", "cluster"),
)


def figure(value: float | None) -> str:
    """Three digits; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def gain(ours: float | None, theirs: float | None) -> str:
    """How many times as fast ours is."""
    if ours is None or theirs is None:
        return "-"
    ratio = theirs / ours
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def against(ours: float | None, theirs: float | None) -> str:
    """A peer's time, and how many times ours it is."""
    return figure(theirs) if ours is None or theirs is None else f"{figure(theirs)} · {gain(ours, theirs)}"


def bold(text: str) -> str:
    """Ours stands out; a dash does not."""
    return text if text == "-" else f"**{text}**"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def folded(summary: str, content: str) -> str:
    """What a reader opens who wants all of it."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def sources(found: Results, shapes: Iterable[Shape], folder: str) -> str:
    """Which files the rows of these shapes come from, with their commits."""
    wanted = set(shapes)
    files: Counter[tuple[str, str, str]] = Counter()
    for (shape, _), row in found.layers.items():
        if shape in wanted:
            about = row["about"]
            files[row["file"], about["commit"], versions_of(about["versions"])] += 1
    parts = [
        f"[{name}](../results/bench/{folder}/{name}): {count} rows, commit {commit[:7]}, {versions}"
        for (name, commit, versions), count in sorted(files.items())
    ]
    return "\n".join(f"- {part}" for part in parts)


def versions_of(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name in ("torch", "jax") if (version := versions.get(name)))


def commits(found: Results, shapes: Iterable[Shape]) -> str:
    """The commits of the rows of ours."""
    rows = [found.layers[shape, OURS] for shape in shapes if (shape, OURS) in found.layers]
    return " and ".join(dict.fromkeys(row["about"]["commit"][:7] for row in rows))


def kernel_of(described: str) -> str:
    """A plan's kernel in a word."""
    return next(word for part, word in KERNELS if part in described)


def kernels_of(found: Results, shape: Shape) -> str:
    """The kernels that served a shape: one, or forward / backward."""
    kernels = found.layers.get((shape, OURS), {}).get("kernels")
    if kernels is None:
        return "-"
    return " / ".join(dict.fromkeys(kernel_of(kernels[name]) for name in ("forward", "backward")))


def title_of(curve: Curve) -> str:
    """What grows, and what does not."""
    first = curve.shapes[0]
    fixed = {"H": "hidden", "B": "batch", "T": "steps", "depth": "depth"}
    same = [
        f"{n} = {getattr(first, f)}"
        for n, f in fixed.items()
        if len({getattr(s, f) for s in curve.shapes}) == 1
    ]
    return ", ".join([LABELS[first.kind], *(text for text in same if text != "depth = 1")])
