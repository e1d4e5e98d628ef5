"""Output layer and cross-entropy over many classes, without ever holding all the logits.

The plain way keeps (T·B, classes) logits, their log-softmax and their gradient: three tensors of 40 MB for a
thousand words out of ten thousand. Here rows are taken a few at a time: logits, loss, and then, in the
place of the logits, their gradient p - 1[target], which is turned at once into gradients of h and of the
weights. What is kept has the size of h and of the weights. Backward only scales it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeprnn.backends.cuda.device import nvidia
from deeprnn.backends.transformations import inside_functional_grad

PIECE = {"cpu": 1 << 20, "cuda": 1 << 25}  # logits at a time: a cache's worth, or enough to fill a card


def linear_cross_entropy(
    h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum of nats, count) of softmax(h Wᵀ + b) at the targets, over the rows where `mask` holds.

    h is (..., D), targets and mask (...), weight (V, D), bias (V). Same numbers as
    `losses.categorical_nll` on the logits; runs under `torch.func.vmap` (a population) and torch.compile.
    """
    if h.shape[:-1] != targets.shape:
        raise ValueError(f"targets of shape {tuple(targets.shape)} do not fit h of shape {tuple(h.shape)}")
    mask = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    rows = h.reshape(-1, h.shape[-1]).to(weight.dtype)
    labels = torch.where(mask, targets, 0).reshape(-1).long()
    if inside_functional_grad():  # custom operators have no gradients there
        return _plain(rows, weight, bias, labels, mask.reshape(-1)), mask.sum()
    total, *_ = pieces(rows, weight, bias, labels, mask.reshape(-1), torch.is_grad_enabled())
    return total, mask.sum()


