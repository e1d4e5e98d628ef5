"""CUDA backend: one persistent kernel per direction unrolls the whole sequence.

`deeprnn::unroll_cuda` and `deeprnn::unroll_cuda_backward` are ordinary torch operators with fake, autograd
and vmap rules. A population of P models is a leading dimension of every tensor and a dimension of the
kernel: each thread-block cluster serves one member. docs/kernels.md explains the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from deeprnn import backends
from deeprnn.backends import TransitionSpec, cpu, reference
from deeprnn.backends.cuda import launch
from deeprnn.backends.cuda.driver import index_of
from deeprnn.backends.cuda.largest import Look
from deeprnn.backends.cuda.planning import UNITS, Device, Plan, make_plan
from deeprnn.backends.gradients import (
    batched_by_autograd,
    inside_functional_grad,
    inside_vmap,
    weight_gradients,
)

PRECISIONS = ("fp32", "bf16")
PLAIN = (Tensor, torch.nn.Parameter)
DEVICE = "cuda"  # tests without a GPU name another


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
    if chosen.shared > launch.device_of(index_of(device)).shared_limit:
        return (
            f"layers of {max(spec.sizes)} units do not fit a block's shared memory: use backend='reference'"
        )
    return None


def _plan_of(
    spec: TransitionSpec, B: int, P: int, precision: str, device: torch.device, backward: bool
) -> Plan:
    return make_plan(spec, B, P, precision == "bf16", backward, launch.device_of(index_of(device)))


def plan(
    spec: TransitionSpec, B: int = 1, P: int = 1, precision: str = "fp32", device: torch.device | None = None
) -> dict[str, Any]:
    """What would run, for reports: path, cluster, threads, rows a cluster, bytes on chip, both directions.

    Without a device the answer is for an H200.
    """
    described: dict[str, Any] = {"sizes": list(spec.sizes), "batch": B, "members": P, "precision": precision}
    for name, backward in (("forward", False), ("backward", True)):
        target = Device() if device is None else launch.device_of(index_of(device))
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
    """States h (T, B, H) and intermediate layers z (T, B, ΣM - H).

    Inside torch.func.grad and its kin, where custom operators have no gradient, the reference serves.
    """
    if torch.compiler.is_compiling():
        return unroll_cuda(A, h0, list(W), list(S), reset, *spec.text, precision)
    if inside_functional_grad():
        return reference.unroll(A, h0, list(W), list(S), spec, reset)
    if inside_vmap() or not torch.is_grad_enabled():
        return unroll_cuda(A, h0, list(W), list(S), reset, *spec.text, precision)
    return Direct.apply(A, h0, reset, spec.text, precision, len(W), *W, *S)


# Defined by schema: torch.library.custom_op would import the compiler, seconds, at the first call, and look
# at every argument again at each.
torch.library.define(
    "deeprnn::unroll_cuda",
    "(Tensor A, Tensor h0, Tensor[] W, Tensor[] S, Tensor? reset, str units, str shortcuts, str precision) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "deeprnn::unroll_cuda_backward",
    "(Tensor dh, Tensor? dz, Tensor h, Tensor z, Tensor h0, Tensor[] W, Tensor[] S, Tensor? reset, "
    "str units, str shortcuts, str precision) -> (Tensor, Tensor)",
)
unroll_cuda = torch.ops.deeprnn.unroll_cuda.default
unroll_cuda_backward = torch.ops.deeprnn.unroll_cuda_backward.default


def _forward(
    A: Tensor,
    h0: Tensor,
    W: list[Tensor],
    S: list[Tensor],
    reset: Tensor | None,
    units: str,
    shortcuts: str,
    precision: str,
    looked: Look | None = None,
) -> tuple[Tensor, Tensor]:
    """([P,] T, B, ΣM) -> h ([P,] T, B, H), z ([P,] T, B, ΣM - H). `looked`: see `launch.look_ahead`."""
    h, z = _outputs(A, h0)
    if h.numel() == 0:
        return h, z
    spec = _spec_of(tuple(w.shape[-2] for w in W), units, shortcuts)
    marks = None if reset is None else reset.contiguous()
    with _on(A):
        launch.forward(A, h0, W, S, marks, spec, precision == "bf16", h, z, looked=looked)
    return h, z


torch.library.impl("deeprnn::unroll_cuda", "cuda", _forward)


@torch.library.register_fake("deeprnn::unroll_cuda")
def _(A, h0, W, S, reset, units, shortcuts, precision):
    return _outputs(A, h0)


def _backward(
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
    spec = _spec_of(tuple(w.shape[-2] for w in W), units, shortcuts)
    marks = None if reset is None else reset.contiguous()
    with _on(h):
        launch.backward(dh, dz, h, z, W, S, marks, spec, precision == "bf16", dA, dh0)
    return dA, dh0


torch.library.impl("deeprnn::unroll_cuda_backward", "cuda", _backward)


@torch.library.register_fake("deeprnn::unroll_cuda_backward")
def _(dh, dz, h, z, h0, W, S, reset, units, shortcuts, precision):
    return _gradients(h, z, h0)


def _outputs(A: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    *lead, total = A.shape
    width = h0.shape[-1]
    return A.new_empty((*lead, width)), A.new_empty((*lead, total - width))


def _gradients(h: Tensor, z: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(*h.shape[:-1], h.shape[-1] + z.shape[-1]), h.new_empty(h0.shape)


@lru_cache(maxsize=1024)
def _spec_of(sizes: tuple[int, ...], units: str, shortcuts: str) -> TransitionSpec:
    return TransitionSpec.from_text(sizes, units, shortcuts)


def _on(x: Tensor) -> AbstractContextManager:
    """Make the tensor's GPU the current one, where it is not."""
    if not x.is_cuda or torch.cuda.current_device() == x.device.index:
        return nullcontext()
    return torch.cuda.device(x.device)


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h0, W, S, reset, ctx.units, ctx.shortcuts, ctx.precision = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(*output, h0, reset, *W, *S)
    ctx.set_materialize_grads(False)


