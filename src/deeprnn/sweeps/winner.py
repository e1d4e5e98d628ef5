"""The winner of a sweep: chosen on validation, its recipe written out, and scored on test once, on the record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError
from deeprnn.files import write_atomically, write_json
from deeprnn.model.metrics import HEADLINE
from deeprnn.model.models import SequenceModel
from deeprnn.runs.checkpoint import load_best
from deeprnn.runs.folder import now
from deeprnn.runs.locking import lock
from deeprnn.runs.reading import finite, read_json, table, text
from deeprnn.sweeps.pack import home_of
from deeprnn.sweeps.spec import Spec
from deeprnn.sweeps.study import Study, Trial, best
from deeprnn.training.evaluate import evaluate, scorable
from deeprnn.training.recipe import to_toml
from deeprnn.training.session import load_data

MOST_JSON = 2**20


def write_winner(spec: Spec, folder: Path, trials: list[Trial]) -> Path | None:
    """Write the best trial's recipe as winner.toml; None where no trial has come to its end."""
    first = best(trials, 1)
    if not first:
        return None
    path = folder / "winner.toml"
    write_atomically(path, to_toml(spec.recipe_at(first[0].point)))
    return path


def score_winner(spec: Spec, folder: Path, storage: str = "", device: str = "cpu") -> dict[str, Any]:
    """The winner's scores on test: computed at the first call, and given again from the record at every later one."""
    record = folder / "winner.json"
    if not (folder / "sweep.toml").exists():
        raise UserError(
            f"{folder} holds no sweep whose winner could be scored: let it run first, without --score-test"
        )
    with lock(folder):
        if record.exists():
            return read_record(record)
        trials = Study(spec, folder, storage).trials()
        left = spec.trials - sum(t.state != "running" for t in trials)
        if left:
            raise UserError(
                f"{folder}: {left} of {spec.trials} trials have not ended; the test part is scored once, when all have"
            )
        chosen = best(trials, 1)
        if not chosen:
            raise UserError(f"{folder}: no trial came to its end, so there is no winner to score")
        found = {
            "trial": chosen[0].number,
            "valid": chosen[0].value,
            "scored": now(),
            **_score(spec, folder, chosen[0]),
        }
        write_json(record, found)
        return found


def _score(spec: Spec, folder: Path, trial: Trial) -> dict[str, Any]:
    recipe = spec.recipe_at(trial.point)
    data = load_data(recipe.data)
    if not scorable(data, "test"):
        raise UserError(f"{data.name} has no test part to score")
    model_spec = recipe.model.spec(data.size, data.kind != "music", recipe.regulariser.dropout)
    scores = {}
    for seed in recipe.seeds:
        home = folder / home_of(trial.number, seed, len(recipe.seeds) > 1)
        model = SequenceModel(replace(model_spec))
        model.load_state_dict(load_best(home).tensors)
        scores[str(seed)] = evaluate(model.eval(), data, "test", recipe.evaluation)
    key = HEADLINE[data.kind].key
    test = sum(score[key] for score in scores.values()) / len(scores)
    return {"metric": HEADLINE[data.kind].name, "test": test, "seeds": scores}


def read_record(path: Path) -> dict[str, Any]:
    """What was recorded when the winner was scored."""
    told = "it holds no score"
    try:
        record = table(read_json(path, MOST_JSON))
        words, numbers = ("metric", "scored"), ("trial", "valid", "test")
        if all(text(record.get(w)) for w in words) and all(finite(record.get(n)) for n in numbers):
            return record
    except UserError as error:
        told = str(error)
    raise UserError(
        f"{path} is damaged ({told}): the winner has been scored once, and what it scored stood there; put it back, or "
        "remove it to score again, which is then no longer the first look at the test part"
    )
