"""The study in one picture: for each data set the difference, its interval, and the answer in a word."""

from __future__ import annotations

from textwrap import fill

from deeprnn.render.style import INK, PAPER_LINE, RULE, SERIES, SOFT, dress, new_figure, png_bytes
from deeprnn.reproduction.study.analysis import Answer, Results, label, remarks, title

COLOURS = {"yes": SERIES[0], "no": SOFT, "no: worse": SERIES[1]}


def study_figure(outcome: Results) -> bytes:
    """A row for each answer: left of zero the tested side is better; the bar is a 95 % interval."""
    study, rows, open_rows = outcome.study, list(outcome.answers), (*outcome.open, *outcome.void)
    notes = remarks([score for row in rows for score in (row.tested, row.control)])
    figure = new_figure(8.8, 1.7 + 0.55 * (len(rows) + len(open_rows)) + 0.2 * len(notes))
    axes = figure.add_subplot()
    dress(axes, study.question)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.axvline(0, color=PAPER_LINE, linewidth=1.4)
    reach = max([1.0, *(abs(x) for row in rows for x in row.percent)])
    for place, row in enumerate(rows):
        value, low, high = row.percent
        colour = COLOURS[row.verdict]
        axes.plot([low, high], [place, place], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot(value, place, "o", color=colour, markersize=9)
        axes.text(1.08 * reach, place, _word(row), color=colour, fontsize=10, fontweight="bold", va="center")
    for place, line in enumerate(open_rows, len(rows)):
        axes.text(0, place, " " + line.partition(": ")[2], color=SOFT, fontsize=8.5, va="center")
    names = [_name(row) for row in rows] + [line.partition(":")[0] for line in open_rows]
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-1.05 * reach, 1.6 * reach)
    sides = f"← {study.tested} better    {study.control} better →"
    caption = f"test cost of {study.tested} against {study.control}, %:  {sides}"
    axes.set_xlabel("\n".join([caption, *(fill(note, 100) for note in notes)]), color=SOFT, fontsize=9)
    return png_bytes(figure)


def _word(row: Answer) -> str:
    return {"yes": "yes", "no": "no", "no: worse": "no, worse"}[row.verdict]


def _name(row: Answer) -> str:
    return f"{title(row.data)}, {row.tested.contender.family}\n{label(row.tested)} / {label(row.control)}"
