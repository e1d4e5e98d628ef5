"""The study in one picture: for each data set the difference, its interval, and the answer in a word."""

from __future__ import annotations

from textwrap import fill

from deeprnn.render.style import INK, PAPER_LINE, RULE, SERIES, SOFT, dress, new_figure, png_bytes
from deeprnn.reproduction.study.analysis import Answer, Results
from deeprnn.reproduction.study.report import label, remarks, title

COLOURS = {"yes": SERIES[0], "no": SOFT, "no: worse": SERIES[1]}


def study_figure(outcome: Results) -> bytes:
    """A row for each answer: left of zero the tested side is better; the bar is a 95 % interval."""
    study, rows, open_rows = outcome.study, list(outcome.answers), (*outcome.open, *outcome.void)
    notes = remarks([score for row in rows for score in (row.tested, row.control)])
    figure = new_figure(8.8, 1.7 + 0.55 * (len(rows) + len(open_rows)) + 0.2 * len(notes))
    axes = figure.add_subplot()
    dress(axes, f"{study.question}\n")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    axes.axvline(0, color=PAPER_LINE, linewidth=1.4)
    reach = max([1.0, *(abs(x) for row in rows for x in row.percent)])
    axes.axvspan(-1.05 * reach, 0, color=COLOURS["yes"], alpha=0.07, linewidth=0)
    for x, side, where in ((-1.02 * reach, f"← {study.tested} better", "left"),
                           (1.02 * reach, f"{study.control} better →", "right")):  # fmt: skip
        axes.annotate(side, (x, 1), xycoords=axes.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
                      color=SOFT, fontsize=9, ha=where, va="bottom")  # fmt: skip
    for place, row in enumerate(rows):
        value, low, high = row.percent
        colour = COLOURS[row.verdict]
        axes.plot([low, high], [place, place], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot(value, place, "o", color=colour, markersize=9)
        axes.text(1.1 * reach, place, f"{_word(row)}  {value:+.1f} %".replace("-", "−"), color=colour, fontsize=10,
                  fontweight="bold", va="center")  # fmt: skip
    for place, line in enumerate(open_rows, len(rows)):
        axes.text(0, place, " " + line.partition(": ")[2], color=SOFT, fontsize=8.5, va="center")
    places = (line.partition(":")[0].partition(", ") for line in open_rows)
    names = [_name(row) for row in rows] + [f"{title(data)}, {family}" for data, _, family in places]
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-1.05 * reach, 1.75 * reach)
    axes.set_xticks([x for x in axes.get_xticks() if abs(x) <= reach])  # none below the answers
    caption = f"test cost of {study.tested} against {study.control}, %: the best of either side, with 95 % intervals"
    axes.set_xlabel("\n".join([caption, *(fill(note, 100) for note in notes)]), color=SOFT, fontsize=9)
    return png_bytes(figure)


def _word(row: Answer) -> str:
    return {"yes": "yes", "no": "no", "no: worse": "no, worse"}[row.verdict]


def _name(row: Answer) -> str:
    return f"{title(row.data)}, {row.tested.contender.family}\n{label(row.tested)} / {label(row.control)}"
