"""The NADE's likelihood by products over whole frames, for notes of which few sound.

The hidden layer σ(c + Σ_{j<i} W_j y_j) changes only at notes that sound. Between two of them all notes share one
vector: a frame of four notes has five such *segments*, not 88 hidden layers. They are the rows of one product with V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 1 << 21
"""of hidden units and logits held at once; frames in which all notes sound are taken a few at a time"""


class Segments(NamedTuple):
    """Where the segments of some frames lie."""

    notes: Tensor
    """(N, K) the notes that sound, in order; the number of notes where a frame has fewer than K"""
    values: Tensor
    """(N, K, 1) of y there, 0 where a frame has fewer"""
    segment: Tensor
    """(N, 1, O) the segment that each note reads, from 0 to K"""

    @classmethod
    def of(cls, y: Tensor, on: Tensor, most: int) -> Segments:
        """Those of frames y (N, O), of whose notes `on` sound, `most` at once."""
        segment = on.cumsum(1).sub_(on)
        frame, note = on.nonzero(as_tuple=True)
        notes = note.new_full((len(y), most), y.shape[1])
        values = y.new_zeros(len(y), most, 1)
        place = (frame, segment[frame, note])
        notes[place] = note
        values[place] = y[frame, note].unsqueeze(1)
        return cls(notes, values, segment.unsqueeze(1))

    def hidden(self, c: Tensor, W: Tensor) -> Tensor:
        """The hidden layer of every segment, (N, K + 1, D)."""
        rows = F.pad(W, (0, 0, 0, 1))[self.notes].mul_(self.values)
        return torch.cat([c.unsqueeze(1), rows], 1).cumsum_(1).sigmoid_()


def forward(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor, nats: Tensor, delta: Tensor) -> None:
    """Fill nats (N,) and delta (N, O), their derivative by the logits."""
    for part, segments in _parts(y, W):
        s = segments.hidden(c[part], W)
        logits = (s @ V.mT).gather(1, segments.segment).squeeze(1).add_(b[part])
        nats[part] = F.binary_cross_entropy_with_logits(logits, y[part], reduction="none").sum(1)
        torch.sub(logits.sigmoid_(), y[part], out=delta[part])


def backward(
    y: Tensor, c: Tensor, W: Tensor, V: Tensor, db: Tensor, dc: Tensor, dW: Tensor, dV: Tensor
) -> None:
    """Fill the gradients of c, W and V from that of b, which is the one of the logits."""
    sums = W.new_zeros(len(W) + 1, W.shape[1])  # of W, and of the row that missing notes have
    dV.zero_()
    for part, segments in _parts(y, W):
        s = segments.hidden(c[part], W)
        g = db.new_zeros(*s.shape[:2], len(V)).scatter_(1, segments.segment, db[part].unsqueeze(1))
        dV.addmm_(g.flatten(0, 1).t(), s.flatten(0, 1))
        da = (g @ V).mul_(s).mul_(1 - s)
        for k in range(da.shape[1] - 2, -1, -1):  # a note enters every segment after it
            da[:, k] += da[:, k + 1]
        dc[part] = da[:, 0]
        sums.index_add_(0, segments.notes.flatten(), (da[:, 1:] * segments.values).flatten(0, 1))
    dW.copy_(sums[:-1])


def _parts(y: Tensor, W: Tensor):
    """Slices of the frames, and their segments; as many at a time as may be held."""
    on = (y != 0).long()
    most = int(on.sum(1).max()) if len(y) else 0
    step = max(1, NUMBERS // ((most + 1) * sum(W.shape)))
    for start in range(0, len(y), step):
        part = slice(start, start + step)
        yield part, Segments.of(y[part], on[part], most)
