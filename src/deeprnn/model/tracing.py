"""What torch.jit and torch.fx meet here: traces of plain operations, a leaf in a symbolic graph, no scripts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from deeprnn.errors import UserError


class Traceable(nn.Module):
    """A module that names torch.export where somebody wants it as TorchScript source."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by torch.jit.script, also for a module inside another."""
        raise UserError(
            f"torch.jit.script cannot compile {type(self).__name__}: use torch.export.export "
            "(deeprnn.model.export.export_program keeps batch and time open), or torch.jit.trace for one length"
        )


def traced_backend(backend: str, *inputs: object) -> str:
    """The backend to use: plain operations where they are recorded, or where inputs have their own of them.

    A trace that holds custom operators could only be loaded where deeprnn is installed, and tracing compares a
    run that records gradients with one that does not. Types with `__torch_function__` know torch's operations.
    """
    for x in inputs:
        if x is not None and not isinstance(x, torch.Tensor):
            return "reference"
    return "reference" if torch.jit.is_tracing() else backend  # type: ignore[attr-defined]


def is_tensor(x: object) -> bool:
    """Whether operations of torch take it: a tensor, or a type with its own `__torch_function__`."""
    return isinstance(x, torch.Tensor) or torch.overrides.has_torch_function((x,))


def is_symbolic(x: object) -> bool:
    """Whether torch.fx is tracing: there is no loop over a sequence of unknown length."""
    return isinstance(x, Proxy)


def leaf(module: nn.Module, x: Any, *inputs: Any) -> Any:
    """A node of torch.fx that calls the module, as for modules of torch.nn."""
    path = x.tracer.path_of_module(module)
    if not path:
        raise UserError(
            f"torch.fx cannot look into {type(module).__name__}: trace a module that contains it, where it is one "
            "node; torch.export takes it as it is"
        )
    return x.tracer.create_proxy("call_module", path, (x, *inputs), {})
