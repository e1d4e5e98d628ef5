"""A recipe trained for a person: live view, trackers, ledger entry, and what came of it; for several commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deeprnn.training.evaluate import Data
    from deeprnn.training.ranks import Ranks
    from deeprnn.training.recipe import Recipe

MOST_THREADS = 1024
"""no bound by this machine's cores: going on bit for bit takes as many threads as a run began with"""


def set_threads(threads: int) -> None:
    """Use so many CPU threads; 0 changes nothing."""
    from deeprnn.errors import UserError

    if not 0 <= threads <= MOST_THREADS:
        raise UserError(f"--threads must be from 0 to {MOST_THREADS:,}, got {threads:,}")
    if threads:
        from deeprnn.training.threads import limit

        limit(threads)


def train_recipe(
    recipe: Recipe,
    folder: Path,
    *,
    data: Data | None,
    options: Any,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
    concluded: bool = True,
    new: bool = False,
) -> int:
    """Run a recipe with everything a person sees; the exit status. Of several ranks the lead shows it."""
    import json
    import shlex
    import sys
    from contextlib import ExitStack

    from deeprnn.cells.lookup import import_option
    from deeprnn.commands import run_results, run_view
    from deeprnn.console import console, program
    from deeprnn.reproduction.entries import record
    from deeprnn.runs import ledger
    from deeprnn.runs.summary import summary
    from deeprnn.training import loading, saving, session, tracking
    from deeprnn.training.ranks import Ranks

    ranks = ranks or Ranks()
    tracking.check(options.track)
    shown = not (options.quiet or options.json)
    with ExitStack() as stack:
        stage = stack.enter_context(ExitStack())

        def watch(trainer: Any, stage_folder: Path) -> list[Any]:
            stage.close()  # the first stage's live line gives way to the second's
            watchers: list[Any] = []
            if shown:
                paper = run_results.members(stage_folder)[0].info.get("paper")
                watchers.append(stage.enter_context(run_view.RunView(trainer, stage_folder, paper)))
            if options.track:
                watchers.append(stage.enter_context(tracking.Tracking(options.track, trainer, stage_folder)))
            return watchers

        try:
            session.run_recipe(
                recipe,
                folder,
                data=data,
                device=device or loading.pick_device(options.device),
                watch=watch,
                new=new,
                choose_threads=not options.threads,
                ranks=ranks,
            )
        except saving.Interrupted as signal:
            stage.close()
            if not ranks.lead:
                return signal.status
            arguments = f"{shlex.quote(str(folder))} {import_option(recipe.model.cell)}".rstrip()
            print(f"saved; go on with: {program()} resume {arguments}", file=sys.stderr)
            return signal.status
    if not ranks.lead:
        return 0
    entries = (
        [record(ledger.entry(run), options.ledger) for run in run_results.members(folder)]
        if options.ledger
        else []
    )
    if options.json:
        print(json.dumps([summary(run) for run in run_results.members(folder)]))
    elif shown and concluded:
        run_results.conclusion(folder)
        for path in entries:
            console().print(f"ledger: {path}")
    return 0
