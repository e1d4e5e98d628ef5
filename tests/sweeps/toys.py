"""Sweeps of a second on made-up data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deeprnn.sweeps.engines import Engine
from deeprnn.sweeps.engines.local import LocalEngine
from deeprnn.sweeps.run import Outcome, Settings, run_sweep
from deeprnn.sweeps.spec import Spec, make_spec, recipe_text
from deeprnn.sweeps.study import Study, Trial
from deeprnn.training.recipe import Recipe, override
from tests.small_runs import text_file

BASE = {
    "data.level": "char",
    "data.chunk": 40,
    "data.lanes": 8,
    "model.hidden": [6],
    "stop.epochs": 3,
    "save.seconds": 0.0,
}


def spec(space: dict[str, Any] | None = None, overrides: dict[str, Any] | None = None, **tables: Any) -> Spec:
    recipe = override(Recipe(), {"data.name": str(text_file()), **BASE, **(overrides or {})})
    tables = {"trials": 6, "sampler": "random", "pruner": "none", **tables}
    return make_spec(recipe, {**tables, "space": space or {"optimiser.rate": "log:0.1..4"}})


def as_file(which: Spec, folder: Path) -> Path:
    """The sweep as a file for the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.toml").write_text(which.to_toml("mine-recipe.toml"))
    (folder / "mine-recipe.toml").write_text(recipe_text(which))
    return folder / "mine.toml"


class Quiet:
    """A view that remembers."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.remarks: list[str] = []

    def changed(self, study: Study, running: int) -> None:
        pass

    def ended(self, trial: Trial) -> None:
        self.trials.append(trial)

    def say(self, text: str) -> None:
        self.remarks.append(text)


def sweep(
    which: Spec, folder: Path, pack: int = 4, view: Quiet | None = None, received: Any = (), **options: Any
) -> Outcome:
    engine: Engine = options.pop("engine", None) or LocalEngine("cpu", 1)
    return run_sweep(which, Settings(folder, pack, **options), engine, view or Quiet(), received)
