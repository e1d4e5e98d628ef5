"""Which backend serves a case: the fastest that can, or an error that says why not."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from deeprnn.backends.call import Case
from deeprnn.backends.protocol import DescribingBackend
from deeprnn.backends.registry import PREFERENCE, REFERENCE, load_backend
from deeprnn.backends.transformations import constant_when_compiled
from deeprnn.cells.description import from_text
from deeprnn.errors import UserError

logger = logging.getLogger("deeprnn")


@constant_when_compiled
def fastest_backend(text: str, device: str, dtype: torch.dtype, precision: str = "fp32") -> str:
    """The name of the fastest backend that can serve a cell; the choice is logged once.

    Arguments are plain values: a compiler runs this while tracing and keeps the answer.
    """
    return _fastest_backend(text, device, dtype, precision)


@constant_when_compiled
def why_not(name: str, text: str, device: str, dtype: torch.dtype, precision: str = "fp32") -> str | None:
    """None if the backend can serve the cell, else the reason and the remedy."""
    return load_backend(name).why_not(Case(from_text(text), torch.device(device), dtype, precision))


def describe(name: str, case: Case, batch: int) -> str:
    """What a backend would run for a case, in its own words; empty where it has one way only."""
    backend = load_backend(name)
    return backend.describe(case, batch) if isinstance(backend, DescribingBackend) else ""


@lru_cache(maxsize=1024)
def _fastest_backend(text: str, device: str, dtype: torch.dtype, precision: str) -> str:
    case, reasons = Case(from_text(text), torch.device(device), dtype, precision), []
    for name in PREFERENCE.get(case.device.type, (REFERENCE,)):
        reason = load_backend(name).why_not(case)
        if reason is None:
            sizes = [stage.size for stage in case.cell.stages]
            note = f" ({'; '.join(reasons)})" if reasons else ""
            logger.info("backend %s for a cell of %s units on %s in %s%s", name, sizes, device, dtype, note)
            return name
        reasons.append(f"{name}: {reason}")
    raise UserError("no backend can serve this case: " + "; ".join(reasons))
