"""Which of Optuna's samplers and pruners a sweep's file means, and one of our own for grid and random search."""

from __future__ import annotations

import json
from typing import Any

from deeprnn.sweeps.space import Choice
from deeprnn.sweeps.spec import Pruner, Spec

STARTUP = 8
"""trials that end before the median is asked"""


def make_sampler(optuna: Any, spec: Spec, begun: int) -> Any:
    """The sampler of a sweep of which so many trials have begun."""
    if spec.sampler != "tpe":
        return _by_number(optuna, spec)
    # Another seed whenever it goes on: the same would draw again what it drew at first.
    seed = (spec.seed + begun) % 2**32
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def make_pruner(optuna: Any, name: Pruner) -> Any:
    """The pruner by its name in a sweep's file."""
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=2)
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3)
    return optuna.pruners.NopPruner()


def _by_number(optuna: Any, spec: Spec) -> Any:
    """A sampler whose values follow from a trial's number: the same after a kill, and for all who share a study."""

    class ByNumber(optuna.samplers.BaseSampler):
        def point(self, number: int) -> dict[str, Any]:
            if spec.sampler == "random":
                return spec.space.draw(spec.seed, number)
            return spec.space.grid_point(number % spec.space.grid_size)

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            value = self.point(trial.number)[param_name]
            return json.dumps(value) if isinstance(spec.space.dimensions[param_name], Choice) else value

    return ByNumber()
