"""The sweep's memory and its choice of trials: an Optuna study in a journal file or a database.

Every change is written before anything depends on it, so that a sweep that is killed at any moment finds each of its
trials again: finished ones as they ended, begun ones to be gone on with.
"""

from __future__ import annotations

import contextlib
import json
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.errors import UserError, need
from deeprnn.sweeps.samplers import make_pruner, make_sampler
from deeprnn.sweeps.space import Choice
from deeprnn.sweeps.spec import Spec
from deeprnn.sweeps.trial_storage import (
    JOURNAL,
    damage_explained,
    database_errors,
    first_line,
    is_url,
    open_storage,
    without_password,
)

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

NAME = "sweep"
NOBODY = {"name": "", "place": ""}
ABANDONED = timedelta(minutes=1)
"""after which a begun trial without an owner belongs to whoever finds it"""
TOO_MANY = "one more than the sweep has"
"""the reason of a trial that two sweeps asked for at once, as the last one"""


@dataclass(frozen=True)
class Trial:
    """A trial as the sweep sees it."""

    number: int
    point: dict[str, Any]
    state: str
    """running, complete, pruned or failed"""
    value: float | None
    """the best validation score so far"""
    curve: tuple[float, ...]
    """validation scores, epoch by epoch, the best so far"""
    reason: str
    seconds: float | None
    owner: str = ""
    """the sweep that trains it, where several share a study"""
    place: str = ""
    """that sweep's machine and folder"""


