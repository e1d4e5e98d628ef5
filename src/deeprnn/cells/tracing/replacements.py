"""Functions of torch that a recorder sees only as a whole, written out in operations that it understands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """`F.one_hot`; torch's own reads the largest symbol."""
    if num_classes < 0:
        raise ValueError("one_hot without num_classes asks for the largest symbol: give num_classes")
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm`; torch's own writes into what it computed."""
    dims = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


def _gates(x: Tensor, h: Tensor, *weights: Tensor | None) -> tuple[Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)  # type: ignore[arg-type]


def gru_cell(x: Tensor, h: Tensor, *weights: Tensor | None) -> Tensor:
    """One step of `nn.GRUCell`."""
    entering, recurrent = _gates(x, h, *weights)
    r, z, n = entering.chunk(3, -1)
    r_h, z_h, n_h = recurrent.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return torch.lerp(new, h, torch.sigmoid(z + z_h))


def lstm_cell(x: Tensor, state: Any, *weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """One step of `nn.LSTMCell`."""
    h, c = state
    entering, recurrent = _gates(x, h, *weights)
    i, f, g, o = (entering + recurrent).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _rnn_cell(phi: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, h, *weights: phi(sum(_gates(x, h, *weights)))  # type: ignore[arg-type]


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "one_hot": one_hot,
    "rms_norm": rms_norm,
    "gru_cell": gru_cell,
    "lstm_cell": lstm_cell,
    "rnn_tanh_cell": _rnn_cell(torch.tanh),
    "rnn_relu_cell": _rnn_cell(torch.relu),
}
"""by the name of torch's function"""
