"""`deeprnn runs`: what has been trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Runs:
    """List runs with their results; the best epoch so far for those that have not finished."""

    root: tyro.conf.Positional[Path] = Path("runs")
    """the folder that runs are kept in"""
    json: bool = False
    """print one JSON document, and nothing else"""

    def run(self) -> int:
        """Print the table."""
        import json

        from deeprnn.commands import run_view
        from deeprnn.console import console, escape, show_table
        from deeprnn.errors import UserError
        from deeprnn.runs.folder import list_runs

        found = []
        for run in list_runs(self.root):
            try:
                run_view.summary(run)
            except (
                UserError,
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
            ) as error:  # one must not hide all
                reason = (
                    str(error) if isinstance(error, UserError) else "run.json or metrics.jsonl is damaged"
                )
                console(stderr=True).print(f"left out {run.path}: {reason}", markup=False)
            else:
                found.append(run)
        if self.json:
            print(json.dumps([run_view.summary(run) for run in found]))
        elif not found:
            console().print(
                f"no runs in {escape(str(self.root))}: `deeprnn demo` makes two, `deeprnn train bach` one"
            )
        else:
            show_table(run_view.results_table(found))
        return 0
