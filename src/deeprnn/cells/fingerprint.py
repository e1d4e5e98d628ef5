"""What a step depends on besides its tensors' numbers: when any of it changes, the step is traced again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.weight_norm import WeightNorm

from deeprnn.cells.opaque import content_of

SCALARS = (bool, int, float, complex, str, bytes, type(None))
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
LIBRARIES = ("torch", "numpy", "deeprnn.cells.cell", "builtins")
"""whose functions and classes stay as they are"""
OF_EVERY_CLASS = frozenset(
    {"__module__", "__doc__", "__annotations__", "__static_attributes__", "__dict__", "__weakref__"}
)
Held = list[Any] | None
"""collects what a fingerprint knows by its address, which another object may have after this one is gone"""


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


def scripted_part(module: nn.Module) -> str | None:
    """A part whose code is torch.jit's, in words; None where there is none."""
    scripted = (name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    return next((f"{name or 'the cell'} is compiled by torch.jit" for name in scripted), None)


def settings(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path of a part, attribute, value) for everything that the module's parts hold besides tensors and modules."""
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if (name not in OWN and name[0] != "_") or name == "training":
                yield path, name, value


def fingerprint(module: nn.Module, held: Held = None) -> tuple[Any, ...]:
    """A hashable value that differs when the step may have changed."""
    found: list[Any] = []
    first: dict[int, int] = {}  # of each tensor: two names may stand for one
    for part in module.modules():
        attributes = part.__dict__
        found.append(type(part))
        for name, value in attributes.items():
            if name not in OWN:
                known = _held(value, first) if isinstance(value, Tensor) else frozen(value, held)
                found.append((name, known))
        for home in (attributes["_parameters"], attributes["_buffers"]):
            found += [(name, None if t is None else _held(t, first)) for name, t in home.items()]
        found.append(
            tuple(attributes["_modules"].keys())
        )  # those of torch.jit cannot be gone through otherwise
        found += class_attributes(type(part), held)
    return tuple(found)


def outline(module: nn.Module) -> list[Any] | None:
    """What decides about a fingerprint, found in less time: while outlines are equal, so are fingerprints.

    None for a module with hooks, or with attributes that can become something else and stay the same object. Functions
    are known by their addresses, as in fingerprints.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [module]
    if any(getattr(torch_module, name) for name in GLOBAL_HOOKS):
        return None
    while waiting:
        part = waiting.pop()
        attributes, kind = part.__dict__, type(part)
        found += (kind, id(part))
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in attributes.items():
            if name not in OWN:
                if isinstance(value, SCALARS):
                    found += (name, type(value), value)
                elif isinstance(value, Tensor):
                    found += (name, id(value), value.shape, value.dtype)
                else:
                    return None
            elif value and name in HOOKS:
                return None
        for home in (attributes["_parameters"], attributes["_buffers"]):
            for name, t in home.items():
                found += (name, None) if t is None else (name, id(t), t.shape, t.dtype)
        parts = attributes["_modules"]
        if type(parts) is not dict:  # torch.jit's
            return None
        if parts:
            found.append(tuple(parts))
            waiting += [part for part in parts.values() if part is not None]
        if of_library(kind.__module__):  # and so are its parents
            continue
        for base in kind.__mro__:
            if not of_library(base.__module__):
                for name, value in vars(base).items():
                    if type(value) is FunctionType:
                        found += (name, id(value), id(value.__code__))
                    elif name not in OF_EVERY_CLASS:
                        if not isinstance(value, SCALARS):
                            return None
                        found += (name, type(value), value)
    return found


def _held(tensor: Tensor, first: dict[int, int]) -> tuple[Any, ...]:
    """A tensor that is found by its path: its shape and type, and which other name stands for it, if any."""
    return tensor.shape, tensor.dtype, first.setdefault(id(tensor), len(first))


def class_attributes(kind: type, held: Held = None) -> Iterator[Any]:
    """Functions and constants of a user's class and its parents: they may be replaced as well."""
    for base in kind.__mro__:
        if of_library(base.__module__):
            continue
        for name, value in vars(base).items():
            if type(value) is FunctionType:  # most are
                yield known_by_address(value, held)
                yield known_by_address(value.__code__, held)
            elif name not in OF_EVERY_CLASS:
                yield frozen(value, held)


def of_library(module: str | None) -> bool:
    """Whether code of a module of that name stays as it is."""
    return module is not None and (module.startswith("torch.") or module in LIBRARIES)


def frozen(value: Any, held: Held = None, depth: int = 4) -> Any:
    """A hashable stand-in for a value: numbers and words, tensors as themselves, other objects by what they hold.

    A tensor in a list, or anywhere else where no path leads to it, is part of what is recorded.
    """
    if isinstance(value, SCALARS):
        return type(value), value
    if isinstance(value, Tensor):
        return known_by_address(value, held)
    if (code := code_of(value)) is not None:  # tools that reload modules put new code into old functions
        return known_by_address(value, held), known_by_address(code, held)
    if isinstance(value, MethodType):
        return known_by_address(value.__self__, held), frozen(value.__func__, held)
    if not depth:  # a list or dictionary cannot be watched, and keeping it would keep what it holds
        containers = isinstance(value, (tuple, list, set, frozenset, deque, dict))
        return (type(value), len(value)) if containers else known_by_address(value, held)
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return type(value), tuple(frozen(v, held, depth - 1) for v in value)
    if isinstance(value, dict):
        return tuple((frozen(k, held, depth - 1), frozen(v, held, depth - 1)) for k, v in value.items())
    if (content := content_of(value)) is not None:
        return type(value), content
    if isinstance(value, nn.Module):  # beside the cell's parts, with tensors that are recorded as they are
        return known_by_address(value, held), tuple(_module_contents(value, held, depth - 1))
    if isinstance(value, partial):
        parts = value.func, value.args, value.keywords
        return tuple(frozen(part, held, depth - 1) for part in parts)
    address = known_by_address(value, held)
    if isinstance(value, type):  # as a name for settings, or for a helper
        return address, frozen(class_contents(value), held, depth - 1)
    inner = None if isinstance(value, ModuleType) else contents(value)
    return (address, frozen(inner, held, depth - 1)) if inner else address


def _module_contents(module: nn.Module, held: Held, depth: int) -> Iterator[Any]:
    for part in module.modules():
        yield type(part)
        for name, value in part.__dict__.items():
            if name not in OWN:
                yield name, frozen(value, held, depth)
        for home in (part._parameters, part._buffers):
            yield from (None if t is None else known_by_address(t, held) for t in home.values())


def class_contents(kind: type) -> dict[str, Any]:
    """What a user's class and its parents define."""
    bases = [base for base in reversed(kind.__mro__) if not of_library(base.__module__)]
    return {name: value for base in bases for name, value in vars(base).items() if name not in OF_EVERY_CLASS}


def code_of(value: Any) -> CodeType | None:
    """The code of a Python function, also where a class keeps it as a property or a static method."""
    function = function_of(value)
    return None if function is None else function.__code__


def function_of(value: Any) -> FunctionType | None:
    """The Python function that this is, or of which a class makes a property or a static method."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def contents(value: Any) -> dict[str, Any]:
    """The attributes that an object keeps, in a dictionary or in slots."""
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name in _names(vars(base).get("__slots__", ())):
            descriptor = vars(base).get(name)
            if isinstance(descriptor, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    found[name] = descriptor.__get__(value)
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        found.update(attributes)
    return found


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def known_by_address(value: Any, held: Held) -> int:
    """An object as itself and nothing else."""
    if held is not None:
        held.append(value)
    return id(value)
