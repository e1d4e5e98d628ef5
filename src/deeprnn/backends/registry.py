"""The backends by name, imported when first asked for, and the order in which a device tries them."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from deeprnn.backends.protocol import Backend
from deeprnn.errors import UserError

REFERENCE = "reference"
"""by operations that every transformation of torch's can follow"""
EXPORTABLE = "scan"
"""a loop that can be written down"""
MODULES = {
    REFERENCE: "deeprnn.backends.reference",
    EXPORTABLE: "deeprnn.backends.scan",
    "cpu": "deeprnn.backends.cpu",
    "cuda": "deeprnn.backends.cuda",
    "stepwise": "deeprnn.backends.cuda.stepwise",
}
"""each has one object `BACKEND`"""
PREFERENCE = {"cpu": ("cpu", REFERENCE), "cuda": ("cuda", "stepwise", REFERENCE)}
"""by device; others have the plain one"""


def check_plain(backend: str, what: str) -> None:
    """Refuse a backend that was asked for where only the plain loop can serve; `what` ends the sentence."""
    if backend not in ("auto", REFERENCE):
        raise UserError(f"backend {backend!r} cannot serve {what}")


@lru_cache(maxsize=16)
def load_backend(name: str) -> Backend:
    """The backend of that name."""
    if name not in MODULES:
        raise UserError(f"unknown backend {name!r}: known are auto, {', '.join(MODULES)}")
    return import_module(MODULES[name]).BACKEND
