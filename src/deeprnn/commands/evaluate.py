"""`deeprnn evaluate`: a trained run scored on a split, in every convention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Evaluate:
    """Score a trained run's best parameters on a split."""

    run_folder: tyro.conf.Positional[Path]
    """a folder under runs/"""
    split: Literal["train", "valid", "test"] = "test"
    dynamic: float = 0.0
    """a rate above zero: dynamic evaluation, which learns from each chunk after scoring it"""
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
        from deeprnn.commands.train import set_threads
        from deeprnn.console import console, styled
        from deeprnn.errors import UserError
        from deeprnn.model import metrics
        from deeprnn.runs.folder import load_run
        from deeprnn.training.evaluate import dynamic_evaluation, evaluate
        from deeprnn.training.recipe import Recipe
        from deeprnn.training.session import load_data, pick_device

        set_threads(self.threads)
        found = load_run(self.run_folder)
        if not self.threads:
            set_threads(int(found.info.get("environment", {}).get("threads", 0)))
        recipe = Recipe.from_dict(found.recipe)
        if self.split == "test" and not recipe.evaluation.test:
            raise UserError(
                f"{found.path} was trained with evaluation.test=false, as runs of a search are: its test score stays "
                "unknown. Use --split valid, or train the settings you chose anew, without --no-test"
            )
        data = load_data(recipe.data)
        if data.kind != "music" and found.vocabulary != data.vocabulary:  # type: ignore[union-attr]
            raise UserError(
                f"{recipe.data.name} has changed since {found.path} was trained: its vocabulary differs"
            )
        if self.clean and (self.dynamic or self.split == "train"):
            raise UserError("--clean is for the validation and test parts, and not for dynamic evaluation")
        model = found.model().to(pick_device(self.device))
        with run_view.ScoringBar(f"scoring {self.split}") as progress:
            if self.dynamic:
                options = {"rate": self.dynamic, "chunk": self.chunk, "progress": progress}
                scores = dynamic_evaluation(model, data, self.split, **options)
            else:
                scores = evaluate(model, data, self.split, recipe.evaluation, progress)
        if self.clean:
            from deeprnn.training.clean import evaluate_clean

            scores |= evaluate_clean(model, data, self.split, recipe.evaluation)
        if self.json:
            how = {"dynamic": self.dynamic} if self.dynamic else {}
            print(json.dumps({"run": str(found.path), "split": self.split, **how, **scores}))
            return 0
        told = f" on {data.name}, {self.split}: {metrics.describe(scores)}"
        console().print(styled((str(found.path), "bold"), told))
        for name, value in scores.items():
            console().print(
                f"  {name:<34} {value:,.4f}" if isinstance(value, float) else f"  {name:<34} {value:,}"
            )
        if found.info.get("paper") is not None and self.split == "test":
            console().print(f"  {'the paper':<34} {found.info['paper']:g}")
        return 0
