"""A learned vector for each symbol of a text, below the first level."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deeprnn.errors import UserError
from deeprnn.model import init as initialisation
from deeprnn.model.operators import enter
from deeprnn.model.spec_fields import boolean
from deeprnn.model.specs import EmbeddingSpec


class Embedding(nn.Module):
    """The vectors, (symbols, size), begun as the weights of any other input."""

    def __init__(self, spec: EmbeddingSpec, device=None, dtype=None, initialise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.symbols, spec.size, device=device, dtype=dtype))
        self.roles = {"weight": "input"}
        if initialise:
            initialisation.initialise(self, initialisation.InitSpec())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The vectors of integer symbols; `mask` (symbols, 1) drops some."""
        return enter(x, self.weight if mask is None else self.weight * mask, True)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} symbols -> {self.weight.shape[1]}"


def embedding_spec(symbols: int, size: int, tied: bool, enters: bool) -> EmbeddingSpec | None:
    """What stands between symbols and the first level; `enters`: whether symbols are the model's input at all."""
    boolean("model", tied=tied)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise UserError(f"model.embedding must be a whole number, 0 for none, got {size!r}")
    if tied and not size:
        raise UserError(
            "model.tied=true makes the output's last matrix the embedding of symbols: set model.embedding to the "
            "number of units below the output, such as 400"
        )
    if size and not enters:
        raise UserError(f"model.embedding={size} is for symbols (text): this model's input is vectors")
    return EmbeddingSpec(symbols, size, tied) if size else None
