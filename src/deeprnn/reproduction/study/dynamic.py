"""Dynamic evaluation of a study's final runs where a goal asks for it: a rate chosen on validation, test scored once.

It needs the parameters of the runs, so it goes by their folders, as soon as a run has ended: on a borrowed machine
nobody knows how long they stay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from deeprnn.errors import UserError
from deeprnn.files import write_json
from deeprnn.reproduction.entries import Entry
from deeprnn.reproduction.identity import identity
from deeprnn.reproduction.job import Say
from deeprnn.reproduction.plan import find_member
from deeprnn.reproduction.runner import Settings
from deeprnn.reproduction.study.analysis import results
from deeprnn.reproduction.study.jobs import Runs
from deeprnn.reproduction.study.plan_file import Study
from deeprnn.runs.folder import Run
from deeprnn.training.dynamic import RATES, dynamic_evaluation, tuned
from deeprnn.training.loading import load_data_once

FILE = "dynamic.json"


def read_dynamic(ledger: Path) -> dict[str, dict[str, float]]:
    """Rate, decay and scores by the file name of a run's entry."""
    path = ledger / FILE
    if not path.exists():
        return {}
    try:
        return {row["entry"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no dynamic scores: {error!r:.80}; remove it to score again") from None


def unscored(study: Study, runs: Runs, ledger: Path) -> list[Entry]:
    """Final runs in rows with such a goal that are not scored yet."""
    rows = {(goal.family, goal.data) for goal in study.goals if goal.dynamic}
    if not rows:
        return []
    known = read_dynamic(ledger)
    scores = [s for s in results(study, runs).scores if (s.contender.family, s.data) in rows]
    return [entry for score in scores for entry in score.entries if entry.path.name not in known]


def score_dynamic(
    study: Study, runs: Runs, settings: Settings, ledger: Path, say: Say, over: Callable[[], bool]
) -> int:
    """Score what is wanted and whose folder is here, until the time is over; how many are left."""
    entries = unscored(study, runs, ledger)
    for entry in list(entries):
        home = find_member(settings.root, identity(entry.recipe), entry.seed)
        if home is None:
            say(f"{entry.path.name}: its run folder is not in {settings.root}: no dynamic evaluation")
            continue
        if over():
            break
        began, data = time.monotonic(), load_data_once(entry.recipe.data)
        model = Run(home).model().to(settings.device)
        best, _ = tuned(model, data, RATES, chunk=entry.recipe.data.chunk)
        options = {"rate": best.rate, "decay": best.decay, "chunk": entry.recipe.data.chunk}
        test = dynamic_evaluation(model, data, "test", **options)
        row = {"entry": entry.path.name, **options, "valid": best.valid, "test": test}
        write_json(ledger / FILE, [*read_dynamic(ledger).values(), row])
        entries.remove(entry)
        say(
            f"{entry.path.name}: dynamic evaluation at rate {best.rate:g} in {time.monotonic() - began:.0f} s"
        )
    return len(entries)
