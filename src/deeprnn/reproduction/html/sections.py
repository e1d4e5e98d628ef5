"""The parts of the page, each a piece of HTML from what was gathered."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from deeprnn.generation.outputs import Music, Text
from deeprnn.model.notation import equations, short_count
from deeprnn.render.browser import encode_probabilities, to_lists
from deeprnn.render.curves import series
from deeprnn.render.model_diagram import model_svg
from deeprnn.render.synth import timbre_name
from deeprnn.reproduction.html.gather import Group, PiecePrediction, TextPrediction, predict, sample, score
from deeprnn.runs.reading import read_regular, regular
from deeprnn.runs.summary import MARK

if TYPE_CHECKING:
    from deeprnn.runs.folder import Run

MOST_CURVES = 8
MOST_RECIPE = 2**20
"""bytes of a recipe that are shown"""


def results_table(groups: Sequence[Group]) -> str:
    """All groups beside the paper's numbers."""
    heads = ("data", "model", "parameters", "seeds", "train", "valid", "test", "paper", "difference", "unit")
    out = ["<table><thead><tr>", *(f"<th>{head}</th>" for head in heads), "</tr></thead><tbody>"]
    for group in groups:
        test = group.mean("test")
        cells = [
            escape(group.data),
            escape(group.label),
            f'<span title="{group.weights:,}; {group.parameters:,} with biases">{short_count(group.weights)}</span>',
            str(len(group.runs)),
            *(spread(group.mean(split)) for split in ("train", "valid")),
            spread(test) + MARK * bool(group.marks),
            "–" if group.paper is None else f"{group.paper:g}",
            difference(test, group.paper),
            escape(group.metric),
        ]
        best = is_best(group, groups)
        out += [
            "<tr>",
            *(f"<td{' class=best' if i == 6 and best else ''}>{cell}</td>" for i, cell in enumerate(cells)),
        ]
        out.append("</tr>")
    remarks = [f"{MARK} {g.label} on {g.data}: {'; '.join(g.marks)}" for g in groups if g.marks]
    paragraphs = "".join(f'<p class="quiet">{escape(remark)}</p>' for remark in remarks)
    return '<div class="wide">' + "".join([*out, "</tbody></table></div>", paragraphs])


def spread(value: tuple[float, float] | None) -> str:
    """Mean ± standard deviation."""
    if value is None:
        return "–"
    mean, sd = value
    digits = 1 if abs(mean) >= 50 else 3
    return f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if sd else "")


def difference(test: tuple[float, float] | None, paper: float | None) -> str:
    """How far from the paper, in per cent; lower is better."""
    if test is None or not paper:
        return "–"
    percent = 100 * (test[0] / paper - 1)
    css = "better" if percent <= 0 else "worse"
    shown = f"{abs(percent):.1f}"
    sign = "±" if shown == "0.0" else "+" if percent > 0 else "−"
    return f'<span class="{css}">{sign}{shown} %</span>'


def is_best(group: Group, groups: Sequence[Group]) -> bool:
    """Whether a group has the lowest test score among several on the same data."""
    rivals = [g for g in groups if g.task == group.task and g.mean("test") is not None]
    score = group.mean("test")
    return (
        len(rivals) > 1
        and score is not None
        and score[0] == min(m[0] for g in rivals if (m := g.mean("test")))
    )


