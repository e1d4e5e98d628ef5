"""The machinery of sampling: hear what is given, choose, hear one's own choice, and so on.

Sample i depends on the seed and i alone: it has its own stream of random numbers and always the same
row of a batch of BLOCK rows, so that neither the number of samples nor their neighbours change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.generation.one_step import Step, fastest_step
from deeprnn.model.nade import COLD

if TYPE_CHECKING:
    from deeprnn.model.sequence_model import SequenceModel, State

BLOCK = 4  # rows of a batch: they cost hardly more than one, since reading the weights takes the time
DRAWS = 256  # steps of random numbers drawn at once
LIMIT = 1_000_000  # steps of one sample: more is a slip of the keyboard
MOST = 10_000  # samples at once
TOTAL = 2_000_000  # steps of all samples together: they and their probabilities are kept in memory
PART = 1024  # steps of a primer heard at once: a long one's logits over all words would not fit
FEW = 512  # likeliest symbols among which top-p mostly finds its share

Pick = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""logits (B, O) and uniform numbers -> what is chosen, fed back and given out, and its probabilities"""


def check(length: int, count: int, seed: int, temperature: float) -> None:
    """Refuse options that make no sense for any kind of sample."""
    if not 1 <= length <= LIMIT:
        raise UserError(f"length={length} must be from 1 to {LIMIT:,}")
    if not 1 <= count <= MOST:
        raise UserError(f"count={count} must be from 1 to {MOST:,}")
    if count * length > TOTAL:
        raise UserError(
            f"count={count} samples of length={length} are {count * length:,} steps: at most {TOTAL:,} "
            "are made at once, ask for fewer or shorter ones"
        )
    if not 0 <= seed < 1 << 63:
        raise UserError(f"seed={seed} must be from 0 to 2^63 - 1")
    if not (0 <= temperature < math.inf):
        raise UserError(
            f"temperature={temperature} must be 0 (the likeliest always) or above; 1 is the model's own"
        )


def stream(
    model: SequenceModel, primer: Tensor, length: int, count: int, seed: int, draws: int, pick: Pick
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Hear what is given, then choose and hear one's own choice, `length` times."""
    device = next(model.parameters()).device
    step = fastest_step(model)
    logits, state = _hear(model, primer.to(device))
    blocks = [(logits, state)] * -(-count // BLOCK)
    generators = [generator(seed, i) for i in range(len(blocks) * BLOCK)]
    uniform = torch.empty(0)
    for t in range(length):
        if t % DRAWS == 0:
            drawn = [torch.rand(DRAWS, draws, generator=g) for g in generators]
            uniform = torch.stack(drawn, 1).to(device)  # (DRAWS, rows, draws)
        chosen: list[Tensor] = []
        chances: list[Tensor] = []
        for b, (logits, state) in enumerate(blocks):
            u = uniform[t % DRAWS, b * BLOCK : (b + 1) * BLOCK]
            x, p, logits, state = _advance(step, logits, state, u, pick, last=t + 1 == length)
            blocks[b] = (logits, state)
            chosen.append(x)
            chances += [] if p is None else [p]
        yield _rows(chosen, count), _rows(chances, count) if chances else None


@torch.inference_mode()
def _hear(model: SequenceModel, primer: Tensor) -> tuple[Tensor, State]:
    """The state and the logits after the given input, repeated for a block of samples."""
    state = model.initial_state(1)
    logits = torch.empty(0)
    for part in primer.split(PART):
        logits, state = model(part.unsqueeze(1), state)
    return logits[-1].repeat(BLOCK, 1), tuple(h.repeat(BLOCK, 1) for h in state)


@torch.inference_mode()
def _advance(
    step: Step, logits: Tensor, state: State, u: Tensor, pick: Pick, last: bool
) -> tuple[Tensor, Tensor | None, Tensor, State]:
    x, p = pick(logits, u)
    if not last:
        logits, state = step(x, state)
    return x, p, logits, state


def _rows(parts: list[Tensor], count: int) -> np.ndarray:
    drawn = (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]
    return drawn.cpu().numpy()


def generator(seed: int, sample: int) -> torch.Generator:
    """The random numbers of one sample."""
    mixed = np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))


def symbol_picker(temperature: float, top_k: int | None, top_p: float | None, avoid: list[int]) -> Pick:
    """Choose symbols: one a row (B,), by the inverse of the cumulative distribution.

    By numpy, on one thread: torch shares the softmax of four rows of fifty symbols among all cores, and where another
    process keeps one of them busy a symbol then takes thirty milliseconds.
    """

    def pick(logits: Tensor, u: Tensor) -> tuple[Tensor, None]:
        values = logits.cpu().numpy()
        if avoid:
            values = values.copy()
            values[:, avoid] = -math.inf
        if temperature < COLD:
            ids = values.argmax(1)
        else:
            weights = np.exp((values - values.max(1, keepdims=True)) / temperature, dtype=np.float64)
            rows = zip(weights, u[:, 0].tolist(), strict=True)
            ids = np.array([_draw(w, point, top_k, top_p) for w, point in rows])
        return torch.from_numpy(ids).to(logits.device), None

    return pick


def _draw(weights: np.ndarray, point: float, top_k: int | None, top_p: float | None) -> int:
    """The symbol that a point of [0, 1) falls on, where symbols have shares of it by their weights."""
    order = None
    if top_k is not None or top_p is not None:
        order = _likeliest(weights, top_k, top_p)
        weights = weights[order]
    total = weights.cumsum()
    place = int(np.searchsorted(total, point * total[-1], side="right"))
    place = min(place, len(weights) - 1)  # rounding may carry the point past the end
    return place if order is None else int(order[place])


def _likeliest(weights: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """The symbols among which the choice is made, the likeliest first."""
    order = _largest(weights, top_k or FEW)
    if top_p is None:
        return order
    share = top_p * weights.sum()
    if top_k is None and weights[order].sum() < share:  # seldom: sorting all symbols is slow
        order = _largest(weights, len(weights))
    before = weights[order].cumsum() - weights[order]
    return order[: max(1, int((before < share).sum()))]  # the first always stays


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    count = min(count, len(weights))
    indices = np.argpartition(-weights, count - 1)[:count]
    return indices[np.argsort(-weights[indices], kind="stable")]
