"""Random numbers inside a step: fresh ones at every step, as torch draws them, or the same for a whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor

torch.library.define("deeprnn::sequence_uniform", "(Tensor like) -> Tensor")


@torch.library.impl("deeprnn::sequence_uniform", "CompositeExplicitAutograd")
def _(like: Tensor) -> Tensor:
    return torch.rand_like(like)


class _Sequence:
    """The draws of one sequence, in the order in which a step asks for them."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []
        self.asked = 0

    def next(self, like: Tensor) -> Tensor:
        if self.asked == len(self.drawn):
            self.drawn.append(torch.rand_like(like))
        self.asked += 1
        return self.drawn[self.asked - 1]


class _Drawing(local):
    """What is going on in this thread; torch.compile follows attributes, and no context variables."""

    sequence: _Sequence | None = None
    recorded = False


_drawing = _Drawing()


@contextmanager
def sequence() -> Iterator[_Sequence]:
    """Inside, draws of a sequence stay the same; set `asked` back to 0 before every step."""
    before, _drawing.sequence = _drawing.sequence, _Sequence()
    try:
        yield _drawing.sequence
    finally:
        _drawing.sequence = before


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, draws of a sequence are calls that a recorder can tell from others."""
    before, _drawing.recorded = _drawing.recorded, True
    try:
        yield
    finally:
        _drawing.recorded = before


def sequence_uniform(like: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), shaped as `like`, the same at every step of a sequence."""
    if _drawing.recorded:
        return torch.ops.deeprnn.sequence_uniform(like)
    drawn = _drawing.sequence
    return torch.rand_like(like) if drawn is None else drawn.next(like)


def sequence_dropout(h: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask a sequence ("variational": Gal & Ghahramani, 2016); the mean is kept."""
    if not training or p == 0.0:
        return h
    return h * ((sequence_uniform(h) >= p).to(h.dtype) / (1 - p))


def zoneout(old: Tensor, new: Tensor, p: float, training: bool) -> Tensor:
    """Units that keep their old value with probability p (Krueger et al., 2017); evaluated, the expectation."""
    if p == 0.0:
        return new
    if training:
        return torch.where(torch.rand_like(old) < p, old, new)
    return torch.lerp(new, old, p)
