"""A model's score on what does not stand in the training part too, beside its score on the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from deeprnn.data.audit import audit
from deeprnn.model import metrics
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.training.evaluate import Data, evaluation_plan, score
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import EvaluationPart

WHOLE, CLEAN, NEW_MELODY = "whole", "clean", "new_melody"


class SplitSubset(NamedTuple):
    """Some frames or symbols of a split."""

    keep: np.ndarray  # (symbols,) bool
    left_out: int
    """songs, or lines of a text, that are not in it"""


class PartScore(NamedTuple):
    """The headline metric of a part, and of how many frames or symbols."""

    value: float
    symbols: int


def clean_parts(data: Data, split: str) -> dict[str, SplitSubset]:
    """`clean`: what has no near-duplicate in the training part; of songs also those with a melody of their own.

    Takes seconds for songs and up to a minute for a text.
    """
    overlap = audit(data)
    parts = {CLEAN: SplitSubset(overlap.clean(split), len(overlap.flagged(split)))}
    if data.kind == "music":
        left_out = len(overlap.same_melody(split))
        parts[NEW_MELODY] = SplitSubset(overlap.clean(split, melodies=True), left_out)
    return parts


def score_parts(
    model: SequenceModel, data: Data, split: str, how: EvaluationPart, parts: Mapping[str, SplitSubset]
) -> dict[str, PartScore]:
    """Score a split once, and sum it for the whole and for each part.

    Every frame or symbol is scored where it stands, its whole past included; what is not in a part is left out of its
    sum and count. A text's first symbol has no score.
    """
    parameters = Layout.of(model).pack([dict(model.named_parameters())], next(model.parameters()).device)
    nats = score(model, parameters, evaluation_plan(data, split, how))[0]
    scored = np.ones(len(nats), bool)
    scored[0] = data.kind == "music"
    chosen = {WHOLE: scored} | {name: scored & part.keep for name, part in parts.items()}
    return {
        name: PartScore(
            metrics.headline(data.kind, float(nats[rows].sum()), int(rows.sum())), int(rows.sum())
        )
        for name, rows in chosen.items()
    }


def evaluate_clean(
    model: SequenceModel, data: Data, split: str, how: EvaluationPart | None = None
) -> dict[str, float]:
    """The headline metric of the parts, and how much of the split they are."""
    parts = clean_parts(data, split)
    scores = score_parts(model, data, split, how or EvaluationPart(), parts)
    key = metrics.HEADLINE[data.kind].key
    names = {CLEAN: "near_duplicates", NEW_MELODY: "same_melodies"}
    out: dict[str, float] = {}
    for name, part in parts.items():
        out |= {f"{name}_{key}": scores[name].value, f"{name}_symbols": scores[name].symbols}
        out[names[name]] = part.left_out
    return out
