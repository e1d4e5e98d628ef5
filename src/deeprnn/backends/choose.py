"""Which backend serves a case: the fastest that can, or an error that says why not."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad

from deeprnn.backends.protocol import Case, DescribingBackend
from deeprnn.backends.registry import EXPORTABLE, PLAIN, PREFERENCE, load
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.cells.description import from_text
from deeprnn.errors import UserError

logger = logging.getLogger("deeprnn")


@constant_when_compiled
def choose(text: str, device: str, dtype: torch.dtype, precision: str = "fp32") -> str:
    """The name of the fastest backend that can serve a cell; the choice is logged once.

    Arguments are plain values: a compiler runs this while tracing and keeps the answer.
    """
    return _choose_once(text, device, dtype, precision)


@constant_when_compiled
def why_not(name: str, text: str, device: str, dtype: torch.dtype, precision: str = "fp32") -> str | None:
    """None if the backend can serve the cell, else the reason and the remedy."""
    return load(name).why_not(Case(from_text(text), torch.device(device), dtype, precision))


def describe(name: str, case: Case, batch: int) -> str:
    """What a backend would run for a case, in its own words; empty where it has one way only."""
    backend = load(name)
    return backend.describe(case, batch) if isinstance(backend, DescribingBackend) else ""


@lru_cache(maxsize=1024)
def _choose_once(text: str, device: str, dtype: torch.dtype, precision: str) -> str:
    case, reasons = Case(from_text(text), torch.device(device), dtype, precision), []
    for name in PREFERENCE.get(case.device.type, (PLAIN,)):
        reason = load(name).why_not(case)
        if reason is None:
            sizes = [stage.size for stage in case.cell.stages]
            note = f" ({'; '.join(reasons)})" if reasons else ""
            logger.info("backend %s for a cell of %s units on %s in %s%s", name, sizes, device, dtype, note)
            return name
        reasons.append(f"{name}: {reason}")
    raise UserError("no backend can serve this case: " + "; ".join(reasons))


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
        return PLAIN
    levels = [level.key() for level in _functorch.get_interpreter_stack() or ()]
    kinds = _functorch.TransformType
    if kinds.Jvp in levels or levels.count(kinds.Vmap) > 1:
        return PLAIN
    return None
