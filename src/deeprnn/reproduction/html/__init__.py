"""One self-contained HTML page about some runs: no network, inline pictures and sound, dark and light."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from deeprnn import __version__
from deeprnn.errors import UserError
from deeprnn.files import write_atomically
from deeprnn.render.browser import PARTS, STYLES, bundle
from deeprnn.reproduction.html import sections
from deeprnn.reproduction.html.gather import Group, PiecePrediction, collect, groups, predict

if TYPE_CHECKING:
    from deeprnn.runs.folder import Run

__all__ = ["collect", "page", "report_html", "write_figures", "write_report"]


def write_report(runs: Sequence[Run], path: str | Path, figures: bool = True) -> Path:
    """Write the page, and its figures as PNG files into a folder beside it."""
    path = Path(path)
    write_atomically(path, report_html(runs))
    if figures:
        write_figures(runs, path.with_name(f"{path.stem}-figures"))
    return path


def report_html(runs: Sequence[Run]) -> str:
    """The page as text."""
    if not runs:
        raise UserError("a report needs at least one run: deeprnn report runs/NAME")
    compared = groups(runs)
    title = (
        f"{compared[0].label} on {compared[0].data}"
        if len(compared) == 1
        else f"{len(compared)} models compared"
    )
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    date = datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")
    body = [
        f"<h1>{escape(title)}</h1><p class=lead>{count}, {date}</p>",
        sections.results_table(compared),
        '<p class="quiet">Lower is better. Mean ± standard deviation over seeds; parameters are entries of weight '
        "matrices, as the paper counts them; the difference is of our test score from the paper's.</p>",
        sections.comparison(compared),
        *(sections.group_section(group) for group in compared),
        f"<footer>deeprnn {escape(__version__)}</footer>",
    ]
    return page(title, "".join(body))


def page(title: str, body: str) -> str:
    """A whole page of that body, with its styles and its script."""
    folder = resources.files("deeprnn.reproduction.html")
    styles = [(PARTS / name).read_text("utf-8") for name in STYLES]
    css = "".join([*styles, folder.joinpath("page.css").read_text("utf-8")])
    script = bundle(folder.joinpath("page.js").read_text("utf-8"))
    return (
        '<!doctype html>\n<html lang="en" data-theme="auto"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head>"
        "<body><noscript><p>The charts, rolls and sounds of this report need JavaScript.</p></noscript>"
        f'<main>{body}</main><script type="module">{script}</script></body></html>\n'
    )


def write_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """The page's figures as PNG files: curves and model of every group, a test piece, the comparison."""
    folder, written = Path(folder), []

    def save(name: str, data: bytes) -> None:
        place = folder / f"{name}.png"
        if place in written:
            place = folder / f"{name}-{len(written)}.png"
        write_atomically(place, data)
        written.append(place)

    compared = groups(runs)
    for group in compared:
        _figures_of(group, save)
    from deeprnn.render.curves import comparison_png

    for task in dict.fromkeys(group.task for group in compared):
        curves = {group.label: group.best.metrics() for group in compared if group.task == task}
        if len(curves) > 1:
            save(f"{_plain(task[0])}-comparison", comparison_png(curves, title=f"Validation on {task[0]}"))
    return written


def _figures_of(group: Group, save) -> None:
    from deeprnn.render.curves import curves_png
    from deeprnn.render.model_diagram import model_png
    from deeprnn.render.pianoroll import pianoroll_png

    name = _plain(f"{group.data}-{group.label}")
    title = f"{group.label} on {group.data}"
    rows = group.best.metrics()
    save(f"{name}-curves", curves_png(rows, title=title, metric=group.metric, paper=group.paper))
    save(f"{name}-model", model_png(group.spec))
    prediction = predict(group.best)
    if isinstance(prediction, PiecePrediction):
        grid = group.best.grid
        save(
            f"{name}-test-piece",
            pianoroll_png(
                prediction.frames,
                probabilities=prediction.probabilities,
                steps_per_beat=grid.steps_per_beat if grid else 4,
                low=grid.low if grid else 21,
                title=f"{title}: what was expected, and what came",
                subtitle=prediction.name,
            ),
        )


def _plain(text: str) -> str:
    """A name that any file system takes."""
    letters = "".join(
        c if c.isalnum() or c in "-_" else "-" if c in " ./" else "" for c in text.replace("*", "star")
    )
    return letters.lower() or "figure"
