"""Plans for compilers, which run these functions while they trace: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from deeprnn.cells.cell import CELLS
from deeprnn.cells.fingerprint import SCALARS, settings
from deeprnn.cells.held_tensors import held_tensors
from deeprnn.cells.plans import PLANS, PlanRequest, StepSignature, plan_of


def compiled_plan(
    handle: str, x_type: torch.dtype, dtype: torch.dtype, device: str, replaced: bool = False
) -> str:
    """The key of the plan of the cell with that handle, as it is now.

    `replaced`: other tensors, of the states' type, take the places of those that it holds.
    """
    cell = CELLS[handle]
    tensors = None
    if replaced:
        held = held_tensors(cell).items()
        tensors = {path: t.to(dtype) if t.is_floating_point() else t for path, t in held}
    return plan_of(cell, PlanRequest(x_type, dtype, device), tensors).key


def compiled_signature(key: str) -> StepSignature | None:
    """The layout of a plan, None for the plain loop."""
    return PLANS[key].signature


def compiled_may_write(key: str) -> bool:
    """Whether the step of a plan may write into its arguments."""
    return PLANS[key].may_write


def compiled_settings(handle: str) -> Sequence[tuple[tuple[str, ...], str, str, Any]]:
    """(path, attribute, kind, what it stands for) of a cell's settings: a compiler guards on them by comparing.

    Numbers and words are compared as they are, lists and dictionaries of them as tuples, functions by address.
    """
    found = []
    for path, name, value in settings(CELLS[handle]):
        found += _compared(tuple(path.split(".")) if path else (), name, value)
    return tuple(found)


def _compared(path: tuple[str, ...], name: str, value: Any, depth: int = 2) -> list[tuple[Any, ...]]:
    if isinstance(value, SCALARS):
        return [(path, name, "value", value)]
    if isinstance(value, (list, tuple)):
        return [(path, name, "list", tuple(value))] if all(isinstance(v, SCALARS) for v in value) else []
    if isinstance(value, dict):
        items = tuple(value.items())
        return (
            [(path, name, "dict", items)]
            if all(isinstance(v, SCALARS) for pair in items for v in pair)
            else []
        )
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return [(path, name, "id", id(value))]
    if not depth or isinstance(value, (Tensor, nn.Module)) or callable(value):
        return []
    inner = getattr(value, "__dict__", {}).items()
    return [
        entry for key, attribute in inner for entry in _compared((*path, name), key, attribute, depth - 1)
    ]


def compiled_step(handle: str) -> int:
    """The address of a cell's step, which a class may get anew."""
    return id(type(CELLS[handle]).step)


for _function in (compiled_plan, compiled_signature, compiled_may_write, compiled_settings, compiled_step):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while tracing, the answer kept
