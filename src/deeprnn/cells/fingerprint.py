"""What a step depends on besides its tensors' numbers: when any of it changes, the step is traced again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.weight_norm import WeightNorm

PLAIN = (bool, int, float, complex, str, bytes, type(None))
HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward hook",
    "_backward_hooks": "backward hook",
}
GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
OWN = frozenset(vars(nn.Module())) - {"training"} | {"_handle", "_arguments", "_sizes"}
"""attributes that every module and every cell has"""


def hook_of(module: nn.Module) -> str | None:
    """A hook that calls of the module or of its parts run, in words; None where there is none.

    `weight_norm` is one that computes a weight from parameters: it can be traced.
    """
    for name, part in module.named_modules():
        for attribute, kind in HOOKS.items():
            for hook in part.__dict__[attribute].values():
                if not isinstance(hook, WeightNorm):
                    return f"a {kind} on {name or 'the cell'}"
    if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        return "a global hook on all modules"
    return None


def settings(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path of a part, attribute, value) for everything that the module's parts hold besides tensors and modules."""
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if (name not in OWN and name[0] != "_") or name == "training":
                yield path, name, value


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """A hashable value that differs when the step may have changed."""
    found: list[Any] = []
    for part in module.modules():
        attributes = part.__dict__
        found.append(type(part))
        found += [frozen(value) for name, value in attributes.items() if name not in OWN]
        for home in (attributes["_parameters"], attributes["_buffers"]):
            found += [(name, None if t is None else (t.shape, t.dtype)) for name, t in home.items()]
        found.append(tuple(attributes["_modules"]))
    return (*found, *class_attributes(type(module)))


def class_attributes(kind: type) -> Iterator[Any]:
    """Functions and constants of a class and its parents up to torch's: they may be replaced as well."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for value in vars(base).values():
            yield value if isinstance(value, PLAIN) else id(value)


def frozen(value: Any, depth: int = 4) -> Any:
    """A hashable stand-in for an attribute: numbers and words, tensors by shape, other objects by what they hold."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if not depth:
        return id(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value), tuple(frozen(v, depth - 1) for v in value)
    if isinstance(value, dict):
        return tuple((frozen(k, depth - 1), frozen(v, depth - 1)) for k, v in value.items())
    inner = getattr(value, "__dict__", None)
    if isinstance(value, (type, nn.Module)) or not inner:
        return id(value)
    return id(value), frozen(inner, depth - 1)
