"""The input's product and the unrolled loop as one operation, so that all gradients after the loop share their work.

A = x Uᵀ + b before the loop and, after it, the gradients of U, b and every matrix of the transition are sums over the
same rows of dA: on Hopper's tensor cores dA is cut into parts once for all of them (tall.cu), and the product before
the loop is bound by writing A (entry.cu). As accurate as fp32 products. Everywhere else, and where something looks on
(a compiler, vmap, autocast, a second derivative), torch's own products serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.backends import TransitionSpec, autocasts, cuda
from deeprnn.backends.cuda import products, rows
from deeprnn.backends.gradients import inside_functional_grad, inside_vmap, runs_of, sorted_gradients

FEWEST_ROWS = 2048  # below, torch's product of the input is as fast
FEWEST_LONG_ROWS = 6144  # the same for the gradient of the input
DEVICE = "cuda"  # tests without a GPU name another


def unroll(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """As `cuda.unroll` of x (T, B, I) times weight (ΣM, I) plus bias (ΣM,); ask `serves` first."""
    return Entering.apply(x, weight, bias, h0, reset, spec.text, precision, len(W), *W, *S)


def serves(x: Tensor, given: Sequence[Tensor | None], spec: TransitionSpec) -> bool:
    """Whether this operation should serve: plain fp32 tensors on a Hopper GPU, many rows.

    `given`: all but x, the input's matrix and its bias first. Where these do not fit x, torch's product says so.
    """
    if torch.compiler.is_compiling() or x.device.type != DEVICE or x.dim() != 3 or autocasts(DEVICE):
        return False
    if inside_vmap() or inside_functional_grad() or not cuda._plain(x, *given):
        return False
    if any(t is not None and t.dtype != torch.float32 for t in (x, *given)):
        return False
    weight, bias = given[0], given[1] if len(given) > 1 else None
    if weight is None or weight.shape != (spec.total, x.shape[-1]):
        return False
    if bias is not None and bias.shape != (spec.total,):
        return False
    return fits(x, spec) and products.hopper(x.device)


def fits(x: Tensor, spec: TransitionSpec) -> bool:
    """Whether the shapes are worth it, and such as the kernels can read."""
    steps, batch, inner = x.shape
    if steps * batch < FEWEST_ROWS or inner % 4 or not 8 <= inner <= rows.SHORT or spec.total % 4:
        return False
    if any(n < products.FEWEST_COLUMNS for n in spec.sizes):
        return False
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and products.tall_fits(steps * batch, spec.sizes)


class Entering(torch.autograd.Function):
    """Forward: A, then the loop. Backward: the loop, then all sums over its rows together."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, h0, reset, text, precision, layers, *matrices):
        W, S = list(matrices[:layers]), list(matrices[layers:])
        row_bias = None if bias is None else bias.unsqueeze(0)
        A = rows.rows_times(x.flatten(0, 1).unsqueeze(0), weight.unsqueeze(0), row_bias)
        units, shortcuts = text
        h, z = cuda._forward(A.view(*x.shape[:-1], -1), h0, W, S, reset, units, shortcuts, precision)
        ctx.save_for_backward(x, weight, bias, h0, reset, h, z, *matrices)
        ctx.text, ctx.precision, ctx.layers = text, precision, layers
        ctx.set_materialize_grads(False)
        return h, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, h0, reset, h, z, *matrices = ctx.saved_tensors
        dh, dz = grads
        if torch.is_grad_enabled() or not cuda._plain(dh, dz):
            return _again(ctx, dh, dz)
        W, S = matrices[: ctx.layers], matrices[ctx.layers :]
        dh = torch.zeros_like(h) if dh is None else dh
        units, shortcuts = ctx.text
        needs = ctx.needs_input_grad
        flags, sums = [c == "1" for c in shortcuts], None
        if needs[1] or needs[2] or any(needs[8:]):
            sizes, with_bias = [w.shape[0] for w in W], bias is not None
            sums = products.AllSums(h, z, h0, reset, sizes, runs_of(flags), x, with_bias)
        beside = Beside(h.device)
        dA, dh0 = cuda._backward(dh, dz, h, z, h0, W, S, reset, units, shortcuts, ctx.precision)
        dU, db, dW, dS = None, None, [None] * len(W), [None] * len(S)
        if sums is not None:
            with beside:  # the loop leaves processors idle, and nothing here waits for it
                sums.begin()
            found, entered = sums.finish(dA)
            dU, db = entered[0], entered[1] if sums.with_bias else None
            dW, dS = sorted_gradients(lambda runs: found, [w.shape[0] for w in W], flags)
        dx = _times(dA.flatten(0, 1), weight).view_as(x) if needs[0] else None
        return dx, dU, db, dh0, None, None, None, None, *dW, *dS


@lru_cache(maxsize=64)
def _stream(device: int, beside: int) -> torch.cuda.Stream:
    """A second stream for each first one: that of another thread may be in the middle of a capture."""
    return torch.cuda.Stream(device)


class Beside:
    """Work that may begin where this is made although it is written later; what follows it waits for it.

    So the loop is launched first and takes the processors it needs. Tensors must outlive the block.
    """

    def __init__(self, device: torch.device):
        self.device, self.start = device, None
        if device.type == "cuda":
            self.start = torch.cuda.current_stream(device).record_event()

    def __enter__(self) -> None:
        if self.start is not None:
            current = torch.cuda.current_stream(self.device)
            self.stream = _stream(current.device_index, current.cuda_stream)
            self.stream.wait_event(self.start)
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.start is not None:
            self.context.__exit__(*error)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


def _times(dA: Tensor, weight: Tensor) -> Tensor:
    """dA (rows, ΣM) times weight (ΣM, I): the gradient of the input."""
    if len(dA) < FEWEST_LONG_ROWS:
        return dA @ weight
    return rows.rows_times(dA.unsqueeze(0), weight.mT.unsqueeze(0)).squeeze(0)


def _again(ctx: Any, dh: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
    """The same gradients by operations that a second derivative and vmap can follow."""
    x, weight, bias, h0, reset, _, _, *matrices = ctx.saved_tensors
    inputs = [x, weight, bias, h0, None, None, None, None, *matrices]
    with torch.enable_grad():
        A = F.linear(x, weight, bias)
        W, S = matrices[: ctx.layers], matrices[ctx.layers :]
        outputs = cuda.unroll_cuda(A, h0, W, S, reset, *ctx.text, ctx.precision)
        pairs = [(y, d) for y, d in zip(outputs, (dh, dz), strict=True) if d is not None]
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            [inputs[i] for i in wanted],
            [d for _, d in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    by_index = dict(zip(wanted, found, strict=True))
    return tuple(by_index.get(i) for i in range(len(inputs)))
