"""Text for the page: symbols with their surprise and the model's alternatives, and its continuation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from deeprnn.data.text import word_symbols
from deeprnn.generation.generate import encode_primer, never, start_symbol, symbol_ids
from deeprnn.generation.sampling import Pick, stream, symbol_picker
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Fields, Refusal
from deeprnn.web.shelf import Loaded

ALTERNATIVES = 6
CHUNK = 12  # symbols between two looks at whether the client is still there
PART = 256  # symbols scored at once: a part's logits over 10,000 words are 10 MB
LARGEST = 10_000_000  # logits of one text: 40 MB


def score(loaded: Loaded, fields: Fields, limits: Limits) -> dict[str, Any]:
    """Every symbol of a text with the bits of surprise it was to the model, and what it would rather have seen."""
    symbols, ids = _encode(loaded, fields.text("text", 16 * limits.symbols), limits)
    tokens = _scored(loaded, symbols, ids)
    bits = [token["bits"] for token in tokens if token["bits"] is not None]
    mean = sum(bits) / len(bits) if bits else None
    return {
        "tokens": tokens,
        "mean": None if mean is None else round(mean, 4),
        "perplexity": None if mean is None else round(2.0 ** min(mean, 60.0), 2),
    }


def continuation(loaded: Loaded, fields: Fields, limits: Limits) -> Iterator[dict[str, Any]]:
    """The beginning scored, then symbols sampled one by one after it, the same as `deeprnn generate` would."""
    symbols, ids = _encode(loaded, fields.text("text", 16 * limits.symbols), limits)
    length = fields.whole("length", 1, limits.new_symbols, 200)
    temperature = fields.number("temperature", 0.0, 4.0, 0.8)
    top_k = fields.whole("top_k", 0, 100_000, 0) or None
    seed = fields.whole("seed", 0, 2**53, 0)
    primer = torch.tensor(ids or [start_symbol(loaded.vocabulary)])
    avoid = symbol_ids(never(loaded.vocabulary, loaded.kind), loaded.vocabulary)
    pick = _with_chances(symbol_picker(temperature, top_k, None, avoid))
    steps = stream(loaded.model, primer, length, 1, seed, 1, pick)
    return _chunks(loaded, symbols, ids, steps)


def _with_chances(pick: Pick) -> Pick:
    """Also tell the log-probabilities of the model itself, before temperature and top-k."""

    def pick_with_chances(logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pick(logits, u)[0], torch.log_softmax(logits[:1], 1)

    return pick_with_chances


def _chunks(
    loaded: Loaded, symbols: list[str], ids: list[int], steps: Iterator[tuple[np.ndarray, np.ndarray | None]]
) -> Iterator[dict[str, Any]]:
    yield {"given": _scored(loaded, symbols, ids)}
    while part := list(islice(steps, CHUNK)):
        drawn = [
            _token(loaded.vocabulary, int(n[0]), torch.from_numpy(q)[0]) for n, q in part if q is not None
        ]
        yield {"tokens": drawn}
    yield {"done": True}


def _encode(loaded: Loaded, text: str, limits: Limits) -> tuple[list[str], list[int]]:
    """The symbols as typed, and their ids."""
    kind = loaded.kind
    symbols = list(text) if kind == "char" else word_symbols(text)
    most = min(limits.symbols, LARGEST // len(loaded.vocabulary))
    if len(symbols) > most:
        what = "characters" if kind == "char" else "words"
        raise Refusal(422, f"the text has {len(symbols):,} {what}; at most {most:,} are read at once")
    return symbols, encode_primer(text, loaded.vocabulary, kind).tolist()


def _scored(loaded: Loaded, symbols: list[str], ids: list[int]) -> list[dict[str, Any]]:
    """Tokens with surprise; the first has none, for nothing came before it."""
    vocabulary, known = loaded.vocabulary, set(loaded.vocabulary)
    tokens: list[dict[str, Any]] = []
    state, last = None, torch.zeros(1, loaded.model.spec.output_size)
    with torch.inference_mode():
        for first in range(0, len(ids), PART):
            part = ids[first : first + PART]
            logits, state = loaded.model(torch.tensor(part)[:, None], state)
            log_p = torch.log_softmax(torch.cat([last, logits[:-1, 0]]), -1)
            last = logits[-1]
            for i, id in enumerate(part):
                token = _token(vocabulary, id, log_p[i]) if first + i else _first(vocabulary, id)
                if symbols[first + i] not in known:
                    token.update(t=symbols[first + i], unknown=True)
                tokens.append(token)
    return tokens


def _first(vocabulary: list[str], id: int) -> dict[str, Any]:
    return {"t": vocabulary[id], "bits": None, "alt": []}


def _token(vocabulary: list[str], id: int, log_p: torch.Tensor) -> dict[str, Any]:
    bits = -float(log_p[id]) / math.log(2)
    return {"t": vocabulary[id], "bits": round(bits, 3), "alt": _alternatives(vocabulary, log_p.exp())}


def _alternatives(vocabulary: list[str], p: torch.Tensor) -> list[tuple[str, float]]:
    best = p.topk(min(ALTERNATIVES, len(p)))
    return [
        (vocabulary[i], float(f"{q:.3g}"))
        for i, q in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
