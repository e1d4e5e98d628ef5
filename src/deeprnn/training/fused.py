"""GPU kernels for the training update: counter-based weight noise, and clipping with the SGD step.

Noise is a pure function of (member's seed, update, element): no generator state, so it can be captured in a
CUDA graph and a resumed run sees the same numbers. Each function has a plain version in torch beside it,
which runs anywhere and defines what the kernel must give.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.launch import device_of
from deeprnn.errors import UserError

BLOCKS = 64  # blocks that share one member's squared norm
_pointer, _long, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> Kernel:
    return Kernel(nvrtc.cubin("update.cu", {}, device_of(device).arch), name, device)


def _launch(name: str, device: torch.device, blocks: int, members: int, arguments: list) -> None:
    index = torch.cuda.current_device() if device.index is None else device.index
    _kernel(name, index).launch(blocks, 256, arguments, torch.device("cuda", index), rows=members)


def _check(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise UserError(f"{name} of shape {tuple(x.shape)} must be contiguous: call .contiguous()")


def add_noise(
    parameters: Tensor, std: float, seeds: Tensor, step: Tensor, out: Tensor, count: int | None = None
) -> Tensor:
    """out = parameters + N(0, std²) on the first `count` elements of each member, parameters elsewhere.

    parameters, out: (P, N) float32; seeds: (P,) int64; step: int64 with one element, on the same device.
    """
    members, size = parameters.shape
    count = size if count is None else count
    if parameters.device.type != "cuda":
        return out.copy_(plain_noise(parameters, std, seeds, step, count))
    _check(parameters=parameters, out=out, seeds=seeds)
    arguments = [_pointer(x.data_ptr()) for x in (parameters, out, seeds, step)]
    arguments += [_float(std), _long(size), _long(count)]
    if parameters.numel():
        _launch("add_noise", parameters.device, -(-size // 1024), members, arguments)
    return out


def clipped_step(
    parameters: Tensor,
    gradient: Tensor,
    rate: Tensor,
    threshold: float,
    multipliers: Tensor | None = None,
    norm: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """parameters -= rate · min(1, threshold/‖g‖) · multipliers · gradient, in place; returns ‖g‖ (P,).

    parameters, gradient: (P, N); rate: (P,); multipliers: (N,) or None; threshold 0 never clips. `norm` (P,)
    and `scratch` (P, BLOCKS) may be given so that nothing is allocated.
    """
    if parameters.device.type != "cuda":
        updated, length = plain_step(parameters, gradient, rate, threshold, multipliers)
        parameters.copy_(updated)
        return length if norm is None else norm.copy_(length)
    members, size = parameters.shape
    norm = parameters.new_empty(members) if norm is None else norm
    scratch = parameters.new_empty(members, BLOCKS) if scratch is None else scratch
    rate = rate.to(torch.float32).contiguous()
    _check(parameters=parameters, gradient=gradient, norm=norm, scratch=scratch)
    if multipliers is not None:
        _check(multipliers=multipliers)
    if not parameters.numel():
        return norm.zero_()
    device = parameters.device
    arguments = [_pointer(gradient.data_ptr()), _pointer(scratch.data_ptr()), _long(size)]
    _launch("squares", device, BLOCKS, members, arguments)
    pointers = [parameters, gradient, scratch, rate, multipliers, norm]
    arguments = [_pointer(None if x is None else x.data_ptr()) for x in pointers]
    _launch("clipped_step", device, BLOCKS, members, [*arguments, _float(threshold), _long(size)])
    return norm


# ---- the same in plain torch


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of 32-bit words held in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)  # each below 2^48: int64 holds them
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 on 32-bit words held in int64 tensors."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def plain_normal(seeds: Tensor, step: Tensor, count: int) -> Tensor:
    """The normal numbers (P, count) that `add_noise` adds."""
    index = torch.arange(-(-count // 4), device=seeds.device).expand(len(seeds), -1)
    when = step.reshape(()).to(torch.int64).expand_as(index)
    word = 0xFFFFFFFF
    key = [(seeds & word)[:, None].expand_as(index), ((seeds >> 32) & word)[:, None].expand_as(index)]
    words = philox([index & word, index >> 32, when & word, (when >> 32) & word], key)
    found = []
    for a, b in ((words[0], words[1]), (words[2], words[3])):
        u, angle = ((a >> 8).double() + 0.5) / 2**24, (b >> 8).double() * (2 * torch.pi / 2**24)
        radius = torch.sqrt(-2 * torch.log(u))
        found += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(found, -1).flatten(1)[:, :count].float()


def plain_noise(parameters: Tensor, std: float, seeds: Tensor, step: Tensor, count: int) -> Tensor:
    """`add_noise` in torch operations."""
    noisy = parameters.clone()
    noisy[:, :count] += std * plain_normal(seeds, step, count)
    return noisy


def plain_step(
    parameters: Tensor, gradient: Tensor, rate: Tensor, threshold: float, multipliers: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`clipped_step` in torch operations: the new parameters and the norms."""
    norm = torch.linalg.vector_norm(gradient, dim=1)
    scale = rate.to(parameters.dtype)
    if threshold:
        scale = scale * (threshold / norm).clamp(max=1.0)
    factor = scale[:, None] if multipliers is None else scale[:, None] * multipliers
    return parameters - factor * gradient, norm
