"""How a frame of notes is drawn from a model's logits; a model's kind of output decides it.

Independent notes (output "bernoulli") have logits l, one for each. Two things keep the number of notes that sound to
what the model expects.

Temperature: at τ the logits become l / τ + c. Dividing alone would change how many notes sound: most of them have
p < 1/2, so that τ < 1 thins a frame out and τ > 1 fills it up. The offset c, one for each frame, brings the expected
number back to what it is at τ = 1: temperature decides which notes sound, the model how many.

Drawing: coins, one for each note, would scatter the number of notes around its expectation, and a frame of twice as
many notes as any that was learned from leads a model astray for good. Systematic sampling (Madow, 1949) lays the
probabilities end to end in the order of pitch and takes the notes met by u, u + 1, u + 2, … for one uniform u. Every
note sounds with its own probability still, the number of notes is its expectation rounded up or down, and of near
pitches that share one unit of probability, which are alternatives for one voice, exactly one sounds.

Neither is for a NADE (output "nade"), which knows how many notes go together: `chords.py` draws exactly from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deeprnn.cells.functions import sigmoid_in_place
from deeprnn.errors import UserError
from deeprnn.generation.one_step import Array
from deeprnn.generation.sampling import COLD, Pick

if TYPE_CHECKING:
    from deeprnn.model.predict import Predict

ROUNDS = 60
"""steps of the search for c at most; about six are needed, and halving alone would end by then"""
TOLERANCE = 1e-4
"""notes by which a frame's expected number may be off"""


@dataclass(frozen=True)
class FrameOptions:
    """How frames of notes are drawn, as far as a person chooses it."""

    temperature: float = 1.0
    max_notes: int | None = None
    """at once; where more are drawn the likeliest of them stay"""
    independent: bool = False
    """a coin for every note, which is what the likelihood of independent notes means literally"""


@dataclass(frozen=True)
class FrameSampler:
    """How one frame is chosen, and with how many uniform random numbers."""

    draws: int
    pick: Pick


def frame_sampler(
    output: str, keys: int, options: FrameOptions, predict: Predict | None = None
) -> FrameSampler:
    """The way to draw frames that belongs to a model's kind of output; a NADE's needs the model's ▷ itself."""
    if output not in (*SAMPLERS, "nade"):
        raise UserError("this model predicts symbols, not frames of notes: sample text from it")
    if options.max_notes is not None and options.max_notes < 1:
        raise UserError(f"max_notes={options.max_notes} would leave only silence: choose at least 1")
    if output == "nade":
        from deeprnn.generation.chords import chords

        return chords(predict, options)  # type: ignore[arg-type]
    return SAMPLERS[output](keys, options)


def notes(keys: int, options: FrameOptions) -> FrameSampler:
    """Frames from the logits of single notes; at temperature 0 the likeliest, as many as are expected."""
    most = options.max_notes

    def pick(logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        p = tempered(logits.cpu().numpy(), options.temperature)
        point = u.cpu().numpy()
        on = point < p if options.independent else systematic(p, point)
        if most is not None and most < keys:
            on &= likeliest(np.where(on, p, -1.0), most)
        chosen = torch.from_numpy(on.astype(np.float32)).to(logits.device)
        return chosen, torch.from_numpy(p.astype(np.float32))

    return FrameSampler(keys if options.independent else 1, pick)


SAMPLERS: dict[str, Callable[[int, FrameOptions], FrameSampler]] = {"bernoulli": notes}
"""by `ModelSpec.output`"""


def tempered(logits: Array, temperature: float) -> Array:
    """Probabilities (B, K) of single notes at a temperature, in sum those of temperature 1."""
    logits = logits.astype(np.float64)
    p = sigmoid_in_place(logits.copy())
    if temperature == 1:
        return p
    expected = p.sum(1, keepdims=True)
    if temperature < COLD:
        return likeliest(logits, expected.round()).astype(np.float64)
    logits /= temperature
    return sigmoid_in_place(logits + offset(logits, expected))


def offset(logits: Array, expected: Array) -> Array:
    """The c (B, 1) for which Σ σ(logits + c) is `expected`: Newton's method, halving where it leaves the bracket."""
    share = (expected / logits.shape[1]).clip(1e-12, 1 - 1e-12)
    even = np.log(share / (1 - share))  # what all notes would have if they were alike
    low, high = even - logits.max(1, keepdims=True), even - logits.min(1, keepdims=True)
    c = np.zeros_like(even).clip(low, high)
    for _ in range(ROUNDS):
        p = sigmoid_in_place(logits + c)
        excess = p.sum(1, keepdims=True) - expected
        if np.abs(excess).max() < TOLERANCE:
            break
        low, high = np.where(excess < 0, c, low), np.where(excess > 0, c, high)
        slope = (p * (1 - p)).sum(1, keepdims=True)
        newton = c - excess / slope.clip(1e-12)
        c = np.where((newton > low) & (newton < high), newton, (low + high) / 2)
    return c


def systematic(p: Array, u: Array) -> Array:
    """Which notes sound (B, K): those whose stretch of the summed probabilities holds a point 1 - u, 2 - u, …"""
    passed = np.floor(p.cumsum(1) + u)  # points passed after each note; u is (B, 1)
    return np.diff(passed, axis=1, prepend=0.0) > 0


def likeliest(values: Array, count: Array | int) -> Array:
    """Whether a value is among the `count` largest of its row."""
    return (-values).argsort(axis=1, kind="stable").argsort(axis=1) < count
