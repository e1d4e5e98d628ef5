"""Finished runs scored again on what does not stand in the training part too, from the parameters they kept.

    rows = score_finished(Path("runs/fresh"), Path("runs/fresh/ledger"), "cuda")
    print(markdown(rows))

A ledger's entries hold no parameters, so this is done while the run folders are there. What it comes to lies in
`clean.json` beside the ledger, a row for each run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from deeprnn.errors import UserError
from deeprnn.files import write_json
from deeprnn.model import paper
from deeprnn.model.metrics import HEADLINE
from deeprnn.reproduction.cells import places_of
from deeprnn.reproduction.entries import Entry, entry_path
from deeprnn.reproduction.layout import markdown_table
from deeprnn.reproduction.statistics import plus_minus
from deeprnn.runs import ledger
from deeprnn.runs.folder import Run
from deeprnn.training.clean import CLEAN, NEW_MELODY, WHOLE, SplitSubset, clean_parts, score_parts
from deeprnn.training.cuda_graph import SETUP
from deeprnn.training.evaluate import Data
from deeprnn.training.recipe import DataPart, Recipe

FILE = "clean.json"
SPLIT = "test"


@dataclass(frozen=True)
class CleanScore:
    """One run's scores on the test part, on the whole and on parts of it."""

    entry: str
    """file name of the run's entry in the ledger"""
    data: str
    model: str
    seed: int
    whole: float
    """from the parameters that were kept: what the entry has"""
    clean: float | None
    """without what has a near-duplicate in the training part; None where nothing is left"""
    symbols: int
    clean_symbols: int
    near_duplicates: int
    new_melody: float | None = None
    """of songs, only those whose melody is not in the training part"""
    new_melody_symbols: int = 0
    same_melodies: int = 0

    @property
    def known_melody(self) -> float | None:
        """Of the other songs; a mean over frames, as music is scored."""
        rest = self.symbols - self.new_melody_symbols
        if self.new_melody is None or not rest:
            return None
        return (self.whole * self.symbols - self.new_melody * self.new_melody_symbols) / rest

    @property
    def kind(self) -> str:
        """music, char or word."""
        return paper.KINDS[self.data]


def read_scores(path: Path) -> list[CleanScore]:
    """The rows of a clean.json; none where there is no file."""
    if not path.exists():
        return []
    try:
        return [CleanScore(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} holds no clean scores: {error}; remove it and score again") from None


def add_scores(path: Path, new: Sequence[CleanScore]) -> list[CleanScore]:
    """All rows of a file after those were added; a run that has one keeps it."""
    rows = read_scores(path)
    known = {row.entry for row in rows}
    rows += [row for row in new if row.entry not in known]
    rows.sort(key=lambda row: row.entry)
    write_json(path, [asdict(row) for row in rows])
    return rows


# ---- scoring


def score_run(run: Run, name: str, data: Data, parts: Mapping[str, SplitSubset], device: Any) -> CleanScore:
    """One run by its best parameters; `name` is that of its entry."""
    recipe = Recipe.from_dict(run.recipe)
    with SETUP:  # others may train on this card: nothing moves there while one of them captures
        model = run.model().to(device)
    scores = score_parts(model, data, SPLIT, recipe.evaluation, parts)
    value = {name: score.value if score.symbols else None for name, score in scores.items()}
    row = {"whole": scores[WHOLE].value, "symbols": scores[WHOLE].symbols, "clean": value[CLEAN],
           "clean_symbols": scores[CLEAN].symbols, "near_duplicates": parts[CLEAN].left_out}  # fmt: skip
    if NEW_MELODY in parts:
        row |= {"new_melody": value[NEW_MELODY], "new_melody_symbols": scores[NEW_MELODY].symbols,
                "same_melodies": parts[NEW_MELODY].left_out}  # fmt: skip
    return CleanScore(name, data.name, recipe.model.kind, run.info["seed"], **row)


def unscored(root: Path, entries: Path, rows: Sequence[CleanScore]) -> list[tuple[Run, str]]:
    """Finished runs below `root` that are in the ledger and in no row, with the names of their entries."""
    known, out = {row.entry for row in rows}, []
    for path in sorted(root.rglob("run.json")):
        run = Run(path.parent)
        if run.status != "finished" or SPLIT not in (run.info["result"] or {}):
            continue
        place = entry_path(ledger.entry(run), entries)
        if place.exists() and place.name not in known:
            out.append((run, place.name))
    return out


def score_finished(
    root: Path,
    entries: Path,
    device: str,
    load: Callable[[DataPart], Data],
    say: Callable[[str], None] = print,
    parts_of: Callable[[Data], Mapping[str, SplitSubset]] = lambda data: clean_parts(data, SPLIT),
) -> list[CleanScore]:
    """Score what is finished and has no row yet; every row is written at once."""
    path = entries.parent / FILE
    rows, parts = read_scores(path), dict[str, Mapping[str, SplitSubset]]()
    for run, name in unscored(root, entries, rows):
        recipe = Recipe.from_dict(run.recipe)
        data = load(recipe.data)
        if data.name not in parts:
            parts[data.name] = parts_of(data)
        with torch.no_grad():
            row = score_run(run, name, data, parts[data.name], torch.device(device))
        rows = add_scores(path, [row])
        say(f"{row.data}/{row.model}, seed {row.seed}: {text(row)}")
    return rows


# ---- words


def text(row: CleanScore) -> str:
    """A row for a person."""
    unit = HEADLINE[row.kind].name
    parts = {"without near-duplicates": row.clean, "new melodies alone": row.new_melody}
    scores = [f"{name} {value:.3f}" for name, value in parts.items() if value is not None]
    return ", ".join([f"test {row.whole:.3f} {unit}", *scores])


def of_entries(rows: Sequence[CleanScore], entries: Sequence[Entry]) -> list[CleanScore]:
    """The rows of these runs: those of first stages are of no cell."""
    names = {entry.path.name for entry in entries}
    return [row for row in rows if row.entry in names]


def markdown(rows: Sequence[CleanScore], titles: Mapping[str, str]) -> str:
    """A table of cells: the whole beside its parts, means over seeds; a sentence where there is nothing."""
    if not rows:
        return "No trained model has been scored on these parts yet.\n"
    headings = ("data", "model", "seeds", "whole", "without near-duplicates", "left out", "new melodies alone",
                "known melodies")  # fmt: skip
    lines = []
    for cell in paper.CELLS:
        of_cell = [r for r in rows if (r.data, r.model) == (cell.data, cell.model)]
        if not of_cell:
            continue
        values = [
            [getattr(r, name) for r in of_cell] for name in ("whole", "clean", "new_melody", "known_melody")
        ]
        whole, clean, new, known = (
            plus_minus([v for v in row if v is not None], places_of(cell.data)) for row in values
        )
        count, songs_left_out = of_cell[0].near_duplicates, of_cell[0].same_melodies
        unit, songs = ("songs", f" ({songs_left_out} songs)") if cell.kind == "music" else ("lines", "")
        lines.append((titles[cell.data], paper.LABELS[cell.model], str(len(of_cell)), whole, clean, f"{count} {unit}",
                      new, f"{known}{songs}"))  # fmt: skip
    return markdown_table(headings, lines) + "\n"
