"""Weight gradients of an unrolled ⊕: single matrix products after the loop over time.

With δ_l(t) = dA[t, :, layer l], the gradient of the loss before the unit of layer l,

    dW_l = Σ_t δ_l(t)ᵀ z_{l-1}(t),      dS_l = Σ_t δ_l(t)ᵀ h(t-1),      z_0(t) = h(t-1),

and h(t-1) is zero where a reset mark stands. Layers that see h(t-1) and lie side by side in dA share
one product. Everything here is differentiable, so that a second backward may pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor


def weight_gradients(
    dA: Tensor,  # ([P,] T, B, ΣM)
    h: Tensor,  # ([P,] T, B, H)
    z: Tensor,  # ([P,] T, B, ΣM - H)
    h0: Tensor,  # ([P,] B, H)
    reset: Tensor | None,  # ([P,] T, B) bool
    sizes: Sequence[int],
    shortcuts: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of W_1..W_L and of each S_l, in order; a leading population dimension is carried along."""
    if dA.dim() == 4 and dA.device.type == "cpu":
        # One product per member: the same call, hence the same bits, as for that member alone.
        members = []
        for p in range(dA.shape[0]):
            own: Any = [aligned(x[p]) for x in (dA, h, z, h0)]
            marks = _of_member(reset, p)
            members.append(weight_gradients(*own, reset=marks, sizes=sizes, shortcuts=shortcuts))
        dW = [torch.stack(d) for d in zip(*(m[0] for m in members), strict=True)]
        dS = [torch.stack(d) for d in zip(*(m[1] for m in members), strict=True)]
        return dW, dS

    def sums(runs: Sequence[Sequence[int]]) -> list[Tensor]:
        if not (dA.is_cuda and _on_tensor_cores(dA, h, z, h0, sizes)):
            return _products(dA, h, z, h0, reset, sizes, runs)
        from deeprnn.backends.cuda.products import weight_products

        bounds = [bound for run in runs for bound in (run[0], run[-1] + 1)]
        return weight_products(dA, h, z, h0, reset, list(sizes), bounds)

    return sorted_gradients(sums, sizes, shortcuts)


def sorted_gradients(
    sums: Callable[[Sequence[Sequence[int]]], Sequence[Tensor]],
    sizes: Sequence[int],
    shortcuts: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of W_1..W_L and of each S_l from `sums`: Σ δᵀ h(t-1) for each run of layers, then Σ δ_lᵀ z_{l-1}."""
    runs = runs_of(shortcuts)
    products = sums(runs)
    seen: dict[int, Tensor] = {}  # layer -> its gradient for the matrix that multiplies h(t-1)
    for run, whole in zip(runs, products, strict=False):
        parts = whole.split([sizes[l] for l in run], dim=-2) if len(run) > 1 else (whole,)
        seen.update(zip(run, parts, strict=True))
    dW = [seen[0], *products[len(runs) :]]
    dS = [seen[l] for l in range(1, len(sizes)) if shortcuts[l]]
    return dW, dS


def _on_tensor_cores(dA: Tensor, h: Tensor, z: Tensor, h0: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the CUDA backend's fp16 products, as accurate as fp32, should serve."""
    from deeprnn.backends.cuda import products

    if not torch.compiler.is_compiling() and (inside_vmap() or batched_by_autograd(dA)):
        return False
    return products.serves(dA, h, z, h0, sizes)


def _products(
    dA: Tensor,
    h: Tensor,
    z: Tensor,
    h0: Tensor,
    reset: Tensor | None,
    sizes: Sequence[int],
    runs: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Σ_t δᵀ h(t-1) for each run of layers, then Σ_t δ_lᵀ z_{l-1} for l > 0: plain and differentiable."""
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    # A copy of the states is smaller than a product of its own for the first of them, unless there are many rows.
    copied = reset is not None or h.shape[-3] * h.shape[-2] <= 2 * dA.shape[-1]
    previous = previous_states(h, h0, reset) if copied else None

    def own(first: int, last: int) -> Tensor:
        return dA.narrow(-1, starts[first], ends[last] - starts[first])

    found = [_against_previous(own(run[0], run[-1]), h, h0, previous) for run in runs]
    for l in range(1, len(sizes)):
        found.append(_product(own(l, l), z.narrow(-1, starts[l - 1], sizes[l - 1])))
    return found


def previous_states(h: Tensor, h0: Tensor, reset: Tensor | None) -> Tensor:
    """h(t-1) for every t, zero where a reset mark stands: ([P,] T, B, H)."""
    if h.shape[-3] == 0:
        return h
    previous = torch.cat([h0.unsqueeze(-3), h.narrow(-3, 0, h.shape[-3] - 1)], dim=-3)
    return previous if reset is None else previous.masked_fill(reset.unsqueeze(-1), 0)


def aligned(x: Tensor) -> Tensor:
    """A member's slice of a population, copied unless it begins as freely as a tensor of its own.

    The same matrix product may round otherwise when its operands start in the middle of a cache line.
    """
    return x if x.numel() * x.element_size() % 64 == 0 else x.clone()


def inside_functional_grad() -> bool:
    """Whether torch.func.grad, vjp or jvp is at work: custom operators have no gradients there."""
    if torch.compiler.is_compiling():
        return False
    return any(level.key() != TransformType.Vmap for level in get_interpreter_stack() or ())


def inside_vmap() -> bool:
    """Whether torch.func.vmap is at work."""
    return bool(get_interpreter_stack())


def batched_by_autograd(*gradients: Tensor | None) -> bool:
    """Whether `torch.autograd.grad(..., is_grads_batched=True)` is at work, as in a vectorized jacobian.

    Its older vmap has no rules for custom operators; the plain formulas serve it.
    """
    return any(g is not None and is_legacy_batchedtensor(g) for g in gradients)


def _of_member(reset: Tensor | None, member: int) -> Tensor | None:
    """Reset marks may be shared by the population or be one set per member."""
    return reset if reset is None or reset.dim() == 2 else reset[member]


def runs_of(shortcuts: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The layers that see h(t-1), neighbours grouped: the first always does."""
    return _runs((True, *shortcuts[1:]))


@lru_cache(maxsize=1024)
def _runs(flags: tuple[bool, ...]) -> tuple[tuple[int, ...], ...]:
    """Indices of the true flags, neighbours grouped."""
    runs: list[tuple[int, ...]] = []
    for index, flag in enumerate(flags):
        if flag and runs and runs[-1][-1] == index - 1:
            runs[-1] += (index,)
        elif flag:
            runs.append((index,))
    return tuple(runs)


def _against_previous(d: Tensor, h: Tensor, h0: Tensor, previous: Tensor | None) -> Tensor:
    """Σ_t d(t)ᵀ h(t-1); without a copy of the previous states they are read in place."""
    if previous is not None:
        return _product(d, previous)
    steps = h.shape[-3]
    first = _product(d.narrow(-3, 0, 1), h0.unsqueeze(-3))
    if steps == 1:
        return first
    return first + _product(d.narrow(-3, 1, steps - 1), h.narrow(-3, 0, steps - 1))


def _product(d: Tensor, x: Tensor) -> Tensor:
    """dᵀ x over time and batch: ([P,] T, B, M), ([P,] T, B, K) -> ([P,] M, K)."""
    return _rows(d).mT @ _rows(x)


def _rows(x: Tensor) -> Tensor:
    """Time and batch as one dimension; autograd's own vmap has a rule for `reshape` and none for `flatten`."""
    *lead, steps, batch, width = x.shape
    return x.reshape(*lead, steps * batch, width)
