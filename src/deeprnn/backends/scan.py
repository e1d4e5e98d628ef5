"""The loop as one `scan` operator, for torch.export and ONNX: time stays a dynamic dimension there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deeprnn.backends import TransitionSpec, reference
from deeprnn.model import equations, units


def why_not(
    spec: TransitionSpec,
    device: torch.device,
    dtype: torch.dtype,
    T: int,
    B: int,
    P: int = 1,
    precision: str = "fp32",
) -> str | None:
    """As the reference."""
    return reference.why_not(spec, device, dtype, T, B, P, precision)


def unroll(
    A: Tensor,
    h0: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    precision: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """Unroll by `scan`; see `deeprnn.backends.unroll` for the shapes."""
    phis = [units.ELEMENTWISE[u] for u in spec.units]
    return unroll_with(A, h0, W, reference.spread(S, spec.shortcuts), phis, spec.sizes, reset)


def unroll_with(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor | None],
    phis: Sequence[equations.Phi],
    widths: Sequence[int],
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Unroll with any units φ; `widths` are those of the pre-activations in A."""
    from torch._higher_order_ops.scan import scan

    wt = [w.mT for w in W]
    st = [None if s is None else s.mT for s in S]
    keep = A.new_ones(A.shape[:2]) if reset is None else (~reset).to(A.dtype)

    def step(h: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, kept = at
        layers = equations.transition_mlp(a.split(list(widths), dim=-1), h * kept.unsqueeze(-1), wt, st, phis)
        return layers[-1].clone(), torch.cat(layers, -1)

    _, z = scan(step, h0, (A, keep), dim=0)
    inner = sum(w.shape[-1] for w in W[1:])
    return z[..., inner:], z[..., :inner]
