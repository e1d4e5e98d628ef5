"""Dynamic evaluation: a model is scored on a text or on songs while it goes on learning from them.

Mikolov et al. (2010) did so with plain gradient steps; Krause et al. (2018) also let the parameters fall back, a little
after every step, to those of training. Rate and decay are settings like any other: `tuned` chooses them on the
validation part, and the part that is reported is scored once, with what was chosen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.func import functional_call

from deeprnn.data.batching import EpochPlan, music_chunks, text_chunks
from deeprnn.data.music import MusicData
from deeprnn.errors import UserError
from deeprnn.model import metrics
from deeprnn.model.models import SequenceModel
from deeprnn.model.scoring import StepNats
from deeprnn.training.evaluate import Data, Progress, check_split, summarise
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import DataPart, OptimiserPart, Recipe, SchedulePart
from deeprnn.training.schedule import Schedule
from deeprnn.training.updater import Updater

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""what `auto` tries: half a power of ten apart, about the rates that plain gradient steps are trained at"""


class Diverged(UserError):
    """A loss was NaN or infinite at a rate that is too high."""


class Trial(NamedTuple):
    """One setting, and its cost on the validation part in nats a frame or symbol; infinite where it diverged."""

    rate: float
    decay: float
    valid: float


def dynamic_evaluation(
    model: SequenceModel,
    data: Data,
    split: str,
    *,
    rate: float,
    decay: float = 0.0,
    chunk: int = 50,
    clip: float = 1.0,
    progress: Progress = lambda done, total: None,
) -> dict[str, float]:
    """Score a split while learning from it: each chunk is scored first, then takes a gradient step.

    Songs or symbols come in their own order, and the parameters adapt over the whole split. After each step they fall
    back to the model's own by the share `decay`. There is no dropout, and the model itself is left as it was.
    """
    check_split(data, split)
    _check(rate, decay)
    recipe = Recipe(
        data=DataPart(chunk=chunk),
        optimiser=OptimiserPart(rate=rate, clip=clip),
        schedule=SchedulePart(name="constant"),
    )
    device, training = next(model.parameters()).device, model.training
    plan = _plan(data, split, chunk).to(device)
    parameters = Layout.of(model).pack([dict(model.named_parameters())], device)
    trained = parameters.clone()
    updater = Updater(model, recipe, [0], parameters, Schedule(recipe, [rate], len(plan), device))
    scored, scores = StepNats(model), plan.new_scores()
    views = {f"model.{name}": view for name, view in updater.layout.views(updater.parameters[0]).items()}
    model.eval()
    try:
        for index in range(len(plan)):
            batch = plan[index]
            with torch.no_grad():
                state = tuple(h[0] for h in updater.state)
                nats, _ = functional_call(scored, views, (batch.x, batch.y, state, batch.reset))
                plan.record(scores, index, nats)
            updater.update([batch])
            if decay:
                updater.parameters.lerp_(trained, decay)
            progress(index + 1, len(plan))
    finally:
        model.train(training)
    if (step := int(updater.bad[0])) >= 0:
        raise Diverged(
            f"dynamic evaluation at rate {rate:g} met a NaN or infinite loss in chunk {step + 1} of {len(plan)}: "
            f"try a lower rate, for example --dynamic {rate / 4:g}"
        )
    return summarise(data, split, plan.collect(scores))


def tuned(
    model: SequenceModel,
    data: Data,
    rates: Sequence[float],
    decays: Sequence[float] = (0.0,),
    *,
    chunk: int = 50,
    progress: Callable[[int, int], Progress] = lambda trial, trials: lambda done, total: None,
) -> tuple[Trial, list[Trial]]:
    """The best rate and decay on the validation part, and all that were tried; no other part is looked at."""
    trials = []
    grid = list(itertools.product(rates, decays))
    for number, (rate, decay) in enumerate(grid, 1):
        shown = progress(number, len(grid))
        try:
            scores = dynamic_evaluation(
                model, data, "valid", rate=rate, decay=decay, chunk=chunk, progress=shown
            )
        except Diverged:
            trials.append(Trial(rate, decay, math.inf))
            continue
        trials.append(Trial(rate, decay, scores[metrics.HEADLINE[data.kind].key]))
    best = min(trials, key=lambda trial: trial.valid)
    if not math.isfinite(best.valid):
        raise UserError(
            f"dynamic evaluation diverged on the validation part at every rate tried: try rates below {min(rates):g}"
        )
    return best, trials


def _check(rate: float, decay: float) -> None:
    if not 0 < rate < math.inf:
        raise UserError(f"the rate of dynamic evaluation must be above zero and finite, got {rate}")
    if not 0 <= decay < 1:
        raise UserError(f"the decay of dynamic evaluation must be at least 0 and below 1, got {decay}")


def _plan(data: Data, split: str, chunk: int) -> EpochPlan:
    if isinstance(data, MusicData):
        return music_chunks(data.splits[split], chunk=chunk, shuffle=False)
    return text_chunks(data.splits[split], chunk=chunk)
