"""Nats of frames under a NADE, without a hidden layer for every note being kept.

The plain formula (`equations.nade_logits`) holds (frames, notes, hidden) numbers, several times over for backward: for
a hundred frames of 88 notes and 200 hidden units seven megabytes each. Here forward keeps the derivative by the logits
alone, as large as the frames, and backward computes hidden layers anew: by machine code on the CPU (without llvmlite
those of segments, `nade_segments`), by a kernel on a GPU, anywhere else those of a few frames at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeprnn.backends.cpu import why_not_llvm
from deeprnn.backends.cuda.device import nvidia
from deeprnn.backends.transformations import batched_by_autograd, inside_functional_grad
from deeprnn.model import nade_segments
from deeprnn.model.equations import nade_logits

HELD = 1 << 24
"""hidden units held at once by the plain formula"""


def nade_nats(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """-log p(y) of each frame, (...): y (..., O) of zeros and ones in any dtype, b (..., O), c (..., D).

    W and V are (O, D). Differentiable to any order in b, c, W and V; runs under `torch.func.vmap` (a population),
    torch.func's gradients and torch.compile.
    """
    if y.shape != b.shape or c.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            f"y {tuple(y.shape)}, b {tuple(b.shape)} and c {tuple(c.shape)} do not fit each other"
        )
    y, b, c = (x.to(W.dtype) for x in (y.detach(), b, c))
    if inside_functional_grad():  # custom operators have no gradients there
        return plain_nats(y, b, c, W, V)
    lead = b.shape[:-1]
    rows = (x.reshape(-1, x.shape[-1]) for x in (y, b, c))
    return _forward_op(*rows, W, V)[0].reshape(lead)


def plain_nats(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor) -> Tensor:
    """The formula as autograd can follow it, all hidden layers at once: the truth that other ways are held to."""
    return F.binary_cross_entropy_with_logits(nade_logits(y, b, c, W, V), y, reduction="none").sum(-1)


# ---- as operators: every argument may have a leading dimension P

torch.library.define(
    "deeprnn::nade", "(Tensor y, Tensor b, Tensor c, Tensor W, Tensor V) -> (Tensor, Tensor)"
)
torch.library.define(
    "deeprnn::nade_backward",
    "(Tensor y, Tensor c, Tensor W, Tensor V, Tensor db) -> (Tensor, Tensor, Tensor)",
)
_forward_op = torch.ops.deeprnn.nade.default
_backward_op = torch.ops.deeprnn.nade_backward.default


@torch.library.impl("deeprnn::nade", ("cpu", "cuda"))
def _forward(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Nats (N,), and their derivative by the logits (N, O)."""
    nats, delta = b.new_empty(b.shape[:-1]), torch.empty_like(b, memory_format=torch.contiguous_format)
    if _has_kernel(W):
        from deeprnn.backends.cuda import nade

        nade.forward(y, b, c, W, V, nats, delta)
        return nats, delta
    compute = _dense_forward if b.device.type != "cpu" else (_machine_code(W) or nade_segments).forward
    for member in zip(*(_members(x, b.dim() - 2) for x in (y, b, c, W, V, nats, delta)), strict=True):
        compute(*member)
    return nats, delta


@torch.library.impl("deeprnn::nade_backward", ("cpu", "cuda"))
def _gradients(y: Tensor, c: Tensor, W: Tensor, V: Tensor, db: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of c, W and V from that of b."""
    dc, dW, dV = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (c, W, V))
    if _has_kernel(W):
        from deeprnn.backends.cuda import nade

        nade.backward(y, c, W, V, db, dc, dW, dV)
        return dc, dW, dV
    compute = _dense_backward if c.device.type != "cpu" else (_machine_code(W) or nade_segments).backward
    for member in zip(*(_members(x, c.dim() - 2) for x in (y, c, W, V, db, dc, dW, dV)), strict=True):
        compute(*member)
    return dc, dW, dV


def _members(x: Tensor, mapped: int) -> list[Tensor]:
    return list(x) if mapped else [x]


def _machine_code(W: Tensor) -> Any:
    """The loops of `backends.cpu.jit.nade`, None where they cannot be made."""
    if why_not_llvm() is not None or W.dtype not in (torch.float32, torch.float64):
        return None
    from deeprnn.backends.cpu.jit import nade

    return nade


def _has_kernel(W: Tensor) -> bool:
    if not nvidia(W.device):
        return False
    from deeprnn.backends.cuda import nade

    return nade.why_not(W) is None


def _dense_forward(
    y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor, nats: Tensor, delta: Tensor
) -> None:
    """`nade_segments.forward` without looking at the values of y, so that a GPU need not be waited for."""
    step = max(1, HELD // W.numel())
    for start in range(0, len(y), step):
        part = slice(start, start + step)
        logits = nade_logits(y[part], b[part], c[part], W, V)
        nats[part] = F.binary_cross_entropy_with_logits(logits, y[part], reduction="none").sum(1)
        delta[part] = logits.sigmoid_().sub_(y[part])


def _dense_backward(
    y: Tensor, c: Tensor, W: Tensor, V: Tensor, db: Tensor, dc: Tensor, dW: Tensor, dV: Tensor
) -> None:
    """`nade_segments.backward` in the same way."""
    step = max(1, HELD // W.numel())
    dW.zero_()
    dV.zero_()
    for start in range(0, len(y), step):
        part = slice(start, start + step)
        entering = y[part].unsqueeze(-1) * W  # (n, O, D)
        s = (c[part].unsqueeze(1) + entering.cumsum(1) - entering).sigmoid_()
        dV += torch.einsum("no,nod->od", db[part], s)
        da = db[part].unsqueeze(-1) * V * s * (1 - s)
        after = da.flip(1).cumsum(1).flip(1)
        dc[part] = after[:, 0]
        dW += torch.einsum("no,nod->od", y[part], after - da)


@torch.library.register_fake("deeprnn::nade")
def _(y, b, c, W, V):
    return b.new_empty(b.shape[:-1]), torch.empty_like(b, memory_format=torch.contiguous_format)


@torch.library.register_fake("deeprnn::nade_backward")
def _(y, c, W, V, db):
    dc, dW, dV = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (c, W, V))
    return dc, dW, dV


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Any, ...]:
    y, b, c, W, V, delta = ctx.saved_tensors
    if g is None:
        return (None,) * 5
    if torch.is_grad_enabled() or batched_by_autograd(g):  # let autograd see the plain formula
        return (None, *_plain_gradients(y, b, c, W, V, g))
    db = g.unsqueeze(-1) * delta
    return None, db, *_backward_op(y, c, W, V, db)


torch.library.register_autograd("deeprnn::nade", _backward, setup_context=_save)


def _plain_gradients(y, b, c, W, V, g) -> list[Tensor | None]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of the inputs: one may depend on another outside, and that path is not ours.
        b, c, W, V = values = [x.view_as(x) for x in (b, c, W, V)]
        inputs = [x for x in values if x.requires_grad]
        if W.dim() == 3:  # a population: frames stand between a member and its notes
            W, V = W.unsqueeze(1), V.unsqueeze(1)
        nats = plain_nats(y, b, c, W, V)
    gradients = iter(torch.autograd.grad(nats, inputs, g, create_graph=again))
    return [next(gradients) if x.requires_grad else None for x in values]


def _map(op):
    def rule(info, in_dims, *inputs):
        lead = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        results = op(*lead)
        return results, (0,) * len(results)

    return rule


torch.library.register_vmap("deeprnn::nade", _map(_forward_op))
torch.library.register_vmap("deeprnn::nade_backward", _map(_backward_op))
