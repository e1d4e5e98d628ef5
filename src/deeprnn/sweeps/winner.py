"""The winner of a sweep: chosen on validation, its recipe written out, and scored on test once, on the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.runs.checkpoint import load_best
from deeprnn.runs.locking import lock
from deeprnn.runs.run_files import now
from deeprnn.sweeps.folder import SWEEP, open_study
from deeprnn.sweeps.pack import trial_folder
from deeprnn.sweeps.run import Outcome, outcome_of
from deeprnn.sweeps.spec import Spec
from deeprnn.sweeps.study import Study, Trial, best
from deeprnn.training.evaluate import evaluate, scorable
from deeprnn.training.loading import load_data
from deeprnn.training.recipe import to_toml


def write_winner(spec: Spec, folder: Path, trials: list[Trial]) -> Path | None:
    """Write the best trial's recipe as winner.toml; None where no trial has come to its end."""
    first = best(trials, 1)
    if not first:
        return None
    path = folder / "winner.toml"
    write_atomically(path, to_toml(spec.recipe_at(first[0].point)))
    return path


def score_winner(spec: Spec, folder: Path, storage: str = "") -> tuple[dict[str, Any], Outcome]:
    """The winner's scores on test, and the sweep: computed at the first call, later ones repeat what was recorded.

    The record is the study's: of several sweeps that share it, the one that trained the winner scores it, and all read
    the same.
    """
    if not (folder / SWEEP).exists():
        raise UserError(f"{folder} holds no sweep: run one there first")
    with lock(folder):
        study = open_study(spec, folder, storage)
        with study.answering():
            record = study.score
            if record is None:
                chosen = _winner(study, folder)
                record = {
                    "trial": chosen.number,
                    "valid": chosen.value,
                    "scored": now(),
                    **_score(spec, folder, chosen),
                }
                study.record_score(record)
            outcome = outcome_of(study)
        write_json(folder / "winner.json", record)
        return record, outcome


def _winner(study: Study, folder: Path) -> Trial:
    """The trial that is best on validation, when all have ended and it is this folder's to score."""
    if not study.spec.recipe.evaluation.test:
        raise UserError(
            f"{folder}: the recipe says evaluation.test = false, so nothing of it is scored on test"
        )
    trials = study.trials()
    left = study.spec.trials - sum(t.state != "running" for t in trials)
    if left:
        raise UserError(
            f"{folder}: {left} of {study.spec.trials} trials have not ended; the test part is scored once, "
            "when all have"
        )
    chosen = best(trials, 1)
    if not chosen:
        raise UserError(f"{folder}: no trial came to its end, so there is no winner to score")
    if chosen[0].owner != study.owner:
        raise UserError(
            f"the winner, trial {chosen[0].number}, was trained by {chosen[0].place}: score it there"
        )
    return chosen[0]


def _score(spec: Spec, folder: Path, trial: Trial) -> dict[str, Any]:
    recipe = spec.recipe_at(trial.point)
    data = load_data(recipe.data)
    if not scorable(data, "test"):
        raise UserError(f"{data.name} has no test part to score")
    model_spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    scores = {}
    for seed in recipe.seeds:
        home = folder / trial_folder(trial.number, seed, len(recipe.seeds) > 1)
        model = SequenceModel(replace(model_spec))
        model.load_state_dict(load_best(home).tensors)
        scores[str(seed)] = evaluate(model.eval(), data, "test", recipe.evaluation)
    key = HEADLINE[data.kind].key
    test = sum(score[key] for score in scores.values()) / len(scores)
    return {"metric": HEADLINE[data.kind].name, "test": test, "seeds": scores}