def _unroll_backward(ctx: Any, dh: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
    weights = any(ctx.needs_input_grad[2]) or any(ctx.needs_input_grad[3])  # one flag per tensor of each list
    found = _all_gradients(ctx, ctx.saved_tensors, dh, dz, unroll_cuda_backward, weights)
    return (*found, None, None, None, None)


def _all_gradients(
    ctx: Any,
    saved: Sequence[Any],
    dh: Tensor | None,
    dz: Tensor | None,
    operator: Callable[..., tuple[Tensor, Tensor]],
    weights: bool,
) -> tuple[Tensor, Tensor, list[Any], list[Any]]:
    """dA, dh0, and where they are wanted the gradients of W and S."""
    h, z, h0, reset, *matrices = saved
    W, S = matrices[: ctx.layers], matrices[ctx.layers :]
    dh = torch.zeros_like(h) if dh is None else dh
    if batched_by_autograd(dh, dz):
        operator = cpu.plain_backward
    dA, dh0 = operator(dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts, ctx.precision)
    if not weights:
        return dA, dh0, [None] * len(W), [None] * len(S)
    sizes = [w.shape[-2] for w in W]
    return dA, dh0, *weight_gradients(dA, h, z, h0, reset, sizes, [c == "1" for c in ctx.shortcuts])


torch.library.register_autograd("deeprnn::unroll_cuda", _unroll_backward, setup_context=_save)


class Direct(torch.autograd.Function):
    """The operator and its backward without the dispatcher and torch.library's autograd, for plain tensors.

    Where a second derivative is wanted or something looks on (fake tensors, a tracer, a subclass), the
    operators themselves are called.
    """

    @staticmethod
    def forward(ctx: Any, A, h0, reset, text, precision, layers, *matrices):
        W, S = list(matrices[:layers]), list(matrices[layers:])
        operator: Callable[..., Any] = _forward if _plain(A, h0, *matrices) else unroll_cuda
        output = operator(A, h0, W, S, reset, *text, precision)
        _save(ctx, (A, h0, W, S, reset, *text, precision), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (dh, dz), saved = grads, ctx.saved_tensors
        plain = not torch.is_grad_enabled() and _plain(*saved[:2], dh, dz)
        operator = _backward if plain else unroll_cuda_backward
        dA, dh0, dW, dS = _all_gradients(ctx, saved, dh, dz, operator, any(ctx.needs_input_grad[6:]))
        return dA, dh0, None, None, None, None, *dW, *dS


def _plain(*tensors: Tensor | None) -> bool:
    """Whether nothing but the kernel can be meant: no subclass, no mode that watches operators, no vmap.

    The gradients of one backward pass may be mapped over although its forward pass was not.
    """
    if _len_torch_dispatch_stack() or inside_vmap() or batched_by_autograd(*tensors):
        return False
    return all(x is None or (type(x) in PLAIN and x.device.type == DEVICE) for x in tensors)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts, _ = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(dh, dz, h, z, h0, reset, *W, *S)


def _second_backward(ctx: Any, g_dA: Tensor, g_dh0: Tensor) -> tuple[Any, ...]:
    """A second derivative follows the plain version, which runs on any device."""
    return (*cpu._second_backward(ctx, g_dA, g_dh0), None)


torch.library.register_autograd(
    "deeprnn::unroll_cuda_backward", _second_backward, setup_context=_save_backward
)


# ---- vmap: the mapped dimension becomes the leading population dimension


def _map_forward(info, in_dims, A, h0, W, S, reset, units, shortcuts, precision):
    values = zip((A, h0, W, S), in_dims[:4], strict=True)
    moved = [cpu._lead(value, dim, info.batch_size) for value, dim in values]
    marks = cpu._marks_lead(reset, in_dims[4])
    return unroll_cuda(*moved, marks, units, shortcuts, precision), (0, 0)


def _map_backward(info, in_dims, dh, dz, h, z, h0, W, S, reset, units, shortcuts, precision):
    values = zip((dh, dz, h, z, h0, W, S), in_dims[:7], strict=True)
    moved = [cpu._lead(value, dim, info.batch_size) for value, dim in values]
    marks = cpu._marks_lead(reset, in_dims[7])
    return unroll_cuda_backward(*moved, marks, units, shortcuts, precision), (0, 0)


torch.library.register_vmap("deeprnn::unroll_cuda", _map_forward)
torch.library.register_vmap("deeprnn::unroll_cuda_backward", _map_backward)


# torch.compile cannot follow the registry's late import: once this module is there, it finds the function itself.
backends._FUNCTIONS["cuda"] = unroll
