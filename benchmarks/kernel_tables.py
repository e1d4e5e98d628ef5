"""What was measured on the GPU, read for docs/kernels.md: one structure for pictures and Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "results" / "bench"
MEASURED = "h200-measure.json"
BATCHES = (1, 16, 64, 256)
GOALS = {1: 3.5, 16: 4.0, 64: 5.0, 256: 12.0}
RATIO_GOALS = {
    "eager loop": {1: 80, 16: 80, 64: 60, 256: 30},
    "JAX lax.scan": {1: 8, 16: 10, 64: 10, 256: 6},
    "nn.RNN": {1: 6, 16: 6, 64: 6, 256: 2.5},
}
EPOCH_GOALS = {1: 1.5, 15: 2.2}
LABELS = {
    "eager loop": "eager PyTorch",
    "CUDA graph": "the same in a CUDA graph",
    "torch.compile": "`torch.compile` of the step",
    "torch.compile, CUDA graph": "the same in a CUDA graph, step compiled",
    "JAX lax.scan": "JAX `lax.scan`",
    "nn.RNN": "cuDNN `nn.RNN`, one shallow layer",
    "nn.RNN x2": "cuDNN `nn.RNN`, two layers",
    "nn.LSTM": "cuDNN `nn.LSTM`, one layer",
}
Row = dict[str, Any]


def measured(path: Path | None = None) -> dict[str, Any]:
    """The file of gpu_measure.py, with an empty list for a section that was not measured."""
    content = json.loads((path or BENCH / MEASURED).read_text())
    return {"rows": [], "curves": [], "epochs": [], "first_call": []} | content


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows with these values that have a time."""
    return [r for r in rows if "train_us" in r and all(r.get(k) == v for k, v in wanted.items())]


def times(rows: Iterable[Row], key: str, value: str = "train_us", **wanted: Any) -> dict[Any, float]:
    """key -> time, in the order of the key."""
    found = {r[key]: r[value] for r in select(rows, **wanted) if value in r}
    return dict(sorted(found.items()))


