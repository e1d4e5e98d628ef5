"""The parts of the page, each a piece of HTML from what was gathered."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from deeprnn.generation.outputs import Music, Text
from deeprnn.model.structure import equations, short_count
from deeprnn.render.charts import Series, line_chart, roll_svg, scatter
from deeprnn.render.curves import series
from deeprnn.render.model_diagram import model_svg
from deeprnn.reproduction.html.gather import Group, PiecePrediction, TextPrediction, predict, sample, score

if TYPE_CHECKING:
    from deeprnn.runs.folder import Run

AUDIO_RATE = 16000  # a modest file: what a piano says above 8 kHz is not missed here
MOST_CURVES = 8


def results_table(found: Sequence[Group]) -> str:
    """All groups beside the paper's numbers."""
    heads = ("data", "model", "parameters", "seeds", "train", "valid", "test", "paper", "difference", "unit")
    out = ["<table><thead><tr>", *(f"<th>{head}</th>" for head in heads), "</tr></thead><tbody>"]
    for group in found:
        test = group.mean("test")
        cells = [
            escape(group.data),
            escape(group.label),
            f'<span title="{group.weights:,}; {group.parameters:,} with biases">{short_count(group.weights)}</span>',
            str(len(group.runs)),
            *(spread(group.mean(split)) for split in ("train", "valid")),
            spread(test),
            "–" if group.paper is None else f"{group.paper:g}",
            difference(test, group.paper),
            escape(group.metric),
        ]
        best = is_best(group, found)
        out += [
            "<tr>",
            *(f"<td{' class=best' if i == 6 and best else ''}>{cell}</td>" for i, cell in enumerate(cells)),
        ]
        out.append("</tr>")
    return '<div class="wide">' + "".join([*out, "</tbody></table></div>"])


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


def is_best(group: Group, found: Sequence[Group]) -> bool:
    """Whether a group has the lowest test score among several on the same data."""
    rivals = [g for g in found if g.task == group.task and g.mean("test") is not None]
    own = group.mean("test")
    return (
        len(rivals) > 1 and own is not None and own[0] == min(m[0] for g in rivals if (m := g.mean("test")))
    )


def comparison(found: Sequence[Group]) -> str:
    """For each data set with several models: validation curves together, and size against quality."""
    out = []
    for task in dict.fromkeys(group.task for group in found):
        here = [group for group in found if group.task == task]
        if len(here) < 2:
            continue
        lines = [
            Series(g.label, *series(g.best.metrics(), "valid"), css=f"s{i % 8}") for i, g in enumerate(here)
        ]
        sized = [(g.weights, m[0], m[1], g.label) for g in here if (m := g.mean("test") or g.mean("valid"))]
        out.append(
            f"<h2>{escape(task[0])}: side by side</h2><div class=two><div><h3>Validation, {escape(here[0].metric)}</h3>"
        )
        out.append(legend(lines) + line_chart(lines, skip=0.2, label="validation curves") + "</div>")
        if sized:
            out.append(f"<div><h3>Result against number of weights</h3>{scatter(sized)}</div>")
        out.append("</div>")
    return "".join(out)


def legend(lines: Sequence[Series]) -> str:
    """Names beside strokes of their colours."""
    keys = "".join(
        f'<span><svg viewBox="0 0 22 8"><line class="{s.css}" x2="22" y1="4" y2="4"/></svg>{escape(s.name)}</span>'
        for s in lines
    )
    return f'<div class="legend">{keys}</div>'


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
        Series("train", *series(rows, "train"), css="s0"),
        Series("valid", *series(rows, "valid"), css="s1"),
        *(Series("valid, other seeds", *series(run.metrics(), "valid"), css="s7") for run in others),
    ]
    level = None if group.paper is None else (group.paper, f"paper, test {group.paper:g}")
    big = line_chart(lines, level=level, skip=0.12, height=280, width=960, label="learning curves")
    rate = line_chart(
        [Series("rate", *series(rows, "rate"), css="s2")], log=_wide(rows, "rate"), label="learning rate"
    )
    norm = line_chart(
        [Series("norm", *series(rows, "grad_norm"), css="s3")], log=_wide(rows, "grad_norm"), label="norm"
    )
    return (
        f"<h3>Learning curves, {escape(group.metric)} over epochs</h3>{legend(lines[:3])}{big}"
        f'<div class="two"><div><h3>Learning rate</h3>{rate}</div><div><h3>Gradient norm</h3>{norm}</div></div>'
    )


