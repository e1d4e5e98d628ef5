"""The recurrent highway network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deeprnn.cells.shipped import MOST_LAYERS, ShippedCell, check_whole


class RHN(ShippedCell):
    """s_l = t_l ∘ n_l + (1 − t_l) ∘ s_{l-1},  s_0 = h,  h' = s_L: a recurrent highway of depth L (Zilly et al., 2017).

        n_l = tanh(W_l s_{l-1} + b_l),   t_l = σ(V_l s_{l-1} + c_l);   the first layer also sees U x

    Rows of a matrix are those of n, then those of t. The biases of t begin at −2: most of the state is carried on.
    """

    def __init__(self, input_size: int, hidden_size: int, depth: int = 5, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        check_whole("RHN", "depth", depth, most=MOST_LAYERS)
        self.depth, H = depth, hidden_size
        self.add(weight_ih=(2 * H, input_size))
        for l in range(1, depth + 1):
            self.add(**{f"weight_hh_d{l}": (2 * H, H), f"bias_d{l}": (2 * H,)})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As other cells, but the gates begin nearly closed."""
        super().reset_parameters()
        for l in range(1, self.depth + 1):
            bias = getattr(self, f"bias_d{l}")
            nn.init.constant_(bias[self.hidden_size :], -2.0)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        s, mask = h, self.dropped(torch.ones_like(h))
        for l in range(1, self.depth + 1):
            a = F.linear(s * mask, getattr(self, f"weight_hh_d{l}"), getattr(self, f"bias_d{l}"))
            if l == 1:
                a = a + F.linear(x, self.weight_ih)
            n, t = a.chunk(2, -1)
            s = torch.lerp(s, torch.tanh(n), torch.sigmoid(t))
        return self.kept(h, s)
