"""Run a sweep in its folder, or go on with one; where there is nothing left to train, say how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deeprnn.errors import UserError
from deeprnn.runs.locking import lock
from deeprnn.sweeps.coordinator import Coordinator, Settings, SweepObserver
from deeprnn.sweeps.engines import Engine
from deeprnn.sweeps.folder import SWEEP, open_study, write_sweep
from deeprnn.sweeps.spec import Spec
from deeprnn.sweeps.storage import Store
from deeprnn.sweeps.study import Study, Trial
from deeprnn.training.loading import forget_data, load_data_once

__all__ = ["Outcome", "Settings", "SweepObserver", "default_pack", "outcome_of", "run_sweep"]


@dataclass
class Outcome:
    """How a sweep stands or ended."""

    finished: bool
    trials: list[Trial] = field(default_factory=list)
    importances: dict[str, float] = field(default_factory=dict)
    score: dict[str, Any] | None = None
    """of the winner on test, if that was asked for"""


def default_pack(device: str) -> int:
    """Models that train in lockstep: a GPU is hardly slower with sixteen; a CPU serves them one after the other."""
    return 16 if device.startswith("cuda") else 4


def run_sweep(
    spec: Spec, settings: Settings, engine: Engine, view: SweepObserver, received: Sequence[int] = ()
) -> Outcome:
    """Run or go on with a sweep in its folder, which this process holds meanwhile.

    One that has ended needs neither its data nor its engine any more.
    """
    if settings.pack < 1:
        raise UserError(f"--pack must be at least 1, got {settings.pack}")
    folder = settings.folder
    forget_data()  # files may have changed since another sweep of this process
    if not (folder / SWEEP).exists():
        load_data_once(spec.recipe.data)  # what cannot be read is an error before there is a folder
    with lock(folder):
        study = open_study(spec, folder, settings.storage)
        with study.answering():
            write_sweep(spec, folder)
            outcome = outcome_of(study)
            if outcome.finished:
                return outcome
            load_data_once(spec.recipe.data)
            store = Store(settings.store) if settings.store else None
            if store is not None:
                store.check()
            with engine:
                Coordinator(spec, settings, engine, study, store, view, received).run()
            return outcome_of(study)


def outcome_of(study: Study) -> Outcome:
    """How a sweep stands."""
    trials = study.trials()
    ended = all(t.state != "running" for t in trials) and len(trials) == study.spec.trials
    return Outcome(ended, trials, study.importances() if ended else {}, study.score)