def _wide(rows: Sequence[dict], key: str) -> bool:
    values = [v for v in series(rows, key)[1] if v > 0]
    return bool(values) and max(values) > 20 * min(values)


def prediction(run: Run) -> str:
    """What the model expected of a test piece, against what came."""
    seen = predict(run)
    head = "<h3>What the model expected, and what came</h3>"
    if isinstance(seen, str):
        return f'{head}<p class="quiet">{escape(seen)}</p>'
    if isinstance(seen, PiecePrediction):
        steps, low = (run.grid.steps_per_beat, run.grid.low) if run.grid else (4, 21)
        roll = roll_svg(seen.frames, probabilities=seen.probabilities, steps_per_beat=steps, low=low)
        frames = list(range(1, len(seen.frames) + 1))
        strip = line_chart(
            [Series("surprise", frames, seen.surprise.tolist(), "s1")],
            height=130,
            width=960,
            label="surprise",
        )
        return (
            f'{head}<p class="quiet">{escape(seen.name)}, not trained on: the notes that came over the glow of '
            f"the probabilities given to them one frame before. Below, nats of surprise per frame (mean "
            f"{float(seen.surprise.mean()):.2f}).</p>{roll}{strip}"
        )
    told = (
        "Text not trained on; the redder, the more surprised. Point at a symbol for the model's favourites."
    )
    return f'{head}<p class="quiet">{told}</p>{surprised(seen)}'


def surprised(seen: TextPrediction) -> str:
    """Text with every symbol coloured by its surprise."""
    out = []
    words = any(len(symbol) > 1 and symbol != "<unk>" for symbol in seen.symbols)
    for symbol, bits, favourites in zip(seen.symbols, seen.surprise, seen.favourites, strict=True):
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
    """A play button over the piano roll of what it plays."""
    from deeprnn.render import synthesise, wav_bytes

    sound = synthesise(
        music[0], tempo=music.tempo, program=music.program, steps_per_beat=music.steps_per_beat, low=music.low,
        rate=AUDIO_RATE,
    ).mean(axis=1)  # fmt: skip
    data = base64.b64encode(wav_bytes(sound, AUDIO_RATE)).decode()
    seconds = len(music[0]) * 60 / music.tempo / music.steps_per_beat
    roll = roll_svg(
        music[0],
        probabilities=music.probabilities[0] if music.probabilities else None,
        steps_per_beat=music.steps_per_beat,
        low=music.low,
        label="piano roll of the sample",
    ).replace('class="roll"', 'class="roll heard"', 1)
    return (
        f'<div class="sample"><div class="player" data-seconds="{seconds:.3f}"><button type="button">▶ Play</button>'
        f'<output class="quiet"></output><span class="quiet">{seconds:.0f} s, seed {music.seed}; click to jump</span>'
        f'<audio preload="auto" src="data:audio/wav;base64,{data}"></audio></div>{roll}</div>'
    )


def settings(run: Run) -> str:
    """The recipe and where it ran, folded away."""
    info = run.info
    rows = run.metrics()
    facts = {
        "run": run.name,
        "status": info.get("status"),
        "seed": info.get("seed"),
        "epochs": len(rows) or None,
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
    text = escape(recipe.read_text("utf-8")) if recipe.is_file() else ""
    return f"<details><summary>Settings, environment and recipe</summary><dl>{items}</dl><pre>{text}</pre></details>"
