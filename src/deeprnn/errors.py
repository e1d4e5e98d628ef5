"""Errors a person can act on."""

from __future__ import annotations

import importlib
from types import ModuleType


class UserError(ValueError):
    """Something the user can mend: the message names the thing, the value and the remedy."""


class MissingExtra(UserError, ImportError):
    """A feature was asked for whose packages are not installed."""


def need(module: str, extra: str) -> ModuleType:
    """Import `module` late, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"this needs the package {module.partition('.')[0]!r}: pip install 'deeprnn[{extra}]'"
        ) from error
