"""Which of torch's transformations are at work around a call: vmap, functional gradients, tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[attr-defined]
from torch._C._functorch import TransformType, get_interpreter_stack, is_legacy_batchedtensor
from torch.autograd import forward_ad

from deeprnn.backends.registry import EXPORTABLE, REFERENCE

EXACT_TYPES = (Tensor, torch.nn.Parameter)
F = TypeVar("F", bound=Callable)


def constant_when_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without its import of the compiler, which takes a second.

    A compiler calls the function while tracing, with plain values, and keeps what it returns.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inside_functional_grad() -> bool:
    """Whether torch.func.grad, vjp or jvp is at work."""
    if torch.compiler.is_compiling():
        return False
    return any(level.key() != TransformType.Vmap for level in get_interpreter_stack() or ())


def inside_function_transform() -> bool:
    """Whether any of torch.func's transformations is at work."""
    return bool(get_interpreter_stack())


def no_modes_or_transforms() -> bool:
    """Whether no compiler, no mode that watches operators and no transformation is at work."""
    return not (torch.compiler.is_compiling() or _len_torch_dispatch_stack() or get_interpreter_stack())


def plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether nothing but the numbers can be meant: no subclass, no mode that watches operators, no transformation.

    The gradients of one backward pass may be mapped over although its forward pass was not.
    """
    return no_modes_or_transforms() and all(
        x is None or (type(x) in EXACT_TYPES and not is_legacy_batchedtensor(x)) for x in tensors
    )


def batched_by_autograd(*gradients: Tensor | None) -> bool:
    """Whether `torch.autograd.grad(..., is_grads_batched=True)` is at work, as in a vectorized jacobian.

    Its older vmap has no rules for custom operators; plain formulas serve it.
    """
    return any(g is not None and is_legacy_batchedtensor(g) for g in gradients)


def required_by_transformation() -> str | None:
    """The backend that a surrounding transformation asks for, None where any will do.

    Forward-mode differentiation, jvp and a vmap inside another need plain operations, and export needs a loop that it
    can write down.
    """
    if torch.compiler.is_exporting():
        return EXPORTABLE
    if torch.compiler.is_compiling():
        return None
    if torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0:
        return REFERENCE
    levels = [level.key() for level in get_interpreter_stack() or ()]
    if TransformType.Jvp in levels or levels.count(TransformType.Vmap) > 1:
        return REFERENCE
    return None
