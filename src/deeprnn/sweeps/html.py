"""A sweep as one HTML page: its trials side by side, what decided, the best curves; no network, dark and light."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from deeprnn.files import write_atomically
from deeprnn.reproduction.html import page
from deeprnn.reproduction.html.sections import part
from deeprnn.sweeps.run import Outcome
from deeprnn.sweeps.space import Choice, Dimension, value_text
from deeprnn.sweeps.spec import Spec
from deeprnn.sweeps.study import Trial, best

CURVES = 8
ROWS = 50
MOST_LINES = 2000
TICKS = 5
USUAL = 0.9
"""of the trials, which are to be told apart"""
FAR = 2.0
"""times as far from the best as those"""


def write_page(spec: Spec, folder: Path, outcome: Outcome) -> Path:
    """Write report.html into the sweep's folder."""
    path = folder / "report.html"
    write_atomically(path, sweep_html(spec, folder.name, outcome))
    return path


def sweep_html(spec: Spec, name: str, outcome: Outcome) -> str:
    """The page as text."""
    trials = outcome.trials
    counts = {s: sum(t.state == s for t in trials) for s in ("complete", "pruned", "failed", "running")}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    # Not the whole path, which would tell whoever gets the page of this machine's folders.
    data, kind = Path(spec.recipe.data.name).stem, spec.recipe.model.kind
    body = [
        f"<h1>Sweep {escape(name)}</h1>",
        f"<p class=lead>{escape(kind)} on {escape(data)}, {spec.sampler} search, {len(trials)} trials: {states}</p>",
        _score(outcome.score),
        *_coordinates(spec, trials),
        *_importances(outcome.importances),
        *_curves(trials),
        _table(spec, trials),
    ]
    return page(f"Sweep {name}", "".join(body))


def _score(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    sentence = (
        f"Trial {record['trial']}, the best on validation ({record['valid']:.4f}), was scored on test once: "
    )
    return f"<p>{escape(sentence)}<b>{record['test']:.4f}</b> {escape(str(record['metric']))}.</p>"


def _coordinates(spec: Spec, trials: Sequence[Trial]) -> list[str]:
    scored = sorted(
        (t for t in trials if t.value is not None and t.state != "failed"), key=lambda t: t.value or 0
    )
    scored = scored[:MOST_LINES]
    if not scored:
        return ['<p class="quiet">No trial has a score yet.</p>']
    values = [t.value or 0.0 for t in scored]
    low, high = values[0], top_of(values)
    span = (high - low) or 1.0
    axes = [{"name": n, "ticks": ticks(d)} for n, d in spec.space.dimensions.items()]
    scale = [low + span * i / (TICKS - 1) for i in range(TICKS)] if high > low else [low]
    labels = [f"{v:.4g}" for v in scale]
    labels[-1] = "≥ " * (values[-1] > high) + labels[-1]
    axes.append(
        {"name": "valid", "ticks": [[(v - low) / span, t] for v, t in zip(scale, labels, strict=True)]}
    )
    lines = [
        {
            "places": [
                *(round(position(d, t.point[n]), 4) for n, d in spec.space.dimensions.items()),
                (min(t.value or 0, high) - low) / span,
            ],
            "rank": rank / max(1, len(scored) - 1),
            "title": f"trial {t.number}, {t.state}: valid {t.value:.4f}; {json.dumps(t.point)[1:-1]}",
        }
        for rank, t in enumerate(scored)
    ]
    chart = {"axes": axes, "lines": lines, "label": "Parallel coordinates of the trials"}
    note = "One line a trial, from its settings to its validation score; the best is red, better ones are darker."
    return ["<h2>Settings and scores</h2>", f'<p class="quiet">{note}</p>', part("parallel", chart)]


def top_of(values: Sequence[float]) -> float:
    """Where the axis of rising scores ends: below the worst tenth where that would press all others together."""
    usual = values[math.ceil(USUAL * len(values)) - 1]
    return usual if values[0] < usual and values[-1] - values[0] > FAR * (usual - values[0]) else values[-1]


def position(dimension: Dimension, value: Any) -> float:
    """Where a value stands on its axis, 0 to 1."""
    if isinstance(dimension, Choice):
        return (
            dimension.options.index(value) / max(1, len(dimension.options) - 1)
            if value in dimension.options
            else 0.0
        )
    low, high = float(dimension.low), float(dimension.high)
    if dimension.log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def ticks(dimension: Dimension) -> list[list[Any]]:
    """Places on an axis and what stands there."""
    if isinstance(dimension, Choice):
        return [[position(dimension, v), json.dumps(v).strip('"[]') or "none"] for v in dimension.options]
    if not dimension.log:
        span = dimension.high - dimension.low
        values = [dimension.low + span * i / (TICKS - 1) for i in range(TICKS)]
    else:
        powers = range(math.ceil(math.log10(dimension.low)), math.floor(math.log10(dimension.high)) + 1)
        values = sorted({float(dimension.low), float(dimension.high), *(10.0**p for p in powers)})
    return [[position(dimension, v), f"{v:.3g}"] for v in values]


def _importances(importances: dict[str, float]) -> list[str]:
    if not importances:
        return []
    note = "How much each field decides whether a trial is among the better ones (PED-ANOVA)."
    content = {"rows": [[n, v] for n, v in importances.items()], "label": "Importances"}
    return ["<h2>Importances</h2>", f'<p class="quiet">{note}</p>', part("bars", content)]


def _curves(trials: Sequence[Trial]) -> list[str]:
    series = [
        {
            "name": f"trial {t.number}",
            "class": f"s{i % 8}",
            "points": [[epoch, float(f"{v:.6g}")] for epoch, v in enumerate(t.curve, 1)],
        }
        for i, t in enumerate(best(trials, CURVES))
    ]
    if not series:
        return []
    chart = {
        "series": series,
        "legend": True,
        "label": "Best validation score so far",
        "y": "valid, best so far",
    }
    return ["<h2>The best trials</h2>", part("chart", chart)]


def _table(spec: Spec, trials: Sequence[Trial]) -> str:
    ended = [*best(trials), *(t for t in trials if t.state != "complete")]
    names = list(spec.space.dimensions)
    heads = "".join(
        f"<th>{escape(head)}</th>" for head in ("trial", "valid", "epochs", *names, "how it ended")
    )
    rows = []
    for trial in ended[:ROWS]:
        cells = [
            str(trial.number),
            "–" if trial.value is None else f"{trial.value:.4f}",
            str(len(trial.curve)),
        ]
        cells += [value_text(trial.point.get(name)) for name in names]
        cells.append(trial.state + (f": {trial.reason}" if trial.reason else ""))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    more = f'<p class="quiet">{len(ended) - ROWS} more.</p>' if len(ended) > ROWS else ""
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>Trials</h2><div class="wide">{table}</div>{more}'
