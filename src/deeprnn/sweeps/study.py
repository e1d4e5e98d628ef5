"""The sweep's memory and its choice of trials: an Optuna study in a journal file or a database.

Every change is written before anything depends on it, so that a sweep that is killed at any moment finds each of its
trials again: finished ones as they ended, begun ones to be gone on with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.errors import UserError, need
from deeprnn.sweeps.space import Choice
from deeprnn.sweeps.spec import Spec

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

NAME = "sweep"
JOURNAL = "journal.log"
ABANDONED = timedelta(minutes=1)
"""after which a begun trial that nobody has put his name on belongs to whoever finds it"""
BEGINNING = b'{"op_code"'
"""of a journal"""
STARTUP = 8
"""trials that end before the median is asked"""
CONNECT = 5
"""seconds for a database to answer"""


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


class Study:
    """The trials of one sweep, of which this process's folder owns some."""

    def __init__(self, spec: Spec, folder: Path, storage: str = "", owner: str = "") -> None:
        self.optuna = need("optuna", extra="sweep")
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=self.optuna.exceptions.ExperimentalWarning)
        self.spec, self.owner = spec, owner
        self.shared = bool(storage)
        self.storage = self._backend(folder, storage)
        with _explained(storage or str(folder / JOURNAL)):
            self.study = self.optuna.create_study(
                storage=self.storage, study_name=NAME, direction="minimize", load_if_exists=True,
                pruner=self._pruner(),
            )  # fmt: skip
            self._check_same()
        self.study.sampler = self._sampler()
        self._reported: dict[int, int] = {}

    # ---- asking

    def ask(self, most: int) -> list[Trial]:
        """At most so many new trials, as long as the sweep has any left."""
        asked = []
        while len(asked) < most and self.left > 0:
            trial = self.study.ask()
            if (
                trial.number >= self.spec.trials
            ):  # another sweep of the same study took the last one meanwhile
                self.fail(trial.number, "one more than the sweep has")
                break
            trial.set_user_attr("owner", self.owner)
            asked.append(self._suggested(trial))
        return asked

    @property
    def left(self) -> int:
        """Trials that nobody has begun."""
        return self.spec.trials - len(self.study.get_trials(deepcopy=False))

    def unfinished(self) -> list[Trial]:
        """The trials that this folder has begun and not ended."""
        states, found = self.optuna.trial.TrialState, []
        for frozen in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            owner = frozen.user_attrs.get("owner", "")
            began = frozen.datetime_start or datetime.min
            forgotten = not owner and datetime.now() - began > ABANDONED
            if owner == self.owner or forgotten or not self.shared:
                trial = self.optuna.trial.Trial(self.study, self._id(frozen.number))
                trial.set_user_attr("owner", self.owner)
                found.append(self._suggested(trial))
        return found

    def _suggested(self, trial: Any) -> Trial:
        """The trial with all its values; those that were drawn before a kill stay."""
        for name, dimension in self.spec.space.dimensions.items():
            if isinstance(dimension, Choice):  # lists as text: a storage keeps plain values only
                trial.suggest_categorical(name, [json.dumps(value) for value in dimension.options])
            elif dimension.whole:
                trial.suggest_int(name, int(dimension.low), int(dimension.high), log=dimension.log)
            else:
                trial.suggest_float(name, dimension.low, dimension.high, log=dimension.log)
        return self._trial(self.study.get_trials(deepcopy=False)[trial.number])

    # ---- telling

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
        """A trial that came to its end."""
        self.study.tell(number, value, skip_if_finished=True)

    def prune(self, number: int) -> None:
        """A hopeless one."""
        self.study.tell(number, state=self.optuna.trial.TrialState.PRUNED, skip_if_finished=True)

    def fail(self, number: int, reason: str) -> None:
        """One that went wrong."""
        self.storage.set_trial_user_attr(self._id(number), "reason", reason[:1000])
        self.study.tell(number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)

    # ---- looking

    def trials(self) -> list[Trial]:
        """All of them."""
        return [self._trial(t) for t in self.study.get_trials(deepcopy=False) if t.number < self.spec.trials]

    def importances(self) -> dict[str, float]:
        """How much each field decides whether a trial is among the good ones; empty where too few have ended."""
        done = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.COMPLETE,))
        if len(done) < 4 or len(self.spec.space.dimensions) < 2:
            return {}
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        try:
            found = self.optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        except (RuntimeError, ValueError):  # all scores are equal
            return {}
        return {name: float(share) for name, share in found.items()}

    def _trial(self, frozen: FrozenTrial) -> Trial:
        states = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed",
                  "WAITING": "running"}  # fmt: skip
        curve = tuple(float(v) for _, v in sorted(frozen.intermediate_values.items()))
        value = frozen.value if frozen.value is not None else min(curve, default=None)
        end, begin = frozen.datetime_complete, frozen.datetime_start
        seconds = (end - begin).total_seconds() if end and begin else None
        point = {
            name: self._value(name, value)
            for name, value in frozen.params.items()
            if name in self.spec.space.dimensions
        }
        reason = str(frozen.user_attrs.get("reason", ""))
        return Trial(frozen.number, point, states[frozen.state.name], value, curve, reason, seconds)

    # ---- Optuna's words for ours

    def _id(self, number: int) -> int:
        study = self.storage.get_study_id_from_name(NAME)
        return self.storage.get_trial_id_from_study_id_trial_number(study, number)

    def _value(self, name: str, value: Any) -> Any:
        return json.loads(value) if isinstance(self.spec.space.dimensions[name], Choice) else value

    def _sampler(self) -> Any:
        if self.spec.sampler != "tpe":
            return _numbered(self.optuna, self.spec)
        # Another seed whenever it goes on: the same would draw again what it drew at first.
        seed = (self.spec.seed + len(self.study.get_trials(deepcopy=False))) % 2**32
        return self.optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)

    def _pruner(self) -> Any:
        pruners = self.optuna.pruners
        if self.spec.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=2)
        if self.spec.pruner == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3)
        return pruners.NopPruner()

    def _check_same(self) -> None:
        """Two sweeps may share a study where they search the same."""
        mine = json.loads(json.dumps({**self.spec.space.to_plain(), "recipe": self.spec.recipe.to_dict()}))
        theirs = self.study.user_attrs.get("sweep")
        if theirs is None:
            self.study.set_user_attr("sweep", mine)
        elif theirs != mine:
            raise UserError(
                "the storage holds another sweep: its space or its recipe differs; use another one"
            )

    def _backend(self, folder: Path, storage: str) -> Any:
        if "://" in storage:
            return _database(self.optuna, storage)
        path = Path(storage) if storage else folder / JOURNAL
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _file_lock(path)
            _check_journal(path)
            with contextlib.ExitStack() as held:
                lock.acquire()
                held.callback(lock.release)
                _cut_torn_line(path)
            backend = self.optuna.storages.journal.JournalFileBackend(str(path), lock_obj=lock)
            with _explained(str(path)):
                return self.optuna.storages.JournalStorage(backend)
        except OSError as error:
            raise UserError(
                f"{path} cannot be used as a journal ({error.strerror}): choose another --storage"
            ) from None


