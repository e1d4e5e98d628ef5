"""Gated cells whose gates are normalised at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.cells.shipped import ShippedCell


class LayerNormCell(ShippedCell):
    """What normalised cells share: a = LN(W h) + LN(U x) + b, where LN(v) = γ ∘ (v − mean(v)) / √(var(v) + ε).

    Mean and variance are over all gates together. Every norm has its own gain γ.
    """

    def __init__(self, input_size: int, hidden_size: int, gates: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.eps, rows = 1e-5, gates * hidden_size
        self.add(weight_ih=(rows, input_size), weight_hh=(rows, hidden_size), bias=(rows,))
        self.add(gain_ih=(rows,), gain_hh=(rows,))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name, p in self.named_parameters():
            if name.startswith("gain"):
                nn.init.ones_(p)

    def normalised(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """LN(U x) + b and LN(W h)."""
        entering, recurrent = F.linear(x, self.weight_ih), F.linear(self.dropped(h), self.weight_hh)
        shape = entering.shape[-1:]
        return (
            F.layer_norm(entering, shape, self.gain_ih, self.bias, self.eps),
            F.layer_norm(recurrent, shape, self.gain_hh, None, self.eps),
        )


class LayerNormLSTM(LayerNormCell):
    """c' = f ∘ c + i ∘ g,  h' = o ∘ tanh(LN(c') + b_c): an LSTM with layer normalisation (Ba, Kiros & Hinton, 2016).

    i, f, o = σ(a),   g = tanh(a_g),   a = LN(W h) + LN(U x) + b
    """

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, gates=4, **options)
        self.add(gain_c=(hidden_size,), bias_c=(hidden_size,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        entering, recurrent = self.normalised(x, h)
        i, f, g, o = (entering + recurrent).chunk(4, -1)
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        y = torch.tanh(F.layer_norm(new, (self.hidden_size,), self.gain_c, self.bias_c, self.eps))
        return self.kept(h, torch.sigmoid(o) * y), self.kept(c, new)


class LayerNormGRU(LayerNormCell):
    """h' = (1 − z) ∘ n + z ∘ h: a GRU with layer normalisation (Ba, Kiros & Hinton, 2016).

    r, z = σ(LN(W h) + LN(U x) + b),   n = tanh(LN(U_n x) + b_n + r ∘ LN(W_n h))
    """

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, gates=3, **options)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        (r_x, z_x, n_x), (r_h, z_h, n_h) = (a.chunk(3, -1) for a in self.normalised(x, h))
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        return self.kept(h, torch.lerp(torch.tanh(n_x + r * n_h), h, z))