def part(kind: str, content: dict[str, Any]) -> str:
    """A chart or a roll: a box that the report's script fills from the JSON in it."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<div data-part="{kind}"><script type="application/json">{text}</script></div>'


def line(name: str, rows: Sequence[dict], key: str, css: str, **options: Any) -> dict[str, Any]:
    """One line of a chart: a number of metrics.jsonl over epochs."""
    points = [[x, float(f"{y:.6g}")] for x, y in zip(*series(rows, key), strict=True)]
    return {"name": name, "class": css, "points": points, **options}


def comparison(groups: Sequence[Group]) -> str:
    """For each data set with several models: validation curves together, and size against quality."""
    out = []
    for task in dict.fromkeys(group.task for group in groups):
        of_task = [group for group in groups if group.task == task]
        if len(of_task) < 2:
            continue
        metric = of_task[0].metric
        lines = [line(g.label, g.best.metrics(), "valid", f"s{i % 8}") for i, g in enumerate(of_task)]
        sized = [
            {"name": g.label, "class": f"s{i % 8}", "dots": True, "points": [[g.weights, *m, g.label]]}
            for i, g in enumerate(of_task)
            if (m := g.mean("test") or g.mean("valid"))
        ]
        curves_chart = {"series": lines, "label": "Validation curves", "legend": True, "y": metric}
        out.append(f"<h2>{escape(task[0])}: side by side</h2><div class=two><div><h3>Validation</h3>")
        out.append(part("chart", curves_chart) + "</div>")
        if sized:
            dots = {"series": sized, "label": "Result against number of weights", "x": "weights", "y": metric}
            out.append(
                f"<div><h3>Result against number of weights</h3>{part('chart', {**dots, 'counted': True})}</div>"
            )
        out.append("</div>")
    return "".join(out)


def group_section(group: Group) -> str:
    """Everything about one model: picture, curves, predictions, a sample, the settings."""
    run = group.best
    note = (
        f"{len(group.runs)} seeds, the best by validation shown" if len(group.runs) > 1 else escape(run.name)
    )
    parts = [
        f"<h2>{escape(group.label)} on {escape(group.data)}</h2>",
        f'<p class="facts">{group.weights:,} weights, {group.parameters:,} parameters with biases · {note}</p>',
        curves(group),
        f'<h3>The model, unfolded over two steps</h3><div class="picture">{model_svg(group.spec)}',
        '<ul class="equations">',
        *(f"<li>{escape(line)}</li>" for line in equations(group.spec)),
        "</ul></div>",
        prediction(run),
        sample_section(run),
        settings(run),
    ]
    return f'<section class="run">{"".join(parts)}</section>'


def curves(group: Group) -> str:
    """Learning curves of the best run (all seeds' validation behind it), rate and gradient norm."""
    rows = group.best.metrics()
    if not rows:
        return '<p class="quiet">No epoch is finished yet.</p>'
    others = [run for run in group.runs if run is not group.best][: MOST_CURVES - 2]
    lines = [
        *(line("valid, other seeds", run.metrics(), "valid", "s7 behind") for run in others),
        line("train", rows, "train", "train"),
        line("valid", rows, "valid", "valid", mark=True),
    ]
    guides = [] if group.paper is None else [{"name": f"paper, test {group.paper:g}", "value": group.paper}]
    big = {"series": lines, "guides": guides, "height": 280, "label": "Learning curves", "legend": True,
           "y": group.metric}  # fmt: skip
    rate = {
        "series": [line("rate", rows, "rate", "s2")],
        "height": 150,
        "label": "Learning rate",
        "wide": True,
    }
    norm = {
        "series": [line("norm", rows, "grad_norm", "s3")],
        "height": 150,
        "label": "Gradient norm",
        "wide": True,
    }
    return (
        f"<h3>Learning curves</h3>{part('chart', big)}"
        f'<div class="two"><div><h3>Learning rate</h3>{part("chart", rate)}</div>'
        f"<div><h3>Gradient norm</h3>{part('chart', norm)}</div></div>"
    )


def prediction(run: Run) -> str:
    """What the model expected of a test piece, against what came."""
    expected = predict(run)
    head = "<h3>What the model expected, and what came</h3>"
    if isinstance(expected, str):
        return f'{head}<p class="quiet">{escape(expected)}</p>'
    if isinstance(expected, PiecePrediction):
        steps, low = (run.grid.steps_per_beat, run.grid.low) if run.grid else (4, 21)
        surprise = [[t, round(float(nats), 3)] for t, nats in enumerate(expected.surprise, 1)]
        strip = {"series": [{"name": "surprise", "class": "valid", "points": surprise, "whole": True}],
                 "height": 140, "label": "Surprise", "x": "frame", "y": "nats"}  # fmt: skip
        condition = ", each given the notes below it in its chord" if expected.chain else ""
        return (
            f'{head}<p class="quiet">{escape(expected.name)}, not trained on: the notes that came over the glow of '
            f"the probabilities given to them one frame before{condition}. Below, nats of surprise per frame (mean "
            f"{float(expected.surprise.mean()):.2f}).</p>"
            f"{roll(expected.frames, expected.probabilities, steps, low, 'A test piece')}{part('chart', strip)}"
        )
    legend = (
        "Text not trained on; the redder, the more surprised. Point at a symbol for the model's favourites."
    )
    return f'{head}<p class="quiet">{legend}</p>{surprised(expected)}'


def surprised(prediction: TextPrediction) -> str:
    """Text with every symbol coloured by its surprise."""
    out = []
    words = any(len(symbol) > 1 and symbol != "<unk>" for symbol in prediction.symbols)
    for symbol, bits, favourites in zip(
        prediction.symbols, prediction.surprise, prediction.favourites, strict=True
    ):
        strength = min(0.85, max(0.0, bits) / (16 if words else 9))
        best = ", ".join(f"{show(name)} {100 * p:.0f} %" for name, p in favourites)
        shown = "\n" if symbol in ("\n", "<eos>") else symbol + (" " if words else "")
        title = escape(f"{show(symbol)}: {bits:.1f} bits. Favourites: {best}", quote=True)
        out.append(
            f'<span style="background:rgba(214,80,48,{strength:.2f})" title="{title}">{escape(shown)}</span>'
        )
    return f'<pre class="surprise">{"".join(out)}</pre>'


def show(symbol: str) -> str:
    """A symbol that can be seen."""
    return {" ": "␣", "\n": "↵", "<eos>": "↵"}.get(symbol, symbol)


def sample_section(run: Run) -> str:
    """A sample to hear or read."""
    work = sample(run)
    head = "<h3>A sample</h3>"
    if isinstance(work, str):
        return f'{head}<p class="quiet">{escape(work)}</p>'
    if isinstance(work, Text):
        return f'{head}<p class="quiet">seed {work.seed}</p><pre>{escape(work[0])}</pre>'
    return head + player(work)


def player(music: Music) -> str:
    """A piano roll with a play button."""
    probabilities = music.probabilities[0] if music.probabilities else None
    timbre = timbre_name(music.program)
    return f'<p class="quiet">seed {music.seed}</p>' + roll(
        music[0],
        probabilities,
        music.steps_per_beat,
        music.low,
        "The sample",
        tempo=music.tempo,
        timbre=timbre,
    )


def roll(
    frames: np.ndarray, probabilities: np.ndarray | None, steps: int, low: int, label: str, **playing: Any
) -> str:
    """A piano roll with what the model expected behind the notes."""
    heat = None if probabilities is None else encode_probabilities(probabilities)
    grid = {"steps_per_beat": steps, "low": low}
    content = {
        "grid": grid,
        "keys": frames.shape[1],
        "frames": to_lists(frames),
        "heat": heat,
        "label": label,
    }
    return part("roll", {**content, **playing})


def settings(run: Run) -> str:
    """The recipe and where it ran, folded away."""
    info = run.info
    rows = run.metrics()
    facts = {
        "run": run.name,
        "status": info.get("status"),
        "seed": info.get("seed"),
        "epochs": len(rows) or None,
        "ended": info.get("reason"),
        "best epoch": (info.get("result") or {}).get("best_epoch"),
        "training time": f"{rows[-1].get('seconds', math.nan):,.0f} s" if rows else None,
        "validation": None if (valid := score(run, "valid")) is None else f"{valid:.4f}",
        "version": info.get("version"),
        "commit": info.get("commit"),
        **(info.get("environment") or {}),
    }
    items = "".join(
        f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v is not None
    )
    recipe = run.path / "recipe.toml"
    status = regular(recipe)
    shown = status is not None and status.st_size <= MOST_RECIPE
    text = escape(read_regular(recipe, MOST_RECIPE).decode("utf-8", "replace")) if shown else ""
    return f"<details><summary>Settings, environment and recipe</summary><dl>{items}</dl><pre>{text}</pre></details>"