def figure(value: float | None) -> str:
    """Three digits; nothing for what was not measured."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _times_ours(theirs: float | None, ours: float | None) -> str:
    if theirs is None or ours is None:
        return figure(theirs)
    ratio = theirs / ours
    return f"{figure(theirs)} · {ratio:.1f}×" if ratio < 19.95 else f"{figure(theirs)} · {ratio:.0f}×"


def peer_table(data: dict[str, Any], hidden: int, kind: str = "train") -> str:
    """Ours and its peers at one width, µs per step: forward and backward, or forward alone."""
    value = f"{kind}_us"
    ours = times(data["rows"], "batch", value, peer="ours", hidden=hidden)
    lines = [["**deeprnn, CUDA graph**", *(f"**{figure(ours.get(b))}**" for b in BATCHES)]]
    for peer, label in LABELS.items():
        theirs = times(data["rows"], "batch", value, peer=peer, hidden=hidden)
        if theirs:
            lines.append([label, *(_times_ours(theirs.get(b), ours.get(b)) for b in BATCHES)])
    called = times(data["rows"], "batch", "called_us", peer="ours", hidden=hidden)
    if kind == "train" and called:
        lines.append(["deeprnn called without a graph", *(figure(called.get(b)) for b in BATCHES)])
    return table(["", *(f"B={b}" for b in BATCHES)], lines)


def goal_table(data: dict[str, Any]) -> str:
    """What was aimed at, what was reached."""
    ours = times(data["rows"], "batch", peer="ours", hidden=400)
    alone = times(data["curves"], "batch", hidden=400, depth=2, steps=200, members=1, precision="fp32")

    def verdict(value: float | None, good: Callable[[float], bool], text: str) -> str:
        return "" if value is None else f"{text} **met**" if good(value) else f"{text} missed"

    lines: list[list[str]] = [["goal, µs per step", *(f"{GOALS[b]:g}" for b in BATCHES)]]
    reached = [verdict(ours.get(b), lambda x, b=b: x <= GOALS[b], figure(ours.get(b))) for b in BATCHES]
    lines += [["reached, whole layer", *reached]]
    lines += [["reached, loop and weight gradients", *(figure(alone.get(b)) for b in BATCHES)]]
    for peer, goals in RATIO_GOALS.items():
        theirs = times(data["rows"], "batch", peer=peer, hidden=400)
        ratio = {b: theirs[b] / ours[b] for b in BATCHES if b in theirs and b in ours}
        cells = [
            verdict(ratio.get(b), lambda x, b=b, goals=goals: x >= goals[b], f"{ratio.get(b, 0):.1f}")
            for b in BATCHES
        ]
        asked = " / ".join(f"{goals[b]:g}" for b in BATCHES)
        lines.append([f"{LABELS[peer]}, goal {asked}×", *cells])
    return table(["", *(f"B={b}" for b in BATCHES)], lines)


def memory_table(data: dict[str, Any]) -> str:
    """Peak memory of a training step at H = 400."""
    names = {"ours": "deeprnn"} | {k: v for k, v in LABELS.items() if not k.endswith("CUDA graph")}
    lines = []
    for peer, label in names.items():
        peaks = times(data["rows"], "batch", "peak_mb", peer=peer, hidden=400)
        if peaks:
            lines.append([label, *(f"{peaks[b]:.0f}" if b in peaks else "" for b in BATCHES)])
    return table(["peak memory of a training step, MB, H = 400", *(f"B={b}" for b in BATCHES)], lines)


CURVES: tuple[tuple[str, str, dict[str, Any], str, tuple[Any, ...]], ...] = (
    # title, along, fixed, lines, values of the lines
    ("against the batch, H = 400", "batch", {"hidden": 400, "depth": 2, "steps": 200, "members": 1},
     "precision", ("fp32", "bf16")),
    ("against the members of a population, B = 1", "members",
     {"hidden": 400, "depth": 2, "steps": 200, "batch": 1}, "precision", ("fp32",)),
    ("against the width, B = 1", "hidden", {"depth": 2, "steps": 200, "members": 1, "batch": 1},
     "precision", ("fp32", "bf16")),
    ("against the width, B = 16", "hidden", {"depth": 2, "steps": 200, "members": 1, "batch": 16},
     "precision", ("fp32", "bf16")),
    ("against the length, H = 400", "steps", {"hidden": 400, "depth": 2, "members": 1, "precision": "fp32"},
     "batch", (1, 16)),
    ("against the depth, H = 400", "depth", {"hidden": 400, "steps": 200, "members": 1, "precision": "fp32"},
     "batch", (1, 16)),
    ("against the depth, H = 300", "depth", {"hidden": 300, "steps": 200, "members": 1, "precision": "fp32"},
     "batch", (1, 16)),
)  # fmt: skip


def curve_tables(data: dict[str, Any]) -> str:
    """One table a curve: forward and backward with weight gradients, and the kernel that serves."""
    parts = []
    for title, along, fixed, by, values in CURVES:
        places = sorted({r[along] for v in values for r in select(data["curves"], **fixed, **{by: v})})
        if len(places) < 2:
            continue
        lines = []
        for v in values:
            rows = {r[along]: r for r in select(data["curves"], **fixed, **{by: v})}
            name = f"{by[0].upper()} = {v}" if by == "batch" else v
            lines.append([f"{name}, µs per step", *(figure(rows.get(x, {}).get("train_us")) for x in places)])
            lines.append([f"{name}, kernel", *(rows.get(x, {}).get("path", "") for x in places)])
        parts += [f"**{title[0].upper()}{title[1:]}**", table(["", *places], lines)]
    return "\n\n".join(parts)


def population_table(data: dict[str, Any]) -> str:
    """A whole population beside one of its members."""
    us = times(data["curves"], "members", hidden=400, depth=2, steps=200, batch=1, precision="fp32")
    ratio = {m: us[m] / us[1] for m in us if 1 in us}
    goal = "" if 15 not in ratio else " (goal 1.5: **met**)" if ratio[15] <= 1.5 else " (goal 1.5: missed)"
    again = [f"{r:.2f}{goal if m == 15 else ''}" for m, r in ratio.items()]
    return table(["members", *us], [["µs per step of all", *map(figure, us.values())], ["times one", *again]])


def epoch_table(data: dict[str, Any]) -> str:
    """Seconds of the first and of later epochs, for one seed and for fifteen."""
    lines = []
    for seeds in dict.fromkeys(r["seeds"] for r in data["epochs"]):
        rows = [r for r in data["epochs"] if r["seeds"] == seeds]
        later = sorted(r["updates_s"] for r in rows if r["epoch"] > 1)
        check = sorted(r["validation_s"] for r in rows if r["epoch"] > 1)
        if not later:
            continue
        median, goal = later[len(later) // 2], EPOCH_GOALS.get(seeds)
        verdict = "" if goal is None else f"{goal:g}: **met**" if median <= goal else f"{goal:g}: missed"
        first = rows[0].get("setup_s", 0) + rows[0]["updates_s"]
        lines.append([seeds, f"{median:.2f}", f"{check[len(check) // 2]:.2f}", f"{first:.1f}", verdict])
    head = ["seeds", "updates of an epoch, s (median from the 2nd on)", "validation, s"]
    return table([*head, "setting up and first epoch, s", "goal"], lines)


def first_call_table(data: dict[str, Any]) -> str:
    """The first call of a process."""
    if not data["first_call"]:
        return ""
    lines = []
    for row in data["first_call"]:
        if "cached_s" in row:
            cells = [figure(row[k]) for k in ("cold_s", "cached_s")]
            lines.append(["forward and backward", *cells, f"{row['cached_again_s'] * 1e3:.1f} ms"])
    text = table(["seconds", "kernels compiled", "kernels on disk", "a second call"], lines)
    parts = next((row["parts_s"] for row in data["first_call"] if "parts_s" in row), {})
    return (
        text
        + "\n\n"
        + table(["part of a first call, kernels on disk", "s"], [(k, figure(v)) for k, v in parts.items()])
    )


def worst_errors(data: dict[str, Any]) -> str:
    """The largest error of any point by kernel and precision."""
    worst: dict[tuple[str, str], float] = {}
    for r in select(data["curves"]):
        key = (r["path"], r["precision"])
        worst[key] = max(worst.get(key, 0.0), r["error"])
    rows = [(path, precision, f"{error:.1e}") for (path, precision), error in sorted(worst.items())]
    return table(["kernel", "precision", "largest error"], rows)


HEADINGS = {  # of parts that docs/kernels.md has only once they are measured
    "forward": "### Forward alone, H = 400",
    "peers-512": "### H = 512",
    "curves": "### Against batch, members, width, length and depth\n\nThe operator by itself: loop and weight "
    "gradients, T = 200 where nothing else is said, forward and backward, µs per step in a CUDA graph.\n\n"
    "![Cost against batch, width, length, depth and members](images/kernel-curves.png)",
    "errors": "Largest error of any of these points:",
}


def tables(data: dict[str, Any]) -> dict[str, str]:
    """Every table under the name by which docs/kernels.md marks its place."""
    found = {f"peers-{h}": peer_table(data, h) for h in dict.fromkeys(r["hidden"] for r in data["rows"])}
    return found | {
        "forward": peer_table(data, 400, "forward"), "goals": goal_table(data), "memory": memory_table(data),
        "population": population_table(data), "curves": curve_tables(data), "errors": worst_errors(data),
        "epochs": epoch_table(data), "first-call": first_call_table(data),
    }  # fmt: skip


def all_tables(data: dict[str, Any]) -> str:
    """Everything for a person, with what failed or was cut short."""
    text = "\n\n".join(f"### {name}\n\n{content}" for name, content in tables(data).items())
    failed = [r for part in ("rows", "curves") for r in data[part] if "failed" in r]
    if failed:
        text += "\n\n### Failed or refused\n\n" + "\n".join(f"- {r}" for r in failed)
    stages = [f"- {s['name']}: {s['ended']}" for s in data.get("stages", []) if s["ended"] != "finished"]
    return text + ("\n\n### Cut short\n\n" + "\n".join(stages) if stages else "")


def write_into(path: Path, data: dict[str, Any]) -> list[str]:
    """Put the tables between their marks in a Markdown file, `<!-- NAME:begin -->`; the names that were found."""
    text, done = path.read_text(encoding="utf-8"), []
    for name, content in tables(data).items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin in text and content.count("\n") > 1:  # a table without a row leaves what stands
            if name in HEADINGS:
                if "format" not in data:
                    continue
                content = f"{HEADINGS[name]}\n\n{content}"
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{content}\n{end}{after}"
            done.append(name)
    path.write_text(text, encoding="utf-8")
    return done
