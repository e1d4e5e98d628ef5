"""A NADE's nats and gradients by kernels that hold one hidden layer at a time; `model/nade_loss.py` has the formula."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import device_of, index_of
from deeprnn.backends.cuda.driver import Kernel

MOST_HIDDEN, MOST_NOTES = 2048, 4096
"""hidden units that a warp holds in registers; notes that a frame may have"""
BY_FRAME, BY_NOTE = 128, 256
"""threads of a block"""


def why_not(W: Tensor) -> str | None:
    """Why the kernels cannot serve weights (…, O, D), None where they can."""
    notes, hidden = W.shape[-2:]
    if W.dtype != torch.float32:
        return f"they compute in float32, and W is {W.dtype}"
    if hidden > MOST_HIDDEN or notes > MOST_NOTES:
        return f"{hidden} hidden units and {notes} notes exceed {MOST_HIDDEN} and {MOST_NOTES}"
    return None


def forward(y: Tensor, b: Tensor, c: Tensor, W: Tensor, V: Tensor, nats: Tensor, delta: Tensor) -> None:
    """Fill nats (…, N) and delta (…, N, O); every tensor may have a leading dimension P."""
    _launch("nade_forward", y.shape[-2], BY_FRAME, W, [y, b, c, W, V], [nats, delta])


def backward(
    y: Tensor, c: Tensor, W: Tensor, V: Tensor, db: Tensor, dc: Tensor, dW: Tensor, dV: Tensor
) -> None:
    """Fill the gradients of c, W and V from that of b."""
    frames, (notes, hidden) = y.shape[-2], W.shape[-2:]
    if not frames:
        dW.zero_()
        dV.zero_()
        return
    marks = torch.empty(*y.shape[:-1], -(-notes // 32), dtype=torch.int32, device=y.device)
    inputs = [x.contiguous() for x in (y, c, W, V, db)]
    _launch("nade_frames_backward", frames, BY_FRAME, W, inputs, [dc, marks])
    blocks = notes * -(-hidden // 32)
    _launch("nade_notes_backward", blocks, BY_NOTE, W, [*inputs, marks], [dW, dV], ctypes.c_int64(frames))


def _launch(
    name: str,
    blocks: int,
    threads: int,
    W: Tensor,
    inputs: list[Tensor],
    outputs: list[Tensor],
    *further: Any,
) -> None:
    inputs = [x.contiguous() for x in inputs]  # kept until the launch: their addresses are taken
    arguments = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, *outputs)]
    members = W.shape[0] if W.dim() == 3 else 1
    if blocks and members:
        kernel = _kernel(name, *W.shape[-2:], index_of(W.device))
        kernel.launch(blocks, threads, [*arguments, *further], W.device, rows=members)


@lru_cache(maxsize=64)
def _kernel(name: str, notes: int, hidden: int, device: int) -> Kernel:
    macros = {"NOTES": str(notes), "HIDDEN": str(hidden)}
    return Kernel(nvrtc.cubin("training/nade.cu", macros, device_of(device).arch), name, device)
