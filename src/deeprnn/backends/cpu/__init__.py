"""CPU backend: hand-written backward through time, no autograd graph per step.

`deeprnn::unroll_cpu` and `deeprnn::unroll_cpu_backward` are ordinary torch operators: they have fake
(shape) rules for torch.compile, an autograd formula and a vmap rule. A population of P models is a
leading dimension of every tensor; its members are computed one by one with the very calls that serve a
single model, so that a member's numbers do not depend on its company. A second backward differentiates
`cpu_plain.differentiable_backward` instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deeprnn.backends import reference
from deeprnn.backends.cpu import plain as cpu_plain
from deeprnn.backends.gradients import (
    aligned,
    batched_by_autograd,
    inside_functional_grad,
    inside_vmap,
    weight_gradients,
)

if TYPE_CHECKING:
    from deeprnn.backends import TransitionSpec

DTYPES = (torch.float32, torch.float64)
UNITS = tuple(cpu_plain.APPLY)
WORTH_COMPILING = 1_000_000  # multiplications
PATH = os.environ.get("DEEPRNN_CPU", "auto")  # "auto", "plain" or "fast"


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
    if torch.device(device).type != "cpu":
        return f"the cpu backend cannot serve tensors on {device}: move them to the CPU"
    if dtype not in DTYPES:
        return f"the cpu backend computes in float32 and float64, not {dtype}: cast the model with .float()"
    if precision not in ("auto", "fp32"):
        return f"the cpu backend has no precision {precision!r}: use precision='fp32'"
    unknown = [unit for unit in spec.units if unit not in UNITS]
    if unknown:
        return (
            f"the cpu backend has no unit {unknown[0]!r} (it has {', '.join(UNITS)}): use backend='reference'"
        )
    return None


def describe_choice() -> str:
    """One line: which of the two CPU paths runs, and why."""
    if not llvmlite_found():
        return "plain PyTorch calls with a hand-written backward; faster with llvmlite: pip install 'deeprnn[fastcpu]'"
    if PATH == "plain":
        return "plain PyTorch calls with a hand-written backward, as asked for by DEEPRNN_CPU=plain"
    return (
        f"machine code made for each shape with llvmlite; plain PyTorch calls below {WORTH_COMPILING:,} "
        "multiplications a call"
    )


@lru_cache(maxsize=1)
def llvmlite_found() -> bool:
    """Whether the package that makes machine code is installed, new enough to have untyped pointers."""
    try:
        major, minor = metadata.version("llvmlite").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (0, 45)


def _compiled(h: Tensor, W: Sequence[Tensor], S: Sequence[Tensor]) -> bool:
    """Whether this call is worth machine code: by its own size alone, so that equal calls give equal bits.

    The size is that of one member: a population must not change what its members compute.
    """
    if PATH == "plain" or not llvmlite_found():
        return False
    work = h.shape[-3] * h.shape[-2] * sum(w.shape[-1] * w.shape[-2] for w in (*W, *S))
    return PATH == "fast" or work >= WORTH_COMPILING


def _fast() -> Any:
    from deeprnn.backends.cpu.jit import run as cpu_fast

    return cpu_fast


def unroll(
    A: Tensor,
    h0: Tensor,
    W: Sequence[Tensor],
    S: Sequence[Tensor],
    spec: TransitionSpec,
    reset: Tensor | None = None,
    precision: str = "auto",
) -> tuple[Tensor, Tensor]:
    """States h (T, B, H) and intermediate layers z (T, B, ΣM - H).

    Inside torch.func.grad and its kin, where custom operators have no gradient, the reference serves.
    """
    if inside_functional_grad():
        return reference.unroll(A, h0, list(W), list(S), spec, reset)
    if torch.compiler.is_compiling() or inside_vmap() or not torch.is_grad_enabled():
        return unroll_cpu(A, h0, list(W), list(S), reset, *spec.text)
    return Direct.apply(A, h0, reset, spec.text, len(W), *W, *S)


# Defined by schema: torch.library.custom_op would import the compiler, a second, at the first call.
torch.library.define(
    "deeprnn::unroll_cpu",
    "(Tensor A, Tensor h0, Tensor[] W, Tensor[] S, Tensor? reset, str units, str shortcuts) -> (Tensor, Tensor)",
)
torch.library.define(
    "deeprnn::unroll_cpu_backward",
    "(Tensor dh, Tensor? dz, Tensor h, Tensor z, Tensor h0, Tensor[] W, Tensor[] S, Tensor? reset, "
    "str units, str shortcuts) -> (Tensor, Tensor)",
)
unroll_cpu = torch.ops.deeprnn.unroll_cpu.default
unroll_cpu_backward = torch.ops.deeprnn.unroll_cpu_backward.default


@torch.library.impl("deeprnn::unroll_cpu", "cpu")
def _forward(
    A: Tensor, h0: Tensor, W: list[Tensor], S: list[Tensor], reset: Tensor | None, units: str, shortcuts: str
) -> tuple[Tensor, Tensor]:
    """([P,] T, B, ΣM) -> h ([P,] T, B, H), z ([P,] T, B, ΣM - H)."""
    h, z = _outputs(A, h0, W)
    A, h0, W, S = A.contiguous(), h0.contiguous(), _dense(W), _dense(S)
    names, flags = units.split(","), _flags(shortcuts)
    if _compiled(h, W, S):
        _fast().forward(A, h0, W, S, _whole(reset), names, flags, h, z)
        return h, z
    for p in range(A.shape[0]) if A.dim() == 4 else [None]:
        member: list[Any] = _member((A, h0, W, S), p)
        out: list[Any] = _member((h, z), p)
        marks = _marks(reset, p)
        cpu_plain.forward(*member, reset=marks, units=names, shortcuts=flags, h=out[0], z=out[1])
        _put_back((h, z), out, p)
    return h, z


@torch.library.register_fake("deeprnn::unroll_cpu")
def _(A, h0, W, S, reset, units, shortcuts):
    return _outputs(A, h0, W)


@torch.library.impl("deeprnn::unroll_cpu_backward", "cpu")
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
) -> tuple[Tensor, Tensor]:
    """Gradients before each unit dA ([P,] T, B, ΣM) and of the first state dh0 ([P,] B, H)."""
    dA, dh0 = _gradients(h, z, h0)
    dh, dz, W, S = dh.contiguous(), None if dz is None else dz.contiguous(), _dense(W), _dense(S)
    h, z = h.contiguous(), z.contiguous()
    names, flags = units.split(","), _flags(shortcuts)
    if _compiled(h, W, S):
        _fast().backward(dh, dz, h, z, W, S, _whole(reset), names, flags, dA, dh0)
        return dA, dh0
    for p in range(h.shape[0]) if h.dim() == 4 else [None]:
        member: list[Any] = _member((dh, dz, h, z, W, S), p)
        out: list[Any] = _member((dA, dh0), p)
        marks = _marks(reset, p)
        cpu_plain.backward(*member, reset=marks, units=names, shortcuts=flags, dA=out[0], dh0=out[1])
        _put_back((dA, dh0), out, p)
    return dA, dh0


@torch.library.register_fake("deeprnn::unroll_cpu_backward")
def _(dh, dz, h, z, h0, W, S, reset, units, shortcuts):
    return _gradients(h, z, h0)


def _outputs(A: Tensor, h0: Tensor, W: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lead, width = A.shape[:-1], h0.shape[-1]
    return A.new_empty(*lead, width), A.new_empty(*lead, A.shape[-1] - width)


def _gradients(h: Tensor, z: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(*h.shape[:-1], h.shape[-1] + z.shape[-1]), h.new_empty(h0.shape)


def _flags(shortcuts: str) -> list[bool]:
    return [flag == "1" for flag in shortcuts]


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _member(values: Sequence[Any], p: int | None) -> list[Any]:
    """Member p of each tensor (or list of tensors); everything as it is without a population."""
    if p is None:
        return list(values)
    return [
        None
        if value is None
        else aligned(value[p])
        if isinstance(value, Tensor)
        else [aligned(v[p]) for v in value]
        for value in values
    ]


def _put_back(whole: Sequence[Tensor], member: Sequence[Tensor], p: int | None) -> None:
    """Copy a member's results to their place where alignment made them stand apart."""
    if p is None:
        return
    for target, value in zip(whole, member, strict=True):
        if target[p].data_ptr() != value.data_ptr():
            target[p].copy_(value)


