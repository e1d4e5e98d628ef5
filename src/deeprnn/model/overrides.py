"""What a user has changed about a module: a method of its own, or hooks that run when it is called.

Whole sequences, losses over many classes and sampling are computed from a module's weights by a formula, without
calling the module. That is the same only while the module is the library's own: `changed` says when it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

C = TypeVar("C", bound=type)
Step = Callable[..., Sequence[Tensor]]
"""(x, h) or, where the input goes past a level, (x, h, skip)"""

HOOKS = (
    ("forward pre-hook", "_forward_pre_hooks", torch_module._global_forward_pre_hooks),
    ("forward hook", "_forward_hooks", torch_module._global_forward_hooks),
    ("backward hook", "_backward_pre_hooks", torch_module._global_backward_pre_hooks),
    ("backward hook", "_backward_hooks", torch_module._global_backward_hooks),
)
"""kinds of hooks, the attribute that holds a module's own, and those of all modules"""
WEIGHT_HOOKS = (WeightNorm, SpectralNorm, BasePruningMethod)
"""pre-hooks that compute a weight from other parameters: once a sequence is as good as once a step"""


def formula(*methods: str) -> Callable[[C], C]:
    """Class decorator: remember these methods, which a formula elsewhere follows without calling them."""

    def remember(cls: C) -> C:
        cls.formula_methods = {name: getattr(cls, name) for name in methods}  # type: ignore[attr-defined]
        return cls

    return remember


def own_method(module: nn.Module, *methods: str) -> str | None:
    """The first of these methods that a subclass, the instance itself or a patch has replaced, else None."""
    originals = getattr(module, "formula_methods", None)
    if originals is None:  # no module of ours stands here
        return methods[0]
    for name in methods:
        if name in module.__dict__ or getattr(type(module), name) is not originals[name]:
            return name
    return None


def hook_kind(module: nn.Module, weights: bool = False) -> str | None:
    """The kind of hook that a call of this module runs, else None; those that compute weights only if asked for."""
    if (kind := own_hook(module, weights)) is not None:
        return kind
    return next((f"global {kind}" for kind, _, of_all_modules in HOOKS if of_all_modules), None)


def own_hook(module: nn.Module, weights: bool = False) -> str | None:
    """The kind of a hook that a user registered on this module, None without one."""
    for kind, attribute, _ in HOOKS:
        for hook in getattr(module, attribute).values():
            if weights or not isinstance(hook, WEIGHT_HOOKS):
                return kind
    return None


def changed(module: nn.Module, *methods: str, weights: bool = False) -> str | None:
    """Why a formula would not give what calling this module gives, None where it does.

    It follows these methods. `weights` counts hooks that compute a weight as well; without it the formula
    begins with `refresh_weights`.
    """
    if (name := own_method(module, *methods)) is not None:
        return f"{type(module).__name__} has its own {name}"
    kind = hook_kind(module, weights)
    return None if kind is None else f"{type(module).__name__} has a {kind}"


def refresh_weights(module: nn.Module) -> None:
    """Compute the weights that hooks keep (`weight_norm`, `spectral_norm`, pruning), as calling the module would."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WEIGHT_HOOKS):
            hook(module, ())


def unroll_calls(
    step: Step,
    x: Tensor,
    h0: Tensor,
    reset: Tensor | None = None,
    skip: Tensor | None = None,
    state_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The plain loop over any step, which gives the layers of ⊕ with the state last: states, and other layers.

    `state_mask` is dropout on h_{t-1}: (B, H), one for the sequence, or (T, B, H).
    """
    mask_per_step = state_mask is not None and state_mask.dim() == 3
    inputs = {"x": x, "reset": reset, "skip": skip, "mask": state_mask if mask_per_step else None}
    over_time = {name: tensor for name, tensor in inputs.items() if tensor is not None}

    def advance(h: Tensor, at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if "reset" in at:
            h = torch.where(at["reset"].unsqueeze(-1), 0.0, h)
        mask = at.get("mask", state_mask)
        skipped = [at["skip"]] if "skip" in at else []  # a user's forward(x, h) need not know of it
        *others, h = step(at["x"], h if mask is None else h * mask, *skipped)
        return h, torch.cat([*others, h], -1)

    if torch.compiler.is_exporting():  # the loop as one operator: time stays a dynamic dimension
        from torch._higher_order_ops.scan import scan

        layers = scan(lambda h, at: ((z := advance(h, at))[0].clone(), z[1]), h0, over_time, dim=0)[1]
    else:
        h, rows = h0, []
        for t in range(x.shape[0]):
            h, row = advance(h, {name: tensor[t] for name, tensor in over_time.items()})
            rows.append(row)
        layers = torch.stack(rows) if rows else h0.unsqueeze(0)[:0]
    inner = layers.shape[-1] - h0.shape[-1]
    return layers[..., inner:], layers[..., :inner]
