"""A model's score on what has no near-duplicate in the training part, beside its score on the whole."""

from __future__ import annotations

from deeprnn.data.audit import audit
from deeprnn.model import metrics
from deeprnn.model.models import SequenceModel
from deeprnn.training.evaluate import Data, evaluation_plan, score
from deeprnn.training.flat import Layout
from deeprnn.training.recipe import EvaluationPart


def evaluate_clean(
    model: SequenceModel, data: Data, split: str, part: EvaluationPart | None = None
) -> dict[str, float]:
    """The headline metric of the clean part, and how much of the split that is.

    Every frame or symbol is scored where it stands, its whole past included; a near-duplicate's are left out of sum and
    count. A text's first symbol has no score.
    """
    found = audit(data)
    keep = found.clean(split)
    parameters = Layout.of(model).pack([dict(model.named_parameters())], next(model.parameters()).device)
    nats = score(model, parameters, evaluation_plan(data, split, part or EvaluationPart()))[0]
    if data.kind != "music":
        keep[0] = False
    return {
        f"clean_{metrics.HEADLINE[data.kind].key}": metrics.headline(
            data.kind, float(nats[keep].sum()), int(keep.sum())
        ),
        "clean_symbols": int(keep.sum()),
        "near_duplicates": len(found.flagged(split)),
    }
