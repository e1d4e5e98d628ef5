"""`deeprnn report`: the ledger's tables and figures, or one HTML page about some runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deeprnn.console import printable, width
from deeprnn.errors import UserError


@dataclass(frozen=True)
class Report:
    """Show results: the paper's tables beside ours, or a page about runs.

    Without RUN: Tables 2 and 3 from the ledger. `--cells` lists the 23 cells, `--readme README.md` rewrites what a
    document has of results, `--figures docs/images` draws them. With RUN: one self-contained HTML file.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """run folders for an HTML report"""
    html: Path | None = None
    """where the HTML report goes (out/report.html when runs are given)"""
    cells: bool = False
    """list the 23 cells of Tables 2 and 3"""
    json: bool = False
    """print JSON instead of text"""
    readme: Path | None = None
    """rewrite the sections of this Markdown file that are made from results, each between its two markers"""
    figures: Path | None = None
    """draw the ledger's figures into this folder"""
    study: str = ""
    """a study's answers in place of the tables: depth, …, or a plan's .toml file"""
    ledger: Path = Path("results/runs")
    """folder of the ledger's entries"""
    against: Path | None = None
    """compare the ledger, a rerun's, with this published one, cell by cell"""

    def run(self) -> int:
        """Print or write what is asked for."""
        if self.runs or self.html:
            return self._page()
        if self.study:
            return self._study()
        from deeprnn.reproduction import tables

        entries = tables.read_ledger(self.ledger)
        if self.against:
            from deeprnn.reproduction.compare import compare, comparison_text

            compared = compare(entries, tables.read_ledger(self.against))
            rows = [c.to_dict() for c in compared]
            print(json.dumps(rows, indent=1) if self.json else printable(comparison_text(compared)))
            return 0
        if self.readme:
            from deeprnn.reproduction.documents import Sources, update_document

            changed = update_document(self.readme, Sources(self.ledger))
            print(f"{self.readme}: results {'rewritten' if changed else 'were up to date'}")
        if self.figures:
            from deeprnn.reproduction.figures import draw_all

            for path in draw_all(entries, self.figures):
                print(path)
        if self.readme or self.figures:
            return 0
        table = tables.rows(entries)
        if self.json:
            print(json.dumps([row.to_dict() for row in table], indent=1, ensure_ascii=False))
        else:
            text = tables.cells_text(table, width()) if self.cells else tables.text_tables(entries, width())
            print(printable(text))
        return 0

    def _page(self) -> int:
        from deeprnn.reproduction.html import write_report
        from deeprnn.reproduction.html.gather import collect

        if not self.runs:
            raise UserError(
                "--html needs at least one run folder: deeprnn report runs/NAME --html out/report.html"
            )
        path = self.html or Path("out/report.html")
        write_report(collect(self.runs), path)
        print(path)
        return 0

    def _study(self) -> int:
        from deeprnn.files import write_atomically
        from deeprnn.reproduction.study.analysis import results
        from deeprnn.reproduction.study.figure import study_figure
        from deeprnn.reproduction.study.plan_file import read_study
        from deeprnn.reproduction.study.report import text
        from deeprnn.reproduction.study.run import begun, check_plan, read_runs, study_ledger

        study, ledger = read_study(self.study), study_ledger(self.study, self.ledger)
        check_plan(study, ledger)
        outcome = results(study, read_runs(ledger))
        if self.figures:
            path = self.figures / f"study-{study.name}.png"
            write_atomically(path, study_figure(outcome))
            print(path)
        elif self.json:
            print(json.dumps(outcome.to_dict(), indent=1, ensure_ascii=False))
        else:
            print(printable(text(outcome)))
            if frozen := begun(ledger):
                print(f"\n{frozen}")
        return 0
