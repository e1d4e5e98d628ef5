"""Scoring a split: every frame or symbol once, then every convention of `metrics`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from deeprnn.data.batching import EpochPlan, music_evaluation, text_evaluation
from deeprnn.data.music import MusicData
from deeprnn.data.text import TextData
from deeprnn.errors import UserError
from deeprnn.model import metrics
from deeprnn.model.models import SequenceModel, State
from deeprnn.model.scoring import StepNats
from deeprnn.training.flat import Layout
from deeprnn.training.ranks import Ranks
from deeprnn.training.recipe import EvaluationPart

Data = MusicData | TextData
TRAIN_STREAMS = 64
"""parallel streams for the training part of a text, which is long and decides nothing"""
MOST_LOGITS = 2**27
"""that a member computes at once (half a gigabyte): with ten thousand words a chunk must be short"""


def scorable(data: Data, split: str) -> bool:
    """Whether a split has something to predict: a frame, or a symbol that follows another."""
    return data.sizes.get(split, 0) >= (1 if data.kind == "music" else 2)


def visible(data: Data, part: EvaluationPart) -> Data:
    """The data that a run may see: all of it, or all but the test part, which then nothing can score."""
    if part.test or "test" not in data.splits:
        return data
    return replace(data, splits={name: split for name, split in data.splits.items() if name != "test"})


def evaluation_plan(data: Data, split: str, part: EvaluationPart) -> EpochPlan:
    """The batches that score a split exactly."""
    if isinstance(data, MusicData):
        return music_evaluation(data.splits[split], chunk=part.chunk, width=part.width)
    ids = data.splits[split]
    streams = part.streams if split != "train" or len(ids) < 10**5 else TRAIN_STREAMS
    chunk = min(part.chunk, max(1, MOST_LOGITS // (streams * data.size)))
    return text_evaluation(ids, chunk=chunk, streams=streams, warm_up=part.chunk if streams > 1 else 0)


Progress = Callable[[int, int], None]
"""told how many batches of all are done"""


@torch.no_grad()
def score(
    model: SequenceModel,
    parameters: Tensor,
    plan: EpochPlan,
    progress: Progress = lambda done, total: None,
    ranks: Ranks | None = None,
) -> np.ndarray:
    """Nats of every frame or symbol for P members with flat parameters (P, N): (P, frames).

    Of several `ranks` each scores some lanes; a text in one stream has one lane, which is the lead's.
    """
    device, P, ranks = parameters.device, len(parameters), ranks or Ranks()
    plan = plan.to(device).of_lanes(ranks.share(plan.lanes))
    views = {f"model.{name}": view for name, view in Layout.of(model).views(parameters).items()}
    together = device.type == "cuda" and P > 1
    groups = [views] if together else [{k: v[p] for k, v in views.items()} for p in range(P)]
    scores = plan.new_scores(P)
    training = model.training
    scored = StepNats(model)
    model.eval()  # cells with noise of their own have none here
    for number, named in enumerate(groups):
        state = None
        for index in range(len(plan)):
            x, y, _, reset = plan[index]
            if not plan.lanes:
                pass
            elif together:
                state = state or tuple(h.expand(P, *h.shape) for h in model.initial_state(plan.lanes))
                nats, state = vmap(_call, in_dims=(None, 0, None, None, 0, None))(
                    scored, named, x, y, state, reset
                )
                plan.record(scores, index, nats)
            else:
                nats, state = _call(scored, named, x, y, state, reset)
                plan.record(scores[number], index, nats)
            progress(number * len(plan) + index + 1, len(groups) * len(plan))
    model.train(training)
    return plan.collect(ranks.sum_(scores))


def _call(
    scored: StepNats, named: dict[str, Tensor], x: Tensor, y: Tensor, state: Any, reset: Tensor
) -> tuple[Tensor, State]:
    return functional_call(scored, named, (x, y, state, reset))


def summarise(data: Data, split: str, nats: np.ndarray) -> dict[str, float]:
    """All conventions for one member's scores (frames,) of a split."""
    if isinstance(data, MusicData):
        return metrics.summarise("music", nats, lengths=data.splits[split].lengths.tolist())
    return metrics.summarise(data.kind, nats, ids=data.splits[split], vocabulary=data.vocabulary)


def mean_nats(data: Data, nats: np.ndarray) -> float:
    """What validation compares: nats per scored frame or symbol."""
    return metrics.mean(float(nats.sum()), nats.size if data.kind == "music" else nats.size - 1)


def check_split(data: Data, split: str) -> None:
    """Refuse a split that the data has not, or that has nothing to score."""
    full = [name for name in data.splits if scorable(data, name)]
    if split not in full:
        raise UserError(
            f"{data.name} has no split {split!r}, or too little in it to score: it has {', '.join(full)}"
        )


def evaluate(
    model: SequenceModel,
    data: Data,
    split: str,
    part: EvaluationPart | None = None,
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """All conventions for a model with its own parameters."""
    check_split(data, split)
    parameters = Layout.of(model).pack([dict(model.named_parameters())], next(model.parameters()).device)
    plan = evaluation_plan(data, split, part or EvaluationPart())
    return summarise(data, split, score(model, parameters, plan, progress)[0])


def one_gram(data: MusicData, split: str = "test") -> float:
    """Nats per frame of the model without memory: each pitch sounds with its share of the training frames."""
    train, test = data.splits["train"], data.splits[split]
    # Half a frame is added to either side, so that a note never heard in training costs much, not everything.
    p = (train.counts() + 0.5) / (train.frames + 1.0)
    sounding = test.counts()
    nats = -(sounding * np.log(p) + (test.frames - sounding) * np.log1p(-p)).sum()
    return metrics.mean(float(nats), test.frames)
