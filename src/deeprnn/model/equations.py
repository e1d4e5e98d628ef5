"""The paper's equations as pure functions, in the paper's letters; models and training call these.

Vectors are rows here, (B, n), so the paper's Wᵀh is written `h @ W` with W of shape (in, out).
Eqs. (1) and (2) are a step of `sequence_model.SequenceModel`, Eq. (3) is the cost that `training.updater` takes the
gradient of. `docs/paper-map.md` lists each equation beside its function and its test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Phi = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """One layer of the transition MLP: W from below, U from the input, S from h_{t-1}, bias b."""

    W: Tensor
    U: Tensor | None = None
    S: Tensor | None = None
    b: Tensor | None = None


def deep_transition(x: Tensor, h: Tensor, layers: Sequence[Layer], phis: Sequence[Phi]) -> Tensor:
    """h_t = φ_h(W_Lᵀ … φ_1(W_1ᵀ h_{t-1} + Uᵀ x_t)), with shortcuts S: DT(S).  Sec. 3.3.1, Fig. 2b, 2b*.

    One layer is the conventional RNN, h_t = φ_h(Wᵀ h_{t-1} + Uᵀ x_t).  Eq. (4), Fig. 2a.
    """
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
    """y_t = φ_o(V_Lᵀ φ_{L-1}(… φ_1(V_1ᵀ h_t))): the deep output function.  Sec. 3.3.2, Fig. 2c.

    One matrix is the conventional output, y_t = φ_o(Vᵀ h_t).  Eq. (5), Fig. 2a.
    """
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


def learning_rate(tau: Tensor, tau_0: Tensor, beta: Tensor | float, eta: Tensor | float = 1.0) -> Tensor:
    """η_τ = η / (1 + max(0, τ − τ_0) / β), with η = 1 in the paper.  Sec. 5.2, footnote."""
    return eta / (1.0 + (tau - tau_0).clamp(min=0) / beta)
