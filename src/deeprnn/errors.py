"""Errors a person can act on."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from difflib import SequenceMatcher
from types import ModuleType


class UserError(ValueError):
    """Something the user can mend: the message names the thing, the value and the remedy."""


class MissingExtra(UserError, ImportError):
    """A feature was asked for whose packages are not installed."""


def need(module: str, extra: str = "") -> ModuleType:
    """Import `module` late, or say which extra brings it; without one, that it is to be installed by itself."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        requirement = f"'deeprnn[{extra}]'" if extra else package
        raise MissingExtra(f"this needs the package {package!r}: pip install {requirement}") from error


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """For an error about a name: " (did you mean 'dots'?)", empty where no known name is like it."""
    names = nearest(name, known, cutoff=cutoff)
    return f" (did you mean {names[0]!r}?)" if names else ""


def nearest(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Of the known names those most like `name`, best first; of a dotted one the last part counts as the whole does."""

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, name[:80], other).ratio()
        last = SequenceMatcher(None, name[:80].rpartition(".")[2], other.rpartition(".")[2]).ratio()
        return max(whole, last - 0.01)  # of two, the one whose whole name is alike

    rated = sorted(((likeness(other), other) for other in known), key=lambda pair: -pair[0])[:count]
    return [other for rating, other in rated if rating >= max(cutoff, rated[0][0] - 0.1)]