def _numbered(optuna: Any, spec: Spec) -> Any:
    """A sampler whose values follow from a trial's number: the same after a kill, and for all who share a study."""

    class Numbered(optuna.samplers.BaseSampler):
        @cached_property
        def grid(self) -> list[dict[str, Any]]:
            return list(spec.space.grid())

        def point(self, number: int) -> dict[str, Any]:
            if spec.sampler == "random":
                return spec.space.draw(spec.seed, number)
            return self.grid[number % len(self.grid)]

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            value = self.point(trial.number)[param_name]
            return json.dumps(value) if isinstance(spec.space.dimensions[param_name], Choice) else value

    return Numbered()


def _file_lock(path: Path) -> Any:
    """A lock beside the journal that the system takes back from a process that dies."""
    import fcntl

    class FileLock:
        def acquire(self) -> bool:
            self.handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self.handle, fcntl.LOCK_EX)
            return True

        def release(self) -> None:
            os.close(self.handle)

    return FileLock()


def _check_journal(path: Path) -> None:
    """Refuse a file that was never a journal, before anything is written beside it or into it."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file, and cannot be a journal: choose another --storage")
    if path.exists():
        with open(path, "rb") as file:
            content = file.read(len(BEGINNING))
        if not BEGINNING.startswith(content):
            raise UserError(f"{path} is no journal of a sweep: move it away, or choose another --storage")


def _cut_torn_line(path: Path) -> None:
    """Take away what a loss of power or a full disk left of a line; nobody has acted on it yet."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _database(optuna: Any, url: str) -> Any:
    """A storage behind a URL; one that does not answer is an error within seconds."""
    options: dict[str, Any] = {}
    if url.startswith(("postgresql", "mysql")):
        options["connect_args"] = {"connect_timeout": CONNECT}
    try:
        return optuna.storages.get_storage(optuna.storages.RDBStorage(url, engine_kwargs=options))
    except ImportError as error:
        raise UserError(
            f"--storage {_without_password(url)}: its driver is not installed ({error}): pip install psycopg2-binary"
        ) from None
    except (optuna.exceptions.StorageInternalError, *_sql_errors()) as error:
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(f"--storage {_without_password(url)} cannot be used: {first}") from None


def _sql_errors() -> tuple[type[Exception], ...]:
    return (need("sqlalchemy.exc", extra="sweep").SQLAlchemyError, ValueError, OSError)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """A journal that was damaged, as a sentence."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{_without_password(what)}: {error}") from None
    except (ValueError, KeyError, AssertionError, TypeError, AttributeError) as error:
        raise UserError(
            f"{_without_password(what)} is no journal of a sweep, or is damaged ({error}): move it away, or choose "
            "another folder"
        ) from None


def best(trials: Sequence[Trial], count: int | None = None) -> list[Trial]:
    """Complete trials by their validation score, the lowest first."""
    ended = sorted((t for t in trials if t.state == "complete"), key=lambda t: (t.value, t.number))
    return ended if count is None else ended[:count]
