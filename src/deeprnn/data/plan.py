"""What an epoch's batches are made of: a table of rows, and which row is the target of each step and lane.

Batches are gathered on demand, on whatever device the plan lies, so one epoch can run without the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Batch(NamedTuple):
    """T steps of B lanes; `reset` zeroes the state before a step, `mask` says which steps are scored."""

    x: Tensor  # (T, B, pitches) uint8 or (T, B) int64
    y: Tensor  # the same, one step later
    mask: Tensor  # (T, B) bool
    reset: Tensor  # (T, B) bool


@dataclass(frozen=True, eq=False)  # tensors have no plain equality
class EpochPlan:
    """An epoch's batches, indexable: target rows, scored steps and resets over one long time axis."""

    table: Tensor  # (N, bytes) uint8 packed frames, row 0 silent; or (N,) integer symbols
    rows: Tensor  # (S, B) int32: the table row that is the target of each step
    mask: Tensor  # (S, B) bool
    reset: Tensor  # (S, B) bool
    starts: tuple[int, ...]  # where each batch begins on the time axis
    lengths: tuple[int, ...]  # and how many steps it has
    pitches: int = 0  # 0: symbols

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        span = slice(self.starts[index], self.starts[index] + self.lengths[index])
        rows, reset = self.rows[span], self.reset[span]
        return Batch(*self._gather(rows, reset), self.mask[span], reset)

    def __iter__(self) -> Iterator[Batch]:
        return (self[i] for i in range(len(self)))

    @property
    def lanes(self) -> int:
        return self.rows.shape[1]

    @property
    def distinct_lengths(self) -> tuple[int, ...]:
        """The few chunk lengths that occur, ascending: one compiled path or CUDA graph each."""
        return tuple(sorted(set(self.lengths)))

    @property
    def scored(self) -> int:
        """How many frames or symbols the plan scores."""
        return int(self.mask.sum())

    def to(self, device: torch.device | str) -> EpochPlan:
        """The plan with its table and indices on `device`; batches are then made there."""
        moved = {name: getattr(self, name).to(device) for name in ("table", "rows", "mask", "reset")}
        return replace(self, **moved)

    def of_lanes(self, lanes: slice) -> EpochPlan:
        """The plan with some of its lanes: one process's share."""
        if range(*lanes.indices(self.lanes)) == range(self.lanes):
            return self
        own = {name: getattr(self, name)[:, lanes].contiguous() for name in ("rows", "mask", "reset")}
        return replace(self, **own)

    def new_scores(self, *leading: int) -> Tensor:
        """Where `record` puts the nats of every table row: zeros (*leading, N)."""
        return torch.zeros(*leading, len(self.table), device=self.table.device)

    def record(self, scores: Tensor, index: int, nats: Tensor) -> None:
        """Store batch `index`'s nats (..., T, B) at their rows of `scores` (..., N), without synchronising."""
        span = slice(self.starts[index], self.starts[index] + self.lengths[index])
        target = torch.where(self.mask[span], self.rows[span], 0).long()  # row 0 is never scored
        scores[..., target] = nats.detach().to(scores.dtype)

    def collect(self, scores: Tensor) -> np.ndarray:
        """Recorded nats in the order of the data: (..., frames) for music, (..., symbols) for text.

        A text's first symbol is not scored and holds zero, as `metrics` expects.
        """
        values = scores.detach().cpu().double().numpy().copy()
        values[..., 0] = 0.0
        return values[..., 1:] if self.pitches else values

    def inputs(self, rows: Tensor, reset: Tensor) -> Tensor:
        """The table rows that are the inputs where these are the targets: those before."""
        before = (rows - 1).clamp_(min=0)
        # A song's first input is silence, not another song's end.
        return torch.where(reset, 0, before) if self.pitches else before

    def _gather(self, rows: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        before = self.inputs(rows, reset)
        if not self.pitches:
            return self.table[before].long(), self.table[rows].long()
        return unpack(self.table[before], self.pitches), unpack(self.table[rows], self.pitches)


def bit_places(device: torch.device | str) -> Tensor:
    """By how much each of a byte's bits is moved to be the lowest, the first pitch's first."""
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def unpack(packed: Tensor, pitches: int, places: Tensor | None = None) -> Tensor:
    """Bits to uint8 zeros and ones, on any device: (..., bytes) -> (..., pitches)."""
    bits = (packed.unsqueeze(-1) >> (bit_places(packed.device) if places is None else places)) & 1
    return bits.flatten(-2)[..., :pitches].contiguous()
