"""All parameters of P models in one buffer (P, N), with a view for each name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 16
"""elements: 64 bytes of fp32"""


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in a row; matrices come first, so that weight noise is one draw."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    matrices: int
    """elements that belong to matrices"""

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a model's parameters."""
        items = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
        return cls(
            tuple(name for name, _ in items),
            tuple(tuple(p.shape) for _, p in items),
            sum(p.numel() for _, p in items if p.dim() >= 2),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def total(self) -> int:
        """How many parameters there are."""
        return sum(self.sizes)

    @property
    def width(self) -> int:
        """N, the length of a row: padded, so that every row begins at a multiple of 64 bytes.

        Vectorised kernels treat the unaligned head of an array apart, which changes the order of a sum: with
        rows that begin alike, a member's arithmetic does not depend on its place in the buffer.
        """
        return -(-self.total // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each name's part of a buffer (N,) or (P, N), in its own shape."""
        lead = buffer.shape[:-1]
        parts = buffer[..., : self.total].split(self.sizes, dim=-1)
        return {n: p.view(*lead, *s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def pack(self, members: Sequence[Mapping[str, Tensor]], device: torch.device | str = "cpu") -> Tensor:
        """The buffer (P, N) that holds the given parameters."""
        first = members[0][self.names[0]]
        out = torch.zeros(len(members), self.width, dtype=first.dtype, device=device)
        for row, member in zip(out, members, strict=True):
            for name, view in self.views(row).items():
                view.copy_(member[name].detach())
        return out
