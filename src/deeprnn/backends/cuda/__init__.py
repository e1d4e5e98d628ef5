"""CUDA backend: one persistent kernel per direction unrolls the whole sequence.

`deeprnn::unroll_cuda` and `deeprnn::unroll_cuda_backward` are ordinary torch operators with fake, autograd
and vmap rules. A population of P models is a leading dimension of every tensor and a dimension of the
kernel: each thread-block cluster serves one member. docs/kernels.md explains the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends import TransitionSpec, cpu
from deeprnn.backends.cuda import launch
from deeprnn.backends.cuda.planning import UNITS, Device, Plan, make_plan
from deeprnn.backends.gradients import weight_gradients

PRECISIONS = ("fp32", "bf16")


def why_not(
    spec: TransitionSpec,
    device: torch.device | str,
    dtype: torch.dtype,
    T: int,
    B: int,
    P: int = 1,
    precision: str = "fp32",
) -> str | None:
    """None where this backend can serve, else the reason and the remedy in a sentence."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the cuda backend cannot serve tensors on {device}: move them to a GPU with .cuda()"
    if not torch.cuda.is_available():
        return "no CUDA device is available: use backend='cpu'"
    if torch.version.cuda is None:
        return "the cuda backend needs an NVIDIA GPU: use backend='reference'"
    if dtype != torch.float32:
        return f"the cuda backend computes in float32, not {dtype}: cast the model with .float()"
    if precision not in PRECISIONS:
        return f"the cuda backend has no precision {precision!r}: use one of {', '.join(PRECISIONS)}"
    if unknown := [unit for unit in spec.units if unit not in UNITS]:
        return f"the cuda backend has no unit {unknown[0]!r} (it has {', '.join(UNITS)}): use backend='reference'"
    capability = torch.cuda.get_device_capability(device)
    if capability < (7, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0: use backend='reference'"
    chosen = _plan_of(spec, B, P, precision, device, backward=False)
    if chosen.shared > launch.device_of(_index(device)).shared_limit:
        return (
            f"layers of {max(spec.sizes)} units do not fit a block's shared memory: use backend='reference'"
        )
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _plan_of(
    spec: TransitionSpec, B: int, P: int, precision: str, device: torch.device, backward: bool
) -> Plan:
    return make_plan(spec, B, P, precision == "bf16", backward, launch.device_of(_index(device)))


def plan(
    spec: TransitionSpec, B: int = 1, P: int = 1, precision: str = "fp32", device: torch.device | None = None
) -> dict[str, Any]:
    """What would run, for reports: path, cluster, threads, rows a cluster, bytes on chip, both directions.

    Without a device the answer is for an H200.
    """
    described: dict[str, Any] = {"sizes": list(spec.sizes), "batch": B, "members": P, "precision": precision}
    for name, backward in (("forward", False), ("backward", True)):
        target = Device() if device is None else launch.device_of(_index(device))
        chosen = make_plan(spec, B, P, precision == "bf16", backward, target)
        described[name] = {
            "path": chosen.path,
            "cluster": chosen.cluster,
            "threads": chosen.threads,
            "rows": chosen.rows,
            "shared_bytes": chosen.shared,
            "text": chosen.describe(),
        }
    return described


def unroll(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    precision: str = "fp32",
) -> tuple[Tensor, Tensor]:
    """States h (T, B, H) and intermediate layers z (T, B, ΣM - H)."""
    return unroll_cuda(A, h0, list(W), list(S), reset, *spec.text, precision)


@torch.library.custom_op("deeprnn::unroll_cuda", mutates_args=(), device_types="cuda")
def unroll_cuda(
    A: Tensor,
    h0: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    reset: Tensor | None,
    units: str,
    shortcuts: str,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """([P,] T, B, ΣM) -> h ([P,] T, B, H), z ([P,] T, B, ΣM - H)."""
    h, z = _outputs(A, h0)
    if h.numel() == 0:
        return h, z
    spec = TransitionSpec.from_text([w.shape[-2] for w in W], units, shortcuts)
    marks = None if reset is None else reset.contiguous()
    A_, h0_, W_, S_, h_, z_ = _led((A, h0, W, S, h, z), A.dim() == 4)
    launch.forward(A_, h0_, W_, S_, marks, spec, precision == "bf16", h_, z_)
    return h, z


@unroll_cuda.register_fake
def _(A, h0, W, S, reset, units, shortcuts, precision):
    return _outputs(A, h0)


@torch.library.custom_op("deeprnn::unroll_cuda_backward", mutates_args=(), device_types="cuda")
def unroll_cuda_backward(
    dh: Tensor,
    dz: Tensor | None,
    h: Tensor,
    z: Tensor,
    h0: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    reset: Tensor | None,
    units: str,
    shortcuts: str,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """Gradients before each unit dA ([P,] T, B, ΣM) and of the first state dh0 ([P,] B, H)."""
    dA, dh0 = _gradients(h, z, h0)
    if h.numel() == 0:
        return dA, dh0.zero_()
    spec = TransitionSpec.from_text([w.shape[-2] for w in W], units, shortcuts)
    marks = None if reset is None else reset.contiguous()
    dh_, dz_, h_, z_, W_, S_, dA_, dh0_ = _led((dh, dz, h, z, W, S, dA, dh0), h.dim() == 4)
    launch.backward(dh_, dz_, h_, z_, W_, S_, marks, spec, precision == "bf16", dA_, dh0_)
    return dA, dh0


@unroll_cuda_backward.register_fake
def _(dh, dz, h, z, h0, W, S, reset, units, shortcuts, precision):
    return _gradients(h, z, h0)


def _outputs(A: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    lead, width = A.shape[:-1], h0.shape[-1]
    return A.new_empty(*lead, width), A.new_empty(*lead, A.shape[-1] - width)


def _gradients(h: Tensor, z: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(*h.shape[:-1], h.shape[-1] + z.shape[-1]), h.new_empty(h0.shape)


def _led(values: Sequence[Any], population: bool) -> list[Any]:
    """Every tensor with a leading member dimension, of size 1 without a population."""
    if population:
        return list(values)
    return [
        None if v is None else v.unsqueeze(0) if isinstance(v, Tensor) else [x.unsqueeze(0) for x in v]
        for v in values
    ]


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h0, W, S, reset, ctx.units, ctx.shortcuts, ctx.precision = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(*output, h0, reset, *W, *S)
    ctx.set_materialize_grads(False)


def _unroll_backward(ctx: Any, dh: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
    h, z, h0, reset, *matrices = ctx.saved_tensors
    W, S = matrices[: ctx.layers], matrices[ctx.layers :]
    dh = torch.zeros_like(h) if dh is None else dh
    dA, dh0 = unroll_cuda_backward(dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts, ctx.precision)
    dW: Any = [None] * len(W)
    dS: Any = [None] * len(S)
    if any(ctx.needs_input_grad[2]) or any(ctx.needs_input_grad[3]):  # one flag per tensor of each list
        sizes = [w.shape[-2] for w in W]
        dW, dS = weight_gradients(dA, h, z, h0, reset, sizes, [c == "1" for c in ctx.shortcuts])
    return dA, dh0, dW, dS, None, None, None, None


unroll_cuda.register_autograd(_unroll_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts, _ = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(dh, dz, h, z, h0, reset, *W, *S)


def _second_backward(ctx: Any, g_dA: Tensor, g_dh0: Tensor) -> tuple[Any, ...]:
    """A second derivative follows the plain version, which runs on any device."""
    return (*cpu._second_backward(ctx, g_dA, g_dh0), None)


unroll_cuda_backward.register_autograd(_second_backward, setup_context=_save_backward)


# ---- vmap: the mapped dimension becomes the leading population dimension


def _lead(value: Any, dim: Any, size: int) -> Any:
    """`value` with its mapped dimension first; what is not mapped is repeated without a copy."""
    if isinstance(value, list):
        return [_lead(v, d, size) for v, d in zip(value, dim, strict=True)]
    if value is None:
        return None
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


@unroll_cuda.register_vmap
def _(info, in_dims, A, h0, W, S, reset, units, shortcuts, precision):
    moved = [_lead(v, d, info.batch_size) for v, d in zip((A, h0, W, S), in_dims[:4], strict=True)]
    marks = reset if reset is None or in_dims[4] is None else reset.movedim(in_dims[4], 0)
    return unroll_cuda(*moved, marks, units, shortcuts, precision), (0, 0)


@unroll_cuda_backward.register_vmap
def _(info, in_dims, dh, dz, h, z, h0, W, S, reset, units, shortcuts, precision):
    moved = [_lead(v, d, info.batch_size) for v, d in zip((dh, dz, h, z, h0, W, S), in_dims[:7], strict=True)]
    marks = reset if reset is None or in_dims[7] is None else reset.movedim(in_dims[7], 0)
    return unroll_cuda_backward(*moved, marks, units, shortcuts, precision), (0, 0)
