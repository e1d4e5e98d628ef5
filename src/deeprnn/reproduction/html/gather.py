"""What a report tells about runs: results in groups of seeds, predictions on a test piece, samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deeprnn.errors import UserError
from deeprnn.model.structure import dissect

if TYPE_CHECKING:
    from deeprnn.generation.outputs import Music, Text
    from deeprnn.model.specs import ModelSpec
    from deeprnn.runs.folder import Run

SHOWN_FRAMES, SHOWN_SYMBOLS = 128, 400


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    data: str
    kind: str
    label: str
    metric: str
    paper: float | None
    spec: ModelSpec
    runs: tuple[Run, ...]

    @property
    def task(self) -> tuple[str, str]:
        """What makes results comparable: the data, and how it is read."""
        return self.data, self.kind

    @property
    def weights(self) -> int:
        """Entries of the weight matrices, as the paper counts parameters."""
        return dissect(self.spec).weights

    @property
    def parameters(self) -> int:
        """Everything learned."""
        return dissect(self.spec).parameters

    @property
    def best(self) -> Run:
        """The run with the lowest validation score."""
        return min(self.runs, key=lambda run: math.inf if (v := score(run, "valid")) is None else v)

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader must know of some of the runs: 1 of 5 cut off by time."""
        from deeprnn.runs.summary import summary

        marks = [mark for run in self.runs for mark in summary(run)["marks"]]
        return tuple(f"{marks.count(mark)} of {len(self.runs)} {mark}" for mark in dict.fromkeys(marks))

    def mean(self, split: str) -> tuple[float, float] | None:
        """Mean and standard deviation over seeds; the deviation of one run is 0."""
        values = [v for run in self.runs if (v := score(run, split)) is not None]
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def collect(paths: Sequence[str | Path]) -> list[Run]:
    """The runs of some folders; a population stands for all its members."""
    from deeprnn.runs.folder import load_run, population

    runs: list[Run] = []
    for path in map(Path, paths):
        many = (path / "population.json").exists() and not (path / "run.json").exists()
        runs += population(path) if many else [load_run(path)]
    return runs


def groups(runs: Sequence[Run]) -> list[Group]:
    """Runs by data and model, smaller models first."""
    alike_by_model: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike_by_model.setdefault(
            (run.info["data"]["name"], run.kind, run.info.get("label", ""), run.spec), []
        ).append(run)
    made = [
        Group(
            data, kind, label, alike[0].info.get("metric", ""), alike[0].info.get("paper"), spec, tuple(alike)
        )
        for (data, kind, label, spec), alike in alike_by_model.items()
    ]
    return sorted(made, key=lambda g: (g.task, g.weights, g.label))


def score(run: Run, split: str) -> float | None:
    """A split's headline number; while a run has no result, the best so far."""
    from deeprnn.runs.summary import summary

    return summary(run)[split]


@dataclass(frozen=True)
class PiecePrediction:
    """A test piece, what the model expected of every frame, and how surprised it was."""

    name: str
    frames: np.ndarray  # (T, K)
    probabilities: np.ndarray  # (T, K)
    surprise: np.ndarray  # (T,) nats
    chain: bool = False
    """each note's probability is the one given the notes below it in the frame"""


@dataclass(frozen=True)
class TextPrediction:
    """A test passage, each symbol with its surprise in bits and the model's favourites."""

    symbols: list[str]
    surprise: list[float]
    favourites: list[list[tuple[str, float]]]


def predict(run: Run) -> PiecePrediction | TextPrediction | str:
    """The model over a piece of the test split, or why there is none to show."""
    from deeprnn.generation.primers import run_data

    try:
        data = run_data(run)
    except (UserError, OSError) as error:
        return f"The data is not here, so that no test piece can be shown ({error})."
    split = "test" if "test" in data.splits and len(data.splits["test"]) else "valid"
    try:
        model = run.model()
    except UserError as error:
        return f"There is no trained model to ask yet ({error})."
    if run.kind == "music":
        names = getattr(data, "names", {}).get(split) or [f"{split} piece 1"]
        return _predict_piece(model, np.asarray(data.splits[split][0])[:SHOWN_FRAMES], names[0])
    return _predict_text(
        model, np.asarray(data.splits[split][: SHOWN_SYMBOLS + 1]), list(run.vocabulary or ())
    )


def _predict_piece(model: Any, frames: np.ndarray, name: str) -> PiecePrediction:
    import torch

    from deeprnn.model.scoring import nats, note_logits

    x = np.concatenate([np.zeros_like(frames[:1]), frames[:-1]])
    with torch.inference_mode():
        out, _ = model(torch.from_numpy(x).float().unsqueeze(1))
        target = torch.from_numpy(frames).float()
        p = torch.sigmoid(note_logits(model, out[:, 0], target))
        chain = model.spec.output == "nade"
        return PiecePrediction(name, frames, p.numpy(), nats(model, out[:, 0], target).numpy(), chain)


def _predict_text(model: Any, ids: np.ndarray, vocabulary: list[str]) -> TextPrediction:
    import torch

    x = torch.from_numpy(ids.astype(np.int64))
    with torch.inference_mode():
        logits, _ = model(x[:-1].unsqueeze(1))
        log_p = torch.log_softmax(logits[:, 0], 1)
        surprise = (-log_p.gather(1, x[1:].unsqueeze(1))[:, 0] / math.log(2)).tolist()
        top = log_p.topk(min(4, log_p.shape[1]), dim=1)
    favourites = [
        [(vocabulary[i], math.exp(p)) for i, p in zip(row, chances, strict=True)]
        for row, chances in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return TextPrediction([vocabulary[i] for i in ids[1:]], surprise, favourites)


def sample(run: Run, seed: int = 1) -> Music | Text | str:
    """A short sample, or why there is none."""
    from deeprnn.generation import generate

    steps = run.grid.steps_per_beat if run.grid else 4
    length = 32 * steps if run.kind == "music" else 400 if run.kind == "char" else 80
    try:
        return generate.from_run(run, seed=seed, length=length)
    except UserError as error:
        return f"There is no trained model to sample from yet ({error})."
