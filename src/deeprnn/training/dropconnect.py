"""DropConnect: entries of recurrent matrices that are zero for an update, others for the next (Wan et al., 2013)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.errors import UserError
from deeprnn.model.operator_specs import CellSpec
from deeprnn.model.specs import ModelSpec
from deeprnn.model.structure import dissect
from deeprnn.training import rng
from deeprnn.training.flat import Layout


def recurrent_matrices(spec: ModelSpec) -> list[str]:
    """Names of the matrices inside the loop over time: those that states, and layers between states, go through."""
    names = []
    anatomy = dissect(spec)
    for link in anatomy.links:
        if link.kind not in ("transition", "shortcut"):
            continue
        number = max(anatomy.layer(link.target).level, 1) - 1
        inside = f"cell.{link.parameter}" if isinstance(spec.levels[number], CellSpec) else link.matrix
        names.append(f"levels.{number}.{inside}")
    return names


class DropConnect:
    """One mask for each update and member over the recurrent matrices, from (member's seed, purpose, update) alone.

    The matrices of a forward pass are W ∘ M / (1 − p), and so the gradient of W is that of the product times the same
    M / (1 − p): `apply` serves both, on rows of flat parameters and on rows of their gradient.
    """

    def __init__(
        self, p: float, spec: ModelSpec, layout: Layout, seeds: Sequence[int], device: torch.device
    ) -> None:
        self.p = p
        self.members = list(seeds)
        self.seeds = torch.tensor(self.members, dtype=torch.int64, device=device)
        matrices = set(recurrent_matrices(spec)) if p else set()
        self.spans = _spans(layout, matrices)
        if p and not self.spans:
            raise UserError(
                f"regulariser.dropconnect={p:g} has nothing to act on: this model has no recurrent matrix"
            )

    @property
    def count(self) -> int:
        """Entries of all recurrent matrices."""
        return sum(stop - start for start, stop in self.spans)

    def draw(self, rows: slice, update: Tensor) -> Tensor | None:
        """The mask (p, entries) of members `rows`, with 0 and 1 / (1 − p) in it; None where nothing is dropped."""
        if not self.p:
            return None
        if self.seeds.device.type == "cpu":
            parts = [rng.generator(s, rng.DROPCONNECT, int(update)) for s in self.members[rows]]
            uniform = torch.stack([torch.rand(self.count, generator=g) for g in parts])
        else:
            uniform = rng.hashed_uniform(self.seeds[rows], rng.DROPCONNECT, update, self.count)
        return (uniform >= self.p).to(uniform.dtype) / (1 - self.p)

    def apply(self, flat: Tensor, mask: Tensor | None) -> None:
        """Multiply the recurrent matrices in rows of flat numbers (p, N), in place."""
        if mask is None:
            return
        sizes = [stop - start for start, stop in self.spans]
        for (start, stop), part in zip(self.spans, mask.split(sizes, 1), strict=True):
            flat[:, start:stop].mul_(part)


def _spans(layout: Layout, matrices: set[str]) -> list[tuple[int, int]]:
    """Where these parameters lie in a row; neighbours as one."""
    spans: list[tuple[int, int]] = []
    at = 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        if name in matrices:
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + size)
            else:
                spans.append((at, at + size))
        at += size
    return spans