def _whole(reset: Tensor | None) -> Tensor | None:
    return None if reset is None else reset.contiguous()


def _marks(reset: Tensor | None, p: int | None) -> Tensor | None:
    return reset if reset is None or reset.dim() == 2 or p is None else reset[p]


# ---- autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h0, W, S, reset, ctx.units, ctx.shortcuts = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(*output, h0, reset, *W, *S)
    ctx.set_materialize_grads(False)


def _unroll_backward(ctx: Any, dh: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
    h, z, h0, reset, *matrices = ctx.saved_tensors
    W, S = matrices[: ctx.layers], matrices[ctx.layers :]
    dh = torch.zeros_like(h) if dh is None else dh
    operator = plain_backward if batched_by_autograd(dh, dz) else unroll_cpu_backward
    dA, dh0 = operator(dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts)
    sizes = [w.shape[-2] for w in W]
    dW, dS = weight_gradients(dA, h, z, h0, reset, sizes, _flags(ctx.shortcuts))
    return dA, dh0, dW, dS, None, None, None


torch.library.register_autograd("deeprnn::unroll_cpu", _unroll_backward, setup_context=_save)


class Direct(torch.autograd.Function):
    """The operator and its backward without the autograd layer of torch.library, which costs 0.2 ms a call."""

    @staticmethod
    def forward(ctx: Any, A, h0, reset, text, layers, *matrices):
        W, S = list(matrices[:layers]), list(matrices[layers:])
        output = unroll_cpu(A, h0, W, S, reset, *text)
        _save(ctx, (A, h0, W, S, reset, *text), output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dA, dh0, dW, dS, *_ = _unroll_backward(ctx, *grads)
        return dA, dh0, None, None, None, *dW, *dS


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dh, dz, h, z, h0, W, S, reset, ctx.units, ctx.shortcuts = inputs
    ctx.layers = len(W)
    ctx.save_for_backward(dh, dz, h, z, h0, reset, *W, *S)


def _second_backward(ctx: Any, g_dA: Tensor, g_dh0: Tensor) -> tuple[Any, ...]:
    """Differentiate the hand-written backward by letting autograd follow its plain version."""
    *states, reset = ctx.saved_tensors[:6]
    matrices = ctx.saved_tensors[6:]
    leaves = [None if x is None else x.detach().requires_grad_() for x in (*states, *matrices)]
    *given, W, S = *leaves[:5], leaves[5 : 5 + ctx.layers], leaves[5 + ctx.layers :]
    with torch.enable_grad():
        dA, dh0 = plain_backward(*given, W, S, reset, ctx.units, ctx.shortcuts)
        wanted = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad((dA, dh0), wanted, (g_dA, g_dh0), allow_unused=True))
    grads = [None if x is None else next(grads) for x in leaves]
    weights = grads[5:]
    return *grads[:5], weights[: ctx.layers], weights[ctx.layers :], None, None, None


def plain_backward(dh, dz, h, z, h0, W, S, reset, units, shortcuts, *_) -> tuple[Tensor, Tensor]:
    """As the operator, by torch calls on any device, which autograd and vmap can follow."""
    values, names, flags = (dh, dz, h, z, h0, W, S), units.split(","), _flags(shortcuts)
    results = []
    for p in range(h.shape[0]) if h.dim() == 4 else [None]:
        member: list[Any] = _member(values, p)
        marks = _marks(reset, p)
        results.append(cpu_plain.differentiable_backward(*member, reset=marks, units=names, shortcuts=flags))
    if h.dim() == 3:
        return results[0]
    dA, dh0 = zip(*results, strict=True)
    return torch.stack(dA), torch.stack(dh0)


torch.library.register_autograd(
    "deeprnn::unroll_cpu_backward", _second_backward, setup_context=_save_backward
)


# ---- vmap: the mapped dimension becomes the leading population dimension


def _lead(value: Any, dim: Any, size: int) -> Any:
    """`value` with its mapped dimension first; what is not mapped is repeated."""
    if isinstance(value, list):
        return [_lead(v, d, size) for v, d in zip(value, dim, strict=True)]
    if value is None:
        return None
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _marks_lead(reset: Tensor | None, dim: int | None) -> Tensor | None:
    return reset if reset is None or dim is None else reset.movedim(dim, 0)


def _map_forward(info, in_dims, A, h0, W, S, reset, units, shortcuts):
    values = zip((A, h0, W, S), in_dims[:4], strict=True)
    moved = [_lead(value, dim, info.batch_size) for value, dim in values]
    return unroll_cpu(*moved, _marks_lead(reset, in_dims[4]), units, shortcuts), (0, 0)


def _map_backward(info, in_dims, dh, dz, h, z, h0, W, S, reset, units, shortcuts):
    values = zip((dh, dz, h, z, h0, W, S), in_dims[:7], strict=True)
    moved = [_lead(value, dim, info.batch_size) for value, dim in values]
    return unroll_cpu_backward(*moved, _marks_lead(reset, in_dims[7]), units, shortcuts), (0, 0)


torch.library.register_vmap("deeprnn::unroll_cpu", _map_forward)
torch.library.register_vmap("deeprnn::unroll_cpu_backward", _map_backward)