class Study:
    """The trials of one sweep, of which this process's folder owns some."""

    def __init__(self, spec: Spec, folder: Path, storage: str = "", owner: str = "") -> None:
        self.optuna = need("optuna", extra="sweep")
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=self.optuna.exceptions.ExperimentalWarning)
        self.spec, self.owner = spec, owner
        self.url = storage
        self.place = f"{socket.gethostname()}:{folder.absolute()}"
        self.storage, self._sync = open_storage(self.optuna, folder, storage)
        with self.answering(), damage_explained(storage or str(folder / JOURNAL)):
            self.study = self.optuna.create_study(
                storage=self.storage, study_name=NAME, direction="minimize", load_if_exists=True,
                pruner=make_pruner(self.optuna, spec.pruner),
            )  # fmt: skip
            self._check_search()
            begun = len(self.study.get_trials(deepcopy=False))
            self.study.sampler = make_sampler(self.optuna, spec, begun)
        self._reported: dict[int, int] = {}
        self._ended: dict[int, Trial] = {}
        """which change no more: a table of thousands is drawn twice a second"""

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A database that answers no more, as a sentence."""
        if not is_url(self.url):
            yield
            return
        try:
            yield
        except database_errors(self.optuna) as error:
            raise UserError(
                f"--storage {without_password(self.url)} answers no more ({first_line(error, self.url)}): what was "
                "trained is saved, and the same command goes on when it does"
            ) from error

    # ---- asking

    def ask(self, most: int) -> list[Trial]:
        """At most so many new trials, as long as the sweep has any left."""
        new = []
        while len(new) < most and self.left > 0:
            trial = self.study.ask()
            if (
                trial.number >= self.spec.trials
            ):  # another sweep of the same study took the last one meanwhile
                self.fail(trial.number, TOO_MANY)
                break
            self._claim(trial)
            new.append(self._suggested(trial))
        self._sync()
        return new

    @property
    def left(self) -> int:
        """Trials that nobody has begun."""
        return self.spec.trials - len(self.study.get_trials(deepcopy=False))

    @property
    def begun(self) -> int:
        """Trials that somebody has begun, whatever number the sweep has now."""
        trials = self.study.get_trials(deepcopy=False)
        return sum(trial.user_attrs.get("reason") != TOO_MANY for trial in trials)

    def unfinished(self) -> list[Trial]:
        """The trials that this folder has begun and not ended."""
        running, trials = self.optuna.trial.TrialState.RUNNING, []
        for frozen in self.study.get_trials(deepcopy=False, states=(running,)):
            owner = frozen.user_attrs.get("owner", NOBODY)["name"]
            forgotten = not owner and (
                not self.url or datetime.now() - (frozen.datetime_start or datetime.min) > ABANDONED
            )
            if owner == self.owner or forgotten:
                trial = self.optuna.trial.Trial(self.study, self._id(frozen.number))
                self._claim(trial)
                trials.append(self._suggested(trial))
        self._sync()
        return trials

    def previous_owner(self) -> str:
        """The name on trials of this very folder, whose own note of it is lost; empty where there are none."""
        owners = [t.user_attrs.get("owner", NOBODY) for t in self.study.get_trials(deepcopy=False)]
        return next((o["name"] for o in reversed(owners) if o["place"] == self.place), "")

    def _claim(self, trial: Any) -> None:
        trial.set_user_attr("owner", {"name": self.owner, "place": self.place})  # in one write

    def _suggested(self, trial: Any) -> Trial:
        """The trial with all its values; those that were drawn before a kill stay."""
        for name, dimension in self.spec.space.dimensions.items():
            if isinstance(dimension, Choice):  # lists as text: a storage keeps plain values only
                trial.suggest_categorical(name, [json.dumps(value) for value in dimension.options])
            elif dimension.whole:
                trial.suggest_int(name, int(dimension.low), int(dimension.high), log=dimension.log)
            else:
                trial.suggest_float(name, dimension.low, dimension.high, log=dimension.log)
        return self.trial(trial.number)

    # ---- writing down

    def report(self, number: int, epoch: int, value: float) -> bool:
        """A trial's score after an epoch; whether it is hopeless."""
        trial = self.optuna.trial.Trial(self.study, self._id(number))
        last = self._reported.get(number)
        if last is None:
            frozen = self.study.get_trials(deepcopy=False)[number]
            last = max(frozen.intermediate_values, default=0)
        if epoch > last:
            trial.report(value, epoch)
            self._reported[number] = epoch
        return trial.should_prune()

    def complete(self, number: int, value: float) -> None:
        """End a trial with its score."""
        self.study.tell(number, value, skip_if_finished=True)

    def prune(self, number: int) -> None:
        """End a hopeless trial."""
        self.study.tell(number, state=self.optuna.trial.TrialState.PRUNED, skip_if_finished=True)

    def fail(self, number: int, reason: str) -> None:
        """End a trial that went wrong."""
        self.storage.set_trial_user_attr(self._id(number), "reason", reason[:1000])
        self.study.tell(number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def record_score(self, record: Mapping[str, Any]) -> None:
        """The winner's score on test: from now on the search is over."""
        self.study.set_user_attr("winner", dict(record))

    # ---- reading

    @property
    def score(self) -> dict[str, Any] | None:
        """What was recorded when the winner was scored, here or by another sweep of the study."""
        return self.study.user_attrs.get("winner")

    def trials(self) -> list[Trial]:
        """All that have begun."""
        return [self._trial(t) for t in self.study.get_trials(deepcopy=False) if t.number < self.spec.trials]

    def trial(self, number: int) -> Trial:
        """The trial of a number."""
        return self._trial(self.study.get_trials(deepcopy=False)[number])

    def importances(self) -> dict[str, float]:
        """How much each field decides whether a trial is among the good ones; empty where too few have ended."""
        done = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.COMPLETE,))
        if len(done) < 4 or len(self.spec.space.dimensions) < 2:
            return {}
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        try:
            shares = self.optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # all scores are equal
            return {}
        return {name: float(share) for name, share in shares.items()}

    def _trial(self, frozen: FrozenTrial) -> Trial:
        if not frozen.state.is_finished():
            return self._from_optuna(frozen)
        if frozen.number not in self._ended:
            self._ended[frozen.number] = self._from_optuna(frozen)
        return self._ended[frozen.number]

    def _from_optuna(self, frozen: FrozenTrial) -> Trial:
        states = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed",
                  "WAITING": "running"}  # fmt: skip
        curve = _curve(frozen.intermediate_values)
        value = frozen.value if frozen.value is not None else min(curve, default=None)
        end, begin = frozen.datetime_complete, frozen.datetime_start
        seconds = (end - begin).total_seconds() if end and begin else None
        point = {
            name: self._value(name, value)
            for name, value in frozen.params.items()
            if name in self.spec.space.dimensions
        }
        reason, owner = str(frozen.user_attrs.get("reason", "")), frozen.user_attrs.get("owner", NOBODY)
        state = states[frozen.state.name]
        return Trial(
            frozen.number, point, state, value, curve, reason, seconds, owner["name"], owner["place"]
        )

    # ---- Optuna's words for ours

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(NAME)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    def _value(self, name: str, value: Any) -> Any:
        return json.loads(value) if isinstance(self.spec.space.dimensions[name], Choice) else value

    def _check_search(self) -> None:
        """Two sweeps may share a study where they search the same."""
        search = json.loads(json.dumps({**self.spec.space.to_plain(), "recipe": self.spec.recipe.to_dict()}))
        recorded = self.study.user_attrs.get("sweep")
        if recorded is None:
            self.study.set_user_attr("sweep", search)
        elif recorded != search:
            raise UserError(
                "the storage holds another sweep: its space or its recipe differs; use another one"
            )


def _curve(scores: Mapping[int, float]) -> tuple[float, ...]:
    """The best so far after every epoch; where one is missing, what was known before it, or first after it."""
    curve: list[float] = []
    for epoch in range(1, max(scores, default=0) + 1):
        before = curve[-1] if curve else scores[min(scores)]
        curve.append(float(scores.get(epoch, before)))
    return tuple(curve)


def best(trials: Sequence[Trial], count: int | None = None) -> list[Trial]:
    """Complete trials by their validation score, the lowest first."""
    ended = sorted((t for t in trials if t.state == "complete"), key=lambda t: (t.value, t.number))
    return ended if count is None else ended[:count]
