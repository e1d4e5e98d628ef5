"""GPU kernels for the training update: counter-based weight noise, and the step with everything about it.

Noise is a pure function of (member's seed, update, element): no generator state, so it can be captured in a
CUDA graph and a resumed run sees the same numbers. The plain versions in torch run anywhere and define what
the kernels must give: `plain_noise` here, `Optimiser.step` for the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import device_of, nvidia
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.errors import UserError
from deeprnn.training.recipe import OptimiserPart

_pointer, _long, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> Kernel:
    return Kernel(nvrtc.cubin("training/update.cu", {}, device_of(device).arch), name, device)


def _launch(name: str, device: torch.device, blocks: int, members: int, arguments: list) -> None:
    index = torch.cuda.current_device() if device.index is None else device.index
    _kernel(name, index).launch(blocks, 256, arguments, torch.device("cuda", index), rows=members)


def _check(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_contiguous():
            raise UserError(f"{name} of shape {tuple(x.shape)} must be contiguous: call .contiguous()")


def add_noise(
    parameters: Tensor,
    std: float | Tensor,
    seeds: Tensor,
    step: Tensor,
    out: Tensor,
    count: int | None = None,
) -> Tensor:
    """out = parameters + N(0, std²) on the first `count` elements of each member, parameters elsewhere.

    parameters, out: (P, N) float32; seeds: (P,) int64; step: int64 with one element, on the same device; std: one
    number, or each member's own (P,) float32.
    """
    members, size = parameters.shape
    count = size if count is None else count
    std = std if isinstance(std, Tensor) else torch.full((members,), std, device=parameters.device)
    if not nvidia(parameters.device):
        return out.copy_(plain_noise(parameters, std, seeds, step, count))
    _check(parameters=parameters, out=out, seeds=seeds, std=std)
    arguments: list = [_pointer(x.data_ptr()) for x in (parameters, out, seeds, step, std)]
    arguments += [_long(size), _long(count)]
    if parameters.numel():
        _launch("add_noise", parameters.device, -(-size // 1024), members, arguments)
    return out


RULES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}


def take_step(
    part: OptimiserPart,
    parameters: Tensor,
    gradient: Tensor,
    buffers: Sequence[Tensor],
    factor: Tensor,
    rate: Tensor,
    correction: Tensor | None = None,
    multipliers: Tensor | None = None,
    average: tuple[Tensor, Tensor] | None = None,
) -> None:
    """One step of P members in one pass over memory, in place, on a GPU.

    parameters, gradient and the rule's `buffers` (velocity; or m and v): (P, N) float32; factor, rate and
    Adam's bias correction: (P,); multipliers: (N,); `average`: the averaged parameters (P, N) and the weight
    of the new ones. The gradient is taken times `factor`, and as zero where that is 0, whatever it holds.
    `Optimiser.step` says the same in torch operations.
    """
    members, size = parameters.shape
    small = [None if x is None else x.to(torch.float32).contiguous() for x in (factor, rate, correction)]
    running, weight = (None, None) if average is None else (average[0], average[1].to(torch.float32))
    first, second = [*buffers, None, None][:2]
    for name, x in {"parameters": parameters, "gradient": gradient, "average": running}.items():
        if x is not None:
            _check(**{name: x})
    pointers = [parameters, gradient, first, second, running, *small, multipliers, weight]
    arguments: list = [_pointer(None if x is None else x.data_ptr()) for x in pointers]
    adam = RULES[part.name] == 2
    a, b = part.betas if adam else (part.momentum, 0.0)
    decay = part.weight_decay if part.name == "adamw" else 0.0
    arguments += [ctypes.c_int(RULES[part.name]), _float(a), _float(b), _float(part.epsilon), _float(decay)]
    if parameters.numel():
        blocks = min(-(-size // 1024), 1024)
        _launch("take_step", parameters.device, blocks, members, [*arguments, _long(size)])


SUMS = ("nats", "count", "norm", "clipped", "updates")
"""rows of an epoch's sums, in the order of `Row` in update.cu"""


def account(
    norm: Tensor, nats: Tensor, count: Tensor, clip: Tensor, update: Tensor, sums: Tensor, bad: Tensor
) -> tuple[Tensor, Tensor]:
    """Clip, judge and count P members' gradients in one launch: the factor that is left (P,), and which are finite.

    norm, nats, clip: (P,) float32; count: int64, one or (P,); sums: (5, P) float64 and bad: (P,) int64, both changed.
    `Updater._judge` says the same in torch operations.
    """
    norm, nats, clip = norm.float(), nats.float().contiguous(), clip.contiguous()
    count = count.to(torch.int64).contiguous()
    members = len(norm)
    factor = torch.empty_like(norm)
    good = torch.empty(members, dtype=torch.bool, device=norm.device)
    pointers = [norm, nats, count, clip, update, factor, good, sums, bad]
    sizes = [members, sums.stride(0), int(count.dim() > 0)]
    arguments: list = [_pointer(x.data_ptr()) for x in pointers]
    _launch("account", norm.device, -(-members // 256), 1, arguments + [_long(n) for n in sizes])
    return factor, good


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
    pairs = []
    for a, b in ((words[0], words[1]), (words[2], words[3])):
        u, angle = ((a >> 8).double() + 0.5) / 2**24, (b >> 8).double() * (2 * torch.pi / 2**24)
        radius = torch.sqrt(-2 * torch.log(u))
        pairs += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(pairs, -1).flatten(1)[:, :count].float()


def plain_noise(parameters: Tensor, std: float | Tensor, seeds: Tensor, step: Tensor, count: int) -> Tensor:
    """`add_noise` in torch operations."""
    noisy = parameters.clone()
    scale = std[:, None] if isinstance(std, Tensor) else std
    noisy[:, :count] += scale * plain_normal(seeds, step, count)
    return noisy
