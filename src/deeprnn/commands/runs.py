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

        from deeprnn.commands.run_results import show_results
        from deeprnn.console import console
        from deeprnn.errors import UserError
        from deeprnn.runs.folder import list_runs
        from deeprnn.runs.summary import summary

        runs = []
        for run in list_runs(self.root):
            try:
                summary(run)
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
                console(stderr=True).print(f"left out {run.path}: {reason}")
            else:
                runs.append(run)
        if self.json:
            print(json.dumps([summary(run) for run in runs]))
        elif not runs:
            console().print(f"no runs in {self.root}: `deeprnn demo` makes two, `deeprnn train bach` one")
        else:
            show_results(runs)
        return 0
