"""Text for the page: symbols with their surprise and the model's alternatives, and its continuation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from deeprnn.data.text import END, UNKNOWN, TextData, word_symbols
from deeprnn.web.limits import Limits
from deeprnn.web.refusals import Fields, Refusal
from deeprnn.web.shelf import Loaded

ALTERNATIVES = 6
CHUNK = 12  # symbols between two looks at whether the client is still there
PART = 256  # symbols read at once: a part's logits over 10,000 words are 10 MB


def score(loaded: Loaded, fields: Fields, limits: Limits) -> dict[str, Any]:
    """Every symbol of a text with the bits of surprise it was to the model, and what it would rather have seen."""
    symbols, ids = _encode(loaded, fields.text("text", 16 * limits.symbols), limits)
    tokens, _, _ = _scored(loaded, symbols, ids)
    bits = [token["bits"] for token in tokens if token["bits"] is not None]
    mean = sum(bits) / len(bits) if bits else None
    return {
        "tokens": tokens,
        "mean": None if mean is None else round(mean, 4),
        "perplexity": None if mean is None else round(2.0 ** min(mean, 60.0), 2),
    }


def continuation(loaded: Loaded, fields: Fields, limits: Limits) -> Iterator[dict[str, Any]]:
    """The beginning scored, then symbols sampled one by one after it."""
    text = fields.text("text", 16 * limits.symbols)
    symbols, ids = _encode(loaded, text, limits)
    length = fields.whole("length", 1, limits.new_symbols, 200)
    temperature = fields.number("temperature", 0.05, 4.0, 0.8)
    top = fields.whole("top_k", 0, 100_000, 0)
    generator = torch.Generator().manual_seed(fields.whole("seed", 0, 2**53, 0))
    return _sampled(loaded, symbols, ids, length, temperature, top, generator)


def _sampled(
    loaded: Loaded,
    symbols: list[str],
    ids: list[int],
    length: int,
    temperature: float,
    top: int,
    generator: torch.Generator,
) -> Iterator[dict[str, Any]]:
    vocabulary = loaded.run.vocabulary
    if not ids:  # a line's end is the most natural place to begin
        ids = [_begin(vocabulary)]
        symbols = []
    tokens, logits, state = _scored(loaded, symbols or [""], ids)
    yield {"given": tokens if symbols else []}
    for first in range(0, length, CHUNK):
        drawn = []
        with torch.inference_mode():  # not across a yield: the mode belongs to the thread
            for _ in range(first, min(first + CHUNK, length)):
                chosen = _draw(logits, temperature, top, generator)
                drawn.append(_token(vocabulary, chosen, torch.log_softmax(logits, -1)))
                logits, state = loaded.model.step(torch.tensor([chosen]), state)
                logits = logits[0]
        yield {"tokens": drawn}
    yield {"next": _alternatives(vocabulary, torch.softmax(logits, -1)), "done": True}


def _draw(logits: torch.Tensor, temperature: float, top: int, generator: torch.Generator) -> int:
    logits = logits / temperature
    if 0 < top < len(logits):
        least = logits.topk(top).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))


def _encode(loaded: Loaded, text: str, limits: Limits) -> tuple[list[str], list[int]]:
    """The symbols as typed, and their ids."""
    kind = loaded.kind
    symbols = list(text) if kind == "char" else word_symbols(text)
    if len(symbols) > limits.symbols:
        what = "characters" if kind == "char" else "words"
        raise Refusal(
            422, f"the text has {len(symbols):,} {what}; at most {limits.symbols:,} are read at once"
        )
    data = TextData("page", kind, {}, list(loaded.run.vocabulary or []))
    return symbols, data.encode(text).tolist()


def _begin(vocabulary: list[str]) -> int:
    return next((vocabulary.index(s) for s in (END, "\n", " ") if s in vocabulary), 0)


def _scored(
    loaded: Loaded, symbols: list[str], ids: list[int]
) -> tuple[list[dict[str, Any]], torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """Tokens with surprise; the first has none, for nothing came before it. Then the last logits and state."""
    vocabulary = loaded.run.vocabulary
    known = set(vocabulary)
    tokens: list[dict[str, Any]] = []
    state, last = None, torch.zeros(loaded.model.spec.output_size)
    with torch.inference_mode():
        for first in range(0, len(ids), PART):
            part = ids[first : first + PART]
            logits, state = loaded.model(torch.tensor(part)[:, None], state)
            before = torch.cat([last[None], logits[:-1, 0]])
            log_p = torch.log_softmax(before, -1)
            for i, id in enumerate(part):
                token = _token(vocabulary, id, log_p[i]) if first + i else _first(vocabulary, id)
                if symbols[first + i] not in known:
                    token.update(t=symbols[first + i], unknown=True)
                tokens.append(token)
            last = logits[-1, 0]
    return tokens, last, state


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


__all__ = ["END", "UNKNOWN", "continuation", "score"]
