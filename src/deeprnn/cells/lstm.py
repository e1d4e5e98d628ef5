"""Long short-term memory and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.cells.gru import add_depth, sizes_of, through_depth
from deeprnn.cells.shipped import MOST_LAYERS, ShippedCell, check_flag, check_whole


class LSTM(ShippedCell):
    """c' = f ∘ c + i ∘ g,  h' = o ∘ tanh(c'): long short-term memory (Hochreiter & Schmidhuber, 1997).

        i, f, o = σ(W h + U x + b),   g = tanh(W_g h + U_g x + b_g)        with forget gates (Gers et al., 2000)

    With `peepholes`, i and f also see p ∘ c and o sees p ∘ c' (Gers & Schmidhuber, 2000). With `proj_size`, h' is a
    projection of that width (Sak et al., 2014). With `intermediate_sizes` g is the end of a deep transition (Pascanu
    et al., 2014): z_l = tanh(W_l z_{l-1} + b_l) behind a first layer that sees x and h. Parameters are named as in
    `nn.LSTMCell`, rows in the order i, f, g, o; deeper layers add `weight_zh_d2`, `bias_d2`, …
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        peepholes: bool = False,
        proj_size: int = 0,
        intermediate_sizes: int | Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, **options)
        check_flag("LSTM", "bias", bias)
        check_flag("LSTM", "peepholes", peepholes)
        check_whole("LSTM", "proj_size", proj_size, least=0)
        self.bias, self.peepholes, self.proj_size = bias, peepholes, proj_size
        self.intermediate_sizes = sizes_of("LSTM", intermediate_sizes)
        self.layers, H = (*self.intermediate_sizes, hidden_size), hidden_size
        self.rows = (H, H, self.layers[0], H)
        self.state_sizes = (proj_size or H, H)
        self.add(weight_ih=(sum(self.rows), input_size), weight_hh=(sum(self.rows), proj_size or H))
        if bias:
            self.add(bias_ih=(sum(self.rows),), bias_hh=(sum(self.rows),))
        if proj_size:
            self.add(weight_hr=(proj_size, H))
        if peepholes:
            self.add(peephole=(3, H))
        add_depth(self, self.layers, bias)
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        b_ih, b_hh = (self.bias_ih, self.bias_hh) if self.bias else (None, None)
        a = F.linear(x, self.weight_ih, b_ih) + F.linear(self.dropped(h), self.weight_hh, b_hh)
        i, f, g, o = a.split(self.rows, -1)
        if self.peepholes:
            i, f = i + self.peephole[0] * c, f + self.peephole[1] * c
        g = through_depth(self, torch.tanh(g))
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * g
        if self.peepholes:
            o = o + self.peephole[2] * new
        y = torch.sigmoid(o) * torch.tanh(new)
        return self.kept(h, F.linear(y, self.weight_hr) if self.proj_size else y), self.kept(c, new)


class CoupledLSTM(ShippedCell):
    """c' = f ∘ c + (1 − f) ∘ g,  h' = o ∘ tanh(c'): an LSTM whose input gate is 1 − f (Greff et al., 2017)."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        H = hidden_size
        self.add(weight_ih=(3 * H, input_size), weight_hh=(3 * H, H), bias=(3 * H,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        a = F.linear(x, self.weight_ih, self.bias) + F.linear(self.dropped(h), self.weight_hh)
        f, g, o = a.chunk(3, -1)
        new = torch.lerp(torch.tanh(g), c, torch.sigmoid(f))
        return self.kept(h, torch.sigmoid(o) * torch.tanh(new)), self.kept(c, new)


class MogrifierLSTM(ShippedCell):
    """An LSTM before which input and state gate each other, r rounds (Melis, Kočiský & Blunsom, 2020).

    x ← 2σ(Q_i h) ∘ x  in odd rounds,   h ← 2σ(R_i x) ∘ h  in even ones
    """

    def __init__(self, input_size: int, hidden_size: int, rounds: int = 5, **options: Any) -> None:
        super().__init__(input_size, hidden_size, **options)
        check_whole("MogrifierLSTM", "rounds", rounds, least=0, most=MOST_LAYERS)
        self.rounds, H = rounds, hidden_size
        for i in range(1, rounds + 1):
            self.add(**{f"Q{i}" if i % 2 else f"R{i}": (input_size, H) if i % 2 else (H, input_size)})
        self.add(weight_ih=(4 * H, input_size), weight_hh=(4 * H, H), bias=(4 * H,))
        self.reset_parameters()

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        v = self.dropped(h)
        for i in range(1, self.rounds + 1):
            if i % 2:
                x = 2 * torch.sigmoid(F.linear(v, getattr(self, f"Q{i}"))) * x
            else:
                v = 2 * torch.sigmoid(F.linear(x, getattr(self, f"R{i}"))) * v
        i, f, g, o = (F.linear(x, self.weight_ih, self.bias) + F.linear(v, self.weight_hh)).chunk(4, -1)
        new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return self.kept(h, torch.sigmoid(o) * torch.tanh(new)), self.kept(c, new)
