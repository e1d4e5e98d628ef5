"""Tables from the ledger, in the terminal and as Markdown.

    entries = read_ledger("results/runs")
    print(text_tables(entries))

Every number comes from a run of the ledger; a cell without runs is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction.cells import Row, Verdict, places_of, rows, verdicts
from deeprnn.reproduction.entries import FOLDER, Entry, read_ledger
from deeprnn.reproduction.extras import extra_rows, level_rows
from deeprnn.reproduction.layout import aligned, markdown_table
from deeprnn.reproduction.statistics import plus_minus
from deeprnn.runs.summary import MARK

__all__ = ["FOLDER", "TITLES", "markdown", "read_ledger", "rows", "text_tables"]

TITLES = {"nottingham": "Nottingham", "jsb": "JSB Chorales", "musedata": "MuseData",
          "ptb-char": "PTB characters", "ptb-word": "PTB words"}  # fmt: skip
CAPTIONS = {
    2: "Table 2, polyphonic music: test negative log-likelihood, nats per frame",
    3: "Table 3, Penn Treebank: bits per character and perplexity, test",
}
NONE = "—"
TWICE = (("train", 201, "valid", 3), ("train", 267, "test", 99))
"""songs of Nottingham that stand in two splits, counted from 0; a test finds them in the data"""


def number(value: float | None, places: int) -> str:
    """A value, or a dash."""
    return NONE if value is None else f"{value:.{places}f}"


def printed(row: Row) -> str:
    """The paper's value with the decimals the paper gives."""
    return f"{row.cell.value:.{2 if row.cell.model == 'dots-star' else places_of(row.cell.data)}f}"


def measured(row: Row) -> str:
    """Mean ± deviation, or a dash."""
    return plus_minus(row.values, places_of(row.cell.data)) + MARK * bool(row.marks)


def percent(value: float | None) -> str:
    """A difference in percent with its sign."""
    if value is None:
        return NONE
    return "0.0 %" if abs(value) < 0.05 else f"{value:+.1f} %".replace("-", "−")


def reached(row: Row) -> bool:
    """Whether our mean is within 1 % of the paper's, or better."""
    return row.difference is not None and row.difference <= 1.0


# ---- Markdown


def markdown(entries: Sequence[Entry]) -> str:
    """The whole results section."""
    table = rows(entries)
    parts = [_summary(table)]
    judged = {v.data: v for v in verdicts(table)}
    for number, caption in CAPTIONS.items():
        parts.append(f"**{caption}**\n\n" + _wide(number, table, judged))
        parts.append(_notes(number))
    parts.append(_depth(list(judged.values())))
    parts.append(_details(table))
    if extra := _extras(entries):
        parts.append(extra)
    return "\n\n".join(parts) + "\n"


def _summary(table: Sequence[Row]) -> str:
    filled = [r for r in table if r.entries]
    runs = sum(len(r.entries) for r in filled)
    within = sum(map(reached, filled))
    return (
        f"{len(filled)} of the paper's {len(table)} cells are measured, by {runs} runs; {within} of them are "
        f"within 1 % of the paper's number or better (bold). Ours: mean ± standard deviation over seeds; in "
        f"brackets, the paper's. A dash: not run; {MARK}: see the remarks."
    )


def _depth(judged: Sequence[Verdict]) -> str:
    """The question of the last column: the answers in a sentence, and what stands behind each."""
    answers: dict[str, list[str]] = {}
    for verdict in judged:
        answers.setdefault(verdict.answer, []).append(TITLES[verdict.data])
    summary = "; ".join(f"{answer}: {', '.join(names)}" for answer, names in answers.items())
    every = "".join(f" On {TITLES[v.data]} {v.everywhere}." for v in judged if v.everywhere)
    how = (
        "Of the deep models the one that is best on validation against the conventional RNN on test, seed by seed "
        "(two-sided paired t-test, p < 0.05 after Holm's correction over the five rows). The two are not alike (last "
        "column), so that *shown* is said of these trainings and these sizes, not of depth alone. DOT(S)-RNN*, "
        "which also has dropout, other units and another optimiser, is compared apart and says still less about it."
    )
    headings = (
        "data",
        "answer",
        "deep model",
        "difference on test",
        "better at",
        "chance",
        "deep against RNN",
    )
    rows = [(TITLES[v.data], v.answer, v) for v in judged if v.test]
    rows += [(TITLES[v.data], "apart", v.star) for v in judged if v.star]
    lines = [(d, a, v.name, v.gap, f"{v.better} seeds", v.chance, v.unlike or "alike") for d, a, v in rows]
    return f"**Does depth help?** {summary[:1].upper()}{summary[1:]}.{every} {how}\n\n{markdown_table(headings, lines)}"


def _notes(table: int) -> str:
    """What a reader of a table must know about its data."""
    if table == 2:
        songs = " and ".join(f"{a} {i} is {b} {j}" for a, i, b, j in TWICE)
        return f"Two songs of Nottingham stand in two of its splits, note for note (counted from 0): {songs}."
    return "Characters are counted as the authors did; the second row leaves out the space before each line's end."


def _wide(number: int, table: Sequence[Row], judged: dict[str, Verdict]) -> str:
    of_table = [r for r in table if r.cell.table == number]
    models = list(dict.fromkeys(r.cell.model for r in of_table))
    lines = []
    for data in dict.fromkeys(r.cell.data for r in of_table):
        cells = [_short(r) for r in of_table if r.cell.data == data]
        lines.append((TITLES[data], *cells, judged[data].answer))
        if data == "ptb-char":
            stripped = [_stripped(r) for r in of_table if r.cell.data == data]
            lines.append((f"{TITLES[data]}, stripped", *stripped, ""))
    return markdown_table(("", *(paper.LABELS[m] for m in models), "does depth help"), lines)


