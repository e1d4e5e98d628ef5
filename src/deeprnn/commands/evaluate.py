"""`deeprnn evaluate`: a trained run scored on a split, in every convention."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from deeprnn.commands.training import set_threads
from deeprnn.errors import UserError

if TYPE_CHECKING:
    from deeprnn.model.sequence_model import SequenceModel
    from deeprnn.runs.folder import Run
    from deeprnn.training.evaluate import Data, Progress
    from deeprnn.training.recipe import Recipe


@dataclass(frozen=True)
class Evaluate:
    """Score a trained run's best parameters on a split.

    `deeprnn evaluate RUN --dynamic auto` learns from each chunk after scoring it, at a rate chosen on the validation
    part; `--dynamic 0.01,0.1` chooses among these, `--dynamic 0.1` takes that one.
    """

    run_folder: tyro.conf.Positional[Path]
    """a folder under runs/"""
    split: Literal["train", "valid", "test"] = "test"
    dynamic: str = ""
    """a rate, several, or auto: dynamic evaluation, which learns from each chunk after scoring it"""
    decay: str = ""
    """dynamic: share, or several, by which the parameters fall back to the trained ones after each update (0)"""
    chunk: int = 50
    """dynamic: steps between two updates"""
    clean: bool = False
    """also without the pieces that have a near-duplicate in the training part (`deeprnn data audit`)"""
    device: str = "auto"
    """auto, cpu or cuda"""
    threads: int = 0
    """CPU threads; 0: as many as the run was trained with"""
    json: bool = False
    """print one JSON document, and nothing else"""

    def run(self) -> int:
        """Score and print."""
        import json

        from deeprnn.commands import run_view
        from deeprnn.runs.folder import load_run
        from deeprnn.training.evaluate import evaluate
        from deeprnn.training.loading import load_data, pick_device
        from deeprnn.training.recipe import Recipe

        set_threads(self.threads)
        trained = load_run(self.run_folder)
        recipe = Recipe.from_dict(trained.recipe)
        self._check(trained, recipe)
        if not self.threads:
            set_threads(int(trained.info.get("environment", {}).get("threads", 0)))
        data = load_data(recipe.data)
        if data.kind != "music" and trained.vocabulary != data.vocabulary:  # type: ignore[union-attr]
            raise UserError(
                f"{recipe.data.name} has changed since {trained.path} was trained: its vocabulary differs"
            )
        model = trained.model().to(pick_device(self.device))
        how: dict[str, Any] = {}
        if self.dynamic:
            scores, how = self._dynamic(model, data)
        else:
            with run_view.ScoringBar(f"scoring {self.split}") as progress:
                scores = evaluate(model, data, self.split, recipe.evaluation, progress)
        if self.clean:
            from deeprnn.training.clean import evaluate_clean

            scores |= evaluate_clean(model, data, self.split, recipe.evaluation)
        if self.json:
            print(json.dumps({"run": str(trained.path), "split": self.split, **how, **scores}))
        else:
            self._show(trained, data.name, scores, how)
        return 0

    def _check(self, trained: Run, recipe: Recipe) -> None:
        """Refuse options that do not fit each other or the run."""
        if self.split == "test" and not recipe.evaluation.test:
            raise UserError(
                f"{trained.path} was trained with evaluation.test=false, as runs of a search are: its test score stays "
                "unknown. Use --split valid, or train the settings you chose anew, without --no-test"
            )
        if self.clean and (self.dynamic or self.split == "train"):
            raise UserError("--clean is for the validation and test parts, and not for dynamic evaluation")
        if self.decay and not self.dynamic:
            raise UserError(f"--decay {self.decay} is for dynamic evaluation: give --dynamic too")

    def _show(self, trained: Run, data: str, scores: dict[str, float], how: dict[str, Any]) -> None:
        """The scores for a person, how they were made, and the paper's."""
        from deeprnn.console import console, styled
        from deeprnn.model import metrics

        out = console()
        out.print(
            styled((str(trained.path), "bold"), f" on {data}, {self.split}: {metrics.describe(scores)}")
        )
        for name, value in scores.items():
            out.print(f"  {name:<34} {value:,.4f}" if isinstance(value, float) else f"  {name:<34} {value:,}")
        for trial in how.pop("tried_on_valid", ()):
            cost = "diverged" if trial["valid"] is None else f"{trial['valid']:,.4f}"
            out.print(f"  valid at rate {trial['rate']:g}, decay {trial['decay']:g}: {cost}")
        for name, value in how.items():
            out.print(f"  {name:<34} {value:g}")
        if trained.info.get("paper") is not None and self.split == "test":
            out.print(f"  {'the paper':<34} {trained.info['paper']:g}")

    def _dynamic(self, model: SequenceModel, data: Data) -> tuple[dict[str, float], dict[str, Any]]:
        """Scores with the rate and decay that validation prefers, and how they were found."""
        from deeprnn.commands.run_view import ScoringBar
        from deeprnn.training.dynamic import RATES, dynamic_evaluation, tuned

        rates = RATES if self.dynamic == "auto" else _numbers("--dynamic", self.dynamic)
        decays = _numbers("--decay", self.decay) if self.decay else (0.0,)
        how: dict[str, Any] = {"dynamic": rates[0], "decay": decays[0], "chunk": self.chunk}
        if len(rates) * len(decays) > 1:
            with contextlib.ExitStack() as stack:

                def each(trial: int, trials: int) -> Progress:
                    stack.close()
                    return stack.enter_context(ScoringBar(f"trying rates on valid, {trial} of {trials}"))

                best, trials = tuned(model, data, rates, decays, chunk=self.chunk, progress=each)
            tried = [{"rate": t.rate, "decay": t.decay, "valid": t.valid if t.valid < math.inf else None}
                     for t in trials]  # fmt: skip
            how |= {"dynamic": best.rate, "decay": best.decay, "tried_on_valid": tried}
        with ScoringBar(f"scoring {self.split}, learning at {how['dynamic']:g}") as progress:
            options = {"rate": how["dynamic"], "decay": how["decay"], "chunk": self.chunk}
            return dynamic_evaluation(model, data, self.split, progress=progress, **options), how


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """One number or several with commas between."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        also = ", or auto" if option == "--dynamic" else ""
        raise UserError(f"{option} {text!r}: a number is expected, or several as in 0.01,0.1{also}") from None
    return numbers
