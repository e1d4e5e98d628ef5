"""Settings and inputs, checked: what is refused is named, with its value and the remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from deeprnn.backends.registry import MODULES as BACKENDS
from deeprnn.backends.unrolling import autocasts
from deeprnn.errors import UserError
from deeprnn.model import units
from deeprnn.model.tracing import is_symbolic
from deeprnn.model.units import Unit


class LayerSettings(TypedDict):
    """Arguments of the constructors of `nn.RNN`'s kind that are the same for every drop-in layer."""

    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    backend: str


def check_settings(
    input_size: int,
    hidden_size: int,
    num_layers: int,
    bias: bool,
    batch_first: bool,
    dropout: float,
    bidirectional: bool,
    backend: str,
) -> None:
    """Refuse what `nn.RNN` refuses, with its types of error and its words, and the value."""
    flags = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
    for kind, settings in ((bool, flags), (int, sizes)):
        for name, value in settings.items():
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                shown = f"{type(value).__name__} ({value!r})"
                raise TypeError(f"{name} should be of type {kind.__name__}, got: {shown}")
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be greater than zero, got {value}")
    number = isinstance(dropout, (int, float)) and not isinstance(dropout, bool)
    if not number or not 0 <= dropout <= 1:
        raise ValueError(f"dropout should be a number in range [0, 1] representing the probability of an element "
                         f"being zeroed, got {dropout!r}")  # fmt: skip
    if dropout > 0 and num_layers == 1:
        warnings.warn(f"dropout={dropout} acts between levels and num_layers=1 has none: use num_layers > 1",
                      stacklevel=calls_inside() + 1)  # fmt: skip
    if not isinstance(backend, str) or (backend != "auto" and backend not in BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")


def calls_inside() -> int:
    """How many of the calls that led here are this package's own: a warning is of who called the first."""
    frame, count = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "deeprnn":
        frame, count = frame.f_back, count + 1
    return count


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse an input of another type than the parameters', unless autocast changes both, in `nn.RNN`'s words."""
    if x.dtype != dtype and not (x.is_floating_point() and autocasts(x.device.type)):
        other = f", or convert model: model.to({x.dtype})" if x.dtype.is_floating_point else ""
        raise ValueError(
            f"{name} input dtype ({x.dtype}) does not match weight dtype ({dtype}). Convert input: "
            f"input.to({dtype}){other}"
        )


def as_sizes(intermediate_sizes: int | Sequence[int]) -> tuple[int, ...]:
    """One width or several, as a tuple."""
    if isinstance(intermediate_sizes, (tuple, list)):
        return tuple(intermediate_sizes)
    if isinstance(intermediate_sizes, int):
        return (intermediate_sizes,)
    raise TypeError(f"intermediate_sizes must be one size or a list of sizes, got {intermediate_sizes!r}")


def name_unit(argument: str, unit: str | Unit) -> str:
    """The unit's name, or an error that says which argument was wrong."""
    try:
        return units.named(unit)
    except UserError as error:
        raise ValueError(f"{argument}: {error}") from None


def check_input(name: str, x: Tensor, size: int, symbols: bool, lead: str) -> None:
    """Refuse vectors of another size, and symbols that are no integers; `lead` is what comes before in the shape."""
    if is_symbolic(x):
        return
    if symbols and (x.is_floating_point() or x.is_complex()):
        raise UserError(f"{name} must be integer symbols ({lead}), got {x.dtype} of shape {tuple(x.shape)}")
    if not symbols and (not x.dim() or x.shape[-1] != size):
        raise UserError(f"{name} must be ({lead}, {size}), got {tuple(x.shape)}")
    if lead == "T, B" and x.dim() != (2 if symbols else 3):
        shape = "(T, B)" if symbols else f"(T, B, {size})"
        raise UserError(f"{name} must be {shape}, got {tuple(x.shape)}: call ⊕ itself for one step")
