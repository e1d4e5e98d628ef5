"""The tensors that a cell holds, by path: read, found by name, and replaced in a twin of the cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def held_tensors(cell: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a cell holds: parameters, buffers and plain attributes, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, part in cell.named_modules():
        for home in (part._parameters, part._buffers, part.__dict__):
            for name, value in home.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    found[f"{path}.{name}" if path else name] = value
    return found


def held_tensor(cell: Any, path: str) -> Tensor:
    """The tensor at a path."""
    for name in path.split("."):
        cell = getattr(cell, name)
    return cell


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module that holds the given tensors, by path, and all else that `module` holds; that one stays as it is.

    `torch.func.functional_call` puts tensors into the module itself, which other threads may be using.
    """
    replaced = held_tensors(module)
    return _twin(module, {id(replaced[path]): tensor for path, tensor in tensors.items()}, {})


def _twin(module: nn.Module, given: Mapping[int, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        twin = made[id(module)] = object.__new__(type(module))
        for name, value in module.__dict__.items():
            twin.__dict__[name] = given.get(id(value), value)
        for home in ("_parameters", "_buffers"):
            twin.__dict__[home] = {name: given.get(id(t), t) for name, t in getattr(module, home).items()}
        parts = module._modules.items()
        twin.__dict__["_modules"] = {
            name: None if part is None else _twin(part, given, made) for name, part in parts
        }
    return made[id(module)]