def _short(row: Row) -> str:
    text = measured(row)
    return f"{f'**{text}**' if reached(row) else text} ({printed(row)})"


def _stripped(row: Row) -> str:
    """Bits per character of the other counting, without the space before a line's end."""
    values = [e.raw["result"]["test"].get("bpc_stripped") for e in row.entries]
    if not values or None in values:
        return NONE
    return plus_minus(values, 3)


def _details(table: Sequence[Row]) -> str:
    summary = "Every cell: seeds, epochs, the seed best on validation, difference, deviations"
    headings = ("data", "model", "paper", "ours", "seeds", "epochs", "best-validation seed", "difference",
                "deviations from the paper")  # fmt: skip
    lines = []
    for row in table:
        best = number(row.best, places_of(row.cell.data))
        named = "; ".join(row.deviations) or ("none" if row.entries else NONE)
        lines.append((
            TITLES[row.cell.data], paper.LABELS[row.cell.model], printed(row), measured(row), str(len(row.entries)),
            row.epochs or NONE, best, percent(row.difference), named,
        ))  # fmt: skip
    table_text = markdown_table(headings, lines)
    return f"<details><summary>{summary}</summary>\n\n{table_text}\n\n</details>"


def _extras(entries: Sequence[Entry]) -> str:
    extra = sorted([*extra_rows(entries), *level_rows(entries)], key=lambda row: list(TITLES).index(row.data))
    if not extra:
        return ""
    lines = []
    for row in extra:
        scores = plus_minus(row.values, places_of(row.data)) + MARK * bool(row.marks)
        lines.append((TITLES[row.data], row.label, f"{row.parameters:,}", scores, str(len(row.entries)),
                      "; ".join(row.marks)))  # fmt: skip
    table = markdown_table(("data", "model", "parameters", "ours, test", "seeds", "remarks"), lines)
    return (
        "**Models beside the paper's**: those it names or suggests but does not train, and an RNN as wide as a level "
        f"of the sRNN, where the one above is not\n\n{table}"
    )


# ---- plain text


def text_tables(entries: Sequence[Entry], width: int = 1000) -> str:
    """Tables 2 and 3 as aligned plain text within so many columns: ours over the paper's, or model by model."""
    table = rows(entries)
    out = []
    for number, caption in CAPTIONS.items():
        of_table = [r for r in table if r.cell.table == number]
        by_data = aligned(_by_data(of_table))
        fits = max(map(len, by_data.splitlines())) <= width
        out.append(f"{fill(caption, width)}\n{by_data if fits else aligned(_by_model(of_table))}")
    judged = "Is it shown that depth helps (test, paired over seeds, p < 0.05 after Holm's correction over the rows)?"
    lines = [fill(judged, width)]
    for verdict in verdicts(table):
        line = f"  {TITLES[verdict.data]:<16}{verdict.text}"
        lines.append(fill(line, width, subsequent_indent=" " * 6))
    return "\n\n".join([*out, "\n".join(lines)])


def _by_data(table: Sequence[Row]) -> list[list[str]]:
    """A column for each model, and for each data set four lines."""
    models = dict.fromkeys(r.cell.model for r in table)
    lines = [["", "", *(paper.LABELS[m] for m in models)]]
    for data in dict.fromkeys(r.cell.data for r in table):
        of_data = [r for r in table if r.cell.data == data]
        lines.append([TITLES[data], "ours", *(measured(r) for r in of_data)])
        lines.append(["", "paper", *(printed(r) for r in of_data)])
        lines.append(["", "difference", *(percent(r.difference) for r in of_data)])
        lines.append(["", "seeds", *(str(len(r.entries)) for r in of_data)])
    return lines


def _by_model(table: Sequence[Row]) -> list[list[str]]:
    """A line for each cell."""
    lines = [["", "ours", "paper", "diff.", "seeds"]]
    for data in dict.fromkeys(r.cell.data for r in table):
        lines.append([TITLES[data], "", "", "", ""])
        for r in (r for r in table if r.cell.data == data):
            label = f"  {paper.LABELS[r.cell.model]}"
            lines.append([label, measured(r), printed(r), percent(r.difference), str(len(r.entries))])
    return lines


def cells_text(table: Sequence[Row], width: int = 1000) -> str:
    """All cells, a line each; where that is too wide, deviations stand on lines of their own."""
    lines = [
        [
            "table",
            "data",
            "model",
            "metric",
            "paper",
            "ours",
            "seeds",
            "best seed",
            "difference",
            "deviations",
        ]
    ]
    for r in table:
        lines.append(
            [str(r.cell.table), r.cell.data, r.cell.model, HEADLINE[r.cell.kind].name, printed(r), measured(r),
             str(len(r.entries)), number(r.best, places_of(r.cell.data)), percent(r.difference),
             "; ".join(r.deviations)]
        )  # fmt: skip
    wide = aligned(lines)
    if max(map(len, wide.splitlines())) <= width:
        return wide
    names = ("data", "model", "paper", "ours", "difference")
    columns = [lines[0].index(name) for name in names]
    head, *short = aligned([[line[i] for i in columns] for line in lines]).splitlines()
    out = [head]
    for line, r in zip(short, table, strict=True):
        notes = fill("; ".join(r.deviations), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        out += [line, notes] if notes else [line]
    return "\n".join(out)
