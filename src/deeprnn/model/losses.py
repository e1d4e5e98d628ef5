"""Negative log-likelihoods in nats, as (sum, count): the division happens once, in `metrics`.

Plain torch operations without a host synchronisation, so they run under `torch.func.vmap`, inside a
CUDA graph and over any leading dimensions: with logits of shape (..., T, B, O) the sums have shape (...).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_IGNORED = -100


def bernoulli_nats(logits: Tensor, y: Tensor) -> Tensor:
    """Nats of each frame under independent Bernoullis: (..., T, B, O) -> (..., T, B)."""
    target = y.to(logits.dtype).expand_as(logits)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1)


def categorical_nats(logits: Tensor, y: Tensor) -> Tensor:
    """Nats of each symbol under a softmax: (..., T, B, O) -> (..., T, B)."""
    target = y.long().expand(logits.shape[:-1])
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)


def bernoulli_nll(logits: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of nats over the frames where `mask` (T, B) holds, and how many they are.

    logits (..., T, B, O); y (T, B, O) of zeros and ones in any dtype.
    """
    return masked_sum(bernoulli_nats(logits, y), mask)


def categorical_nll(logits: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of nats over the symbols where `mask` (T, B) holds, and how many they are.

    logits (..., T, B, O); y (T, B) integers. Masked steps are ignored inside the cross entropy, so beside
    the logits only one tensor of their size (its saved log-softmax) ever exists.
    """
    target = torch.where(mask, y.long(), _IGNORED)
    if logits.dim() == 3:
        total = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=_IGNORED, reduction="sum"
        )
    else:
        target = target.expand(logits.shape[:-1])
        nats = F.cross_entropy(
            logits.flatten(0, -2), target.flatten(), ignore_index=_IGNORED, reduction="none"
        )
        total = nats.view(target.shape).sum((-2, -1))
    return total, mask.sum((-2, -1))


def masked_sum(nats: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of nats (..., T, B) over the steps where `mask` (T, B) holds, and how many they are."""
    return _masked_sum(nats, mask), mask.sum((-2, -1))


def nats(kind: str, logits: Tensor, y: Tensor) -> Tensor:
    """Nats per step for an output kind, "bernoulli" or "categorical": (..., T, B)."""
    return _choose(kind, bernoulli_nats, categorical_nats)(logits, y)


def nll(kind: str, logits: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of nats, count) for an output kind, "bernoulli" or "categorical"."""
    return _choose(kind, bernoulli_nll, categorical_nll)(logits, y, mask)


def _choose(kind: str, bernoulli, categorical):
    if kind not in ("bernoulli", "categorical"):
        raise ValueError(f"output kind {kind!r} is unknown: use 'bernoulli' or 'categorical'")
    return bernoulli if kind == "bernoulli" else categorical


def _masked_sum(nats: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: a padded step may hold an infinity, and 0 · inf is NaN.
    return torch.where(mask, nats, torch.zeros((), dtype=nats.dtype, device=nats.device)).sum((-2, -1))