torch.library.define(
    "deeprnn::linear_cross_entropy",
    "(Tensor h, Tensor weight, Tensor? bias, Tensor targets, Tensor mask, bool gradients) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
pieces = torch.ops.deeprnn.linear_cross_entropy.default


@torch.library.impl("deeprnn::linear_cross_entropy", ("cpu", "cuda"))
def _pieces(
    h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and, if asked for, its gradients for h, weight and bias; every argument may have a leading P."""
    total, dh, dweight, dbias = _results(h, weight, gradients)
    if h.dim() == 2:
        _member(h, weight, bias, targets, mask, total, dh, dweight, dbias)
        return total, dh, dweight, dbias
    for p in range(h.shape[0]):
        out = (total[p], dh[p], dweight[p], dbias[p]) if gradients else (total[p], dh, dweight, dbias)
        targets_and_mask = (
            targets if targets.dim() == 1 else targets[p],
            mask if mask.dim() == 1 else mask[p],
        )
        _member(h[p], weight[p], None if bias is None else bias[p], *targets_and_mask, *out)
    return total, dh, dweight, dbias


@torch.library.register_fake("deeprnn::linear_cross_entropy")
def _(h, weight, bias, targets, mask, gradients):
    return _results(h, weight, gradients)


def _results(h: Tensor, weight: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = h.new_empty(h.shape[:-2])
    if not gradients:
        return total, h.new_empty(0), h.new_empty(0), h.new_empty(0)
    return total, h.new_empty(h.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:-1])


def _member(h, weight, bias, targets, mask, total, dh, dweight, dbias) -> None:
    """One model: fill total and, where dweight has room, the gradients."""
    rows, classes = h.shape[0], weight.shape[0]
    step = max(1, PIECE.get(h.device.type, PIECE["cuda"]) // classes)
    gradients = dweight.numel() > 0
    total.zero_()
    if gradients:
        dweight.zero_()
        dbias.zero_()
    turn = _turn_on_gpu if _has_kernel(h, classes) else _turn
    logits, ones = h.new_empty(min(step, rows), classes), h.new_ones(min(step, rows))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        x, y = h[part], logits[: part.stop - start]
        if bias is None:
            torch.mm(x, weight.t(), out=y)
        else:
            torch.addmm(bias, x, weight.t(), out=y)
        total += turn(y, targets[part], mask[part], gradients)
        if gradients:
            torch.mm(y, weight, out=dh[part])
            dweight.addmm_(y.t(), x)
            dbias.addmv_(y.t(), ones[: len(y)])


def _turn(logits: Tensor, targets: Tensor, mask: Tensor, gradient: bool) -> Tensor:
    """The sum of nats of these rows; their logits become the gradient of it, where that is wanted."""
    at, counted = targets.unsqueeze(1), mask.unsqueeze(1)
    logs = torch.log_softmax(logits, dim=1)
    total = -torch.where(counted, logs.gather(1, at), 0).sum()
    if gradient:
        torch.exp(logs, out=logits).scatter_add_(1, at, torch.full_like(at, -1, dtype=logs.dtype))
        logits.masked_fill_(~counted, 0)
    return total


THREADS, MOST = 512, 32  # of a block in softmax.cu, and how many classes one may hold


def _has_kernel(h: Tensor, classes: int) -> bool:
    return nvidia(h.device) and h.dtype == torch.float32 and classes <= THREADS * MOST


def _turn_on_gpu(logits: Tensor, targets: Tensor, mask: Tensor, gradient: bool) -> Tensor:
    """`_turn` by one kernel that reads and writes the logits once."""
    nats = logits.new_empty(len(logits))
    targets, mask = targets.contiguous(), mask.contiguous()  # a mapped dimension may lie last
    arguments = [ctypes.c_void_p(x.data_ptr()) for x in (logits, targets, mask, nats)]
    if len(logits):
        _kernel(logits.shape[1], logits.device.index).launch(len(logits), THREADS, arguments, logits.device)
    return nats.sum()


@lru_cache(maxsize=64)
def _kernel(classes: int, device: int) -> Any:
    # Imported here: the kernels need an NVIDIA driver.
    from deeprnn.backends.cuda import nvrtc
    from deeprnn.backends.cuda.device import device_of
    from deeprnn.backends.cuda.driver import Kernel

    macros = {"CLASSES": str(classes), "ITEMS": str(-(-classes // THREADS))}
    return Kernel(
        nvrtc.cubin("training/softmax.cu", macros, device_of(device).arch), "softmax_gradient", device
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, weight, bias, targets, mask, ctx.gradients = inputs
    ctx.save_for_backward(*output[1:], h, weight, bias, targets, mask)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    dh, dweight, dbias, h, weight, bias, targets, mask = ctx.saved_tensors
    if g is None:
        return (None,) * 6
    if torch.is_grad_enabled():  # somebody will differentiate this again: let autograd see the plain formula
        return (*_plain_gradients(h, weight, bias, targets, mask, g), None, None, None)
    g = g[..., None]
    return dh * g[..., None], dweight * g[..., None], None if bias is None else dbias * g, None, None, None


torch.library.register_autograd("deeprnn::linear_cross_entropy", _backward, setup_context=_save)


def _plain(h: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, mask: Tensor) -> Tensor:
    """The formula as autograd can follow it, all logits at once."""
    logits = h @ weight.mT if bias is None else h @ weight.mT + bias.unsqueeze(-2)
    shape = logits.shape[:-1]
    nats = F.cross_entropy(logits.flatten(0, -2), targets.expand(shape).flatten(), reduction="none")
    return torch.where(mask, nats.view(shape), 0).sum(-1)


def _plain_gradients(h, weight, bias, targets, mask, g) -> list[Tensor | None]:
    # Views of the inputs: one may depend on another outside (a tied embedding), and that path is not ours.
    h, weight, bias = h.view_as(h), weight.view_as(weight), None if bias is None else bias.view_as(bias)
    inputs = [x for x in (h, weight, bias) if x is not None and x.requires_grad]
    nats = _plain(h, weight, bias, targets, mask)
    gradients = iter(torch.autograd.grad(nats, inputs, g, create_graph=True))
    return [next(gradients) if x is not None and x.requires_grad else None for x in (h, weight, bias)]


def _map(info, in_dims, h, weight, bias, targets, mask, gradients):
    def lead(x, dim):
        if x is None:
            return None
        return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

    h, weight, bias = (lead(x, dim) for x, dim in zip((h, weight, bias), in_dims, strict=False))
    targets, mask = (
        x if dim is None else x.movedim(dim, 0) for x, dim in ((targets, in_dims[3]), (mask, in_dims[4]))
    )
    return pieces(h, weight, bias, targets, mask, gradients), (0, 0 if gradients else None) + (
        (0, 0) if gradients else (None, None)
    )


torch.library.register_vmap("deeprnn::linear_cross_entropy", _map)
