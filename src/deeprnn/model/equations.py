"""Every displayed equation of the paper as a pure function, in the paper's letters.

Vectors are rows here, (B, n), so the paper's Wᵀh is written `h @ W` with W of shape (in, out).
`docs/paper-map.md` lists each equation beside its function and its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Phi = Callable[[Tensor], Tensor]


def dynamical_system(
    x: Tensor, h: Tensor, f_h: Callable[[Tensor, Tensor], Tensor], f_o: Phi
) -> tuple[Tensor, Tensor]:
    """h_t = f_h(x_t, h_{t-1});  y_t = f_o(h_t).  Eqs. (1) and (2)."""
    h = f_h(x, h)
    return f_o(h), h


def cost(
    d: Callable[[Tensor, Tensor], Tensor], sequences: Iterable[tuple[Iterable[Tensor], Iterable[Tensor]]]
) -> Tensor:
    """J(θ) = 1/N Σ_n Σ_t d(y_t, f_o(h_t)), over N pairs of (targets y, outputs f_o(h)).  Eq. (3)."""
    sums = [torch.stack([d(y, out) for y, out in zip(ys, outs, strict=True)]).sum() for ys, outs in sequences]
    return torch.stack(sums).mean()


def rnn_transition(x: Tensor, h: Tensor, W: Tensor, U: Tensor, phi: Phi) -> Tensor:
    """h_t = φ_h(Wᵀ h_{t-1} + Uᵀ x_t).  Eq. (4), Fig. 2a."""
    return phi(h @ W + x @ U)


def rnn_output(h: Tensor, V: Tensor, phi: Phi) -> Tensor:
    """y_t = φ_o(Vᵀ h_t).  Eq. (5), Fig. 2a."""
    return phi(h @ V)


class Layer(NamedTuple):
    """One layer of the transition MLP: W from below, U from the input, S from h_{t-1}, bias b."""

    W: Tensor
    U: Tensor | None = None
    S: Tensor | None = None
    b: Tensor | None = None


def deep_transition(x: Tensor, h: Tensor, layers: Sequence[Layer], phis: Sequence[Phi]) -> Tensor:
    """h_t = φ_h(W_Lᵀ … φ_1(W_1ᵀ h_{t-1} + Uᵀ x_t)), with shortcuts S: DT(S).  Sec. 3.3.1, Fig. 2b, 2b*."""
    entered = [enter(x, layer.U, layer.b) for layer in layers]
    return transition_mlp(entered, h, [p.W for p in layers], [p.S for p in layers], phis)[-1]


def enter(x: Tensor, U: Tensor | None, b: Tensor | None) -> Tensor | float:
    """Uᵀ x + b, either part absent: what enters a layer from outside the recurrence."""
    a = 0.0 if U is None else x @ U
    return a if b is None else a + b


def transition_mlp(
    entered: Sequence[Tensor | float],
    h: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    phis: Sequence[Phi],
    masks: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """z_l = φ_l(W_lᵀ z_{l-1} + S_lᵀ h_{t-1} + entered_l) with z_0 = h_{t-1}: all layers, h_t last.

    `masks` are dropout masks on the intermediate layers z_1 .. z_{L-1}.
    """
    zs: list[Tensor] = []
    z = h
    for l, (a, w, s, phi) in enumerate(zip(entered, W, S, phis, strict=True)):
        a = z @ w + a
        if s is not None:
            a = a + h @ s
        z = phi(a)
        if masks is not None and (mask := masks[l]) is not None:
            z = z * mask
        zs.append(z)
    return zs


def deep_output(
    h: Tensor,
    V: Sequence[Tensor],
    phis: Sequence[Phi],
    b: Sequence[Tensor | None] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """y_t = φ_o(V_Lᵀ φ_{L-1}(… φ_1(V_1ᵀ h_t))): the deep output function.  Sec. 3.3.2, Fig. 2c."""
    y = h
    for l, (v, phi) in enumerate(zip(V, phis, strict=True)):
        y = y @ v
        if b is not None and (bias := b[l]) is not None:
            y = y + bias
        y = phi(y)
        if masks is not None and (mask := masks[l]) is not None:
            y = y * mask
    return y


def nade_logits(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """p(y_i = 1 | y_<i, h) = σ(b_i + V_i σ(c + Σ_{j<i} W_j y_j)), b and c functions of h: logits (…, O).  Sec. 3.3.2.

    The paper names it as the output for outputs that depend on each other. NADE: Larochelle & Murray, "The neural
    autoregressive distribution estimator", AISTATS 2011, whose letters these are. Both biases from a recurrent state:
    Boulanger-Lewandowski et al., "Modeling temporal dependencies in high-dimensional sequences", ICML 2012.
    y, b (…, O), c (…, D); W and V (O, D) have a row for each note.
    """
    entering = y.unsqueeze(-1) * W  # (…, O, D)
    a = c.unsqueeze(-2) + entering.cumsum(-2) - entering
    return b + (torch.sigmoid(a) * V).sum(-1)


def stacked_transition(
    x: Tensor, h: Sequence[Tensor], W: Sequence[Tensor], U: Sequence[Tensor], phi: Phi
) -> list[Tensor]:
    """h_t^(l) = φ_h(W_lᵀ h_{t-1}^(l) + U_lᵀ h_t^(l-1)), with x_t below level 1.  Sec. 3.3.3, Fig. 2d."""
    below, states = x, []
    for h_l, w, u in zip(h, W, U, strict=True):
        below = rnn_transition(below, h_l, w, u, phi)
        states.append(below)
    return states


def operator_rnn(
    x: Tensor, h: Tensor, plus: Callable[[Tensor, Tensor], Tensor], predict: Phi
) -> tuple[Tensor, Tensor]:
    """h_t = x_t ⊕ h_{t-1};  y_t = ▷ h_t = ▷ (x_t ⊕ h_{t-1}).  Sec. 4, Fig. 3."""
    h = plus(x, h)
    return predict(h), h


def commutativity_penalty(
    a: Tensor, b: Tensor, plus: Callable[[Tensor, Tensor], Tensor], counted: Tensor | None = None
) -> Tensor:
    """mean over the batch of ‖a ⊕ b − b ⊕ a‖²: zero when ⊕ commutes.  Sec. 4.

    `counted` (...) leaves pairs out of the mean where it is zero, such as steps that only fill up a batch.
    """
    gaps = (plus(a, b) - plus(b, a)).square().sum(-1)
    if counted is None:
        return gaps.mean()
    counted = counted.to(gaps.dtype)
    return (gaps * counted).sum() / counted.sum().clamp(min=1)


def sequence_log_probability(log_p: Tensor) -> Tensor:
    """log p(x_1..x_T) = log p(x_1) + Σ_t log p(x_t | x_1..x_{t-1}), time first.  Sec. 5."""
    return log_p.sum(0)


def learning_rate(tau: Tensor, tau_0: Tensor, beta: Tensor | float, eta: Tensor | float = 1.0) -> Tensor:
    """η_τ = η / (1 + max(0, τ − τ_0) / β), with η = 1 in the paper.  Sec. 5.2, footnote."""
    return eta / (1.0 + (tau - tau_0).clamp(min=0) / beta)
