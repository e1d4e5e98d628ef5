"""Chords from a NADE: note after note from the lowest, each given those below it, exactly as the model has them.

Between two notes that sound the model's hidden layer stays as it is. So all notes above the last one that sounded are
asked at once, the lowest that sounds is taken, and the rest are asked again: a chord of four notes takes five products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deeprnn.cells.functions import sigmoid_in_place
from deeprnn.errors import UserError
from deeprnn.generation.frames import FrameOptions, FrameSampler, likeliest
from deeprnn.generation.one_step import Array, Product
from deeprnn.generation.sampling import COLD
from deeprnn.model.overrides import own_method, refresh_weights

if TYPE_CHECKING:
    from deeprnn.model.nade import NadePredict


def chords(predict: NadePredict, options: FrameOptions) -> FrameSampler:
    """Frames by the chain of conditionals; at temperature 0 the likelier value of every note in turn."""
    if options.independent:
        raise UserError(
            "independent=True is for models of independent notes: this one's depend on each other"
        )
    keys, most = predict.spec.output_size, options.max_notes
    draw = _own_draw(predict, options.temperature) or Chain(predict, options.temperature)

    def pick(out: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        on, p = draw(out.cpu().numpy(), u.cpu().numpy())
        if most is not None and most < keys:
            on &= likeliest(np.where(on, p, -1.0), most)
        chosen = torch.from_numpy(on.astype(np.float32)).to(out.device)
        return chosen, torch.from_numpy(p)

    return FrameSampler(keys, pick)


def _own_draw(predict: NadePredict, temperature: float):
    """The model's own way to draw, where somebody gave it one."""
    if own_method(predict, "draw", "biases") is None:
        return None
    like = predict.W

    def draw(out: Array, u: Array) -> tuple[Array, Array]:
        frame, p = predict.draw(torch.from_numpy(out).to(like), torch.from_numpy(u).to(like), temperature)
        return frame.cpu().numpy() > 0, p.float().cpu().numpy()

    return draw


class Chain:
    """`NadePredict.draw` for a few rows: biases (B, O + D) and uniform numbers (B, O) to notes and probabilities."""

    def __init__(self, predict: NadePredict, temperature: float = 1.0) -> None:
        refresh_weights(predict)
        self.keys, self.temperature = predict.spec.output_size, temperature
        self.W = predict.W.detach().float().cpu().numpy()
        self.V = Product(predict.V.detach().float().cpu().numpy().T)
        self.notes = np.arange(self.keys)

    def __call__(self, out: Array, u: Array) -> tuple[Array, Array]:
        b, a = out[:, : self.keys], out[:, self.keys :].astype(np.float32)
        on, p = np.zeros(b.shape, bool), np.zeros(b.shape, np.float32)
        begin = np.zeros((len(b), 1), np.int64)  # the first note that is not decided yet
        rows = np.arange(len(b))
        while True:
            from_here = self.notes >= begin
            np.copyto(p, self._probabilities(b, a), where=from_here)
            sounding = from_here & (u < p)
            first = sounding.argmax(1)
            some = sounding[rows, first]
            if not some.any():
                return on, p
            on[rows[some], first[some]] = True
            a[some] += self.W[first[some]]
            begin = np.where(some, first + 1, self.keys)[:, None]

    def _probabilities(self, b: Array, a: Array) -> Array:
        logits = self.V(sigmoid_in_place(a.copy()))
        logits += b
        if self.temperature < COLD:
            return logits > 0
        return sigmoid_in_place(logits / self.temperature if self.temperature != 1 else logits)


def note_probabilities(predict: NadePredict, out: Tensor, samples: int = 64) -> Array:
    """How likely each note is on its own (O,), whatever the others do: the mean over chords drawn from biases (O + D,).

    The mean of the conditionals that the chords were drawn from, which is nearer than their share of sounding notes.
    """
    u = torch.rand(samples, predict.spec.output_size, generator=torch.Generator().manual_seed(0))
    return Chain(predict)(out.cpu().numpy()[None].repeat(samples, 0), u.numpy())[1].mean(0)
