"""What the page tells of a run's files: every value of a known type and a bounded length, whoever wrote them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from deeprnn.model.specs import ModelSpec
from deeprnn.runs.reading import number, table, text

MOST_ROWS = 50_000  # lines of metrics.jsonl that are read
LONGEST_TAG, MOST_TAGS = 30, 12
LONGEST_MODEL = 20_000  # characters of a model's description
ROW_KEYS = ("epoch", "step", "seconds", "train", "valid", "rate", "grad_norm", "clipped", "frames_per_second")


def spec_of(info: Mapping[str, Any], most_layers: int) -> ModelSpec | None:
    """The model that run.json describes; None where it describes none, or one of more layers than that."""
    model = info.get("model")
    if not isinstance(model, dict) or len(json.dumps(model)) > LONGEST_MODEL:
        return None
    try:
        spec = ModelSpec.from_dict(model)
    except (TypeError, AttributeError, ValueError, OverflowError):  # written by another version, or by hand
        return None
    layers = sum(level.depth + len(level.input_mlp_sizes) for level in spec.levels) + len(spec.predict.sizes)
    return spec if layers <= most_layers else None


def clean_tags(value: Any) -> list[str]:
    """The tags of a list that are such: short, printable, each once."""
    words = value if isinstance(value, list) else []
    valid = [w for w in words if isinstance(w, str) and 0 < len(w) <= LONGEST_TAG and _is_tag(w)]
    return list(dict.fromkeys(valid))[:MOST_TAGS]


def _is_tag(word: str) -> bool:
    return word.isprintable() and word == word.strip() and "," not in word


def parse_rows(content: bytes) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; what is none of an epoch's is left out."""
    lines = islice(io.BytesIO(content), MOST_ROWS)
    return [row for line in lines if (row := parse_row(line)) is not None]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl, None where it is torn; of its known fields, null for what is no finite number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return {k: number(row[k]) for k in ROW_KEYS if k in row} if isinstance(row, dict) else None


def scalars(value: Any) -> dict[str, Any]:
    """The strings and numbers of a JSON object, 100 at most."""
    pairs = ((text(k), text(v) or number(v)) for k, v in islice(table(value).items(), 100))
    return {k: v for k, v in pairs if v is not None}
