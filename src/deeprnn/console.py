"""The one console: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from deeprnn.errors import need

if TYPE_CHECKING:
    from rich.console import Console


@lru_cache(maxsize=2)
def console(stderr: bool = False) -> Console:
    """The shared rich console for stdout or stderr."""
    return need("rich.console", extra="cli").Console(stderr=stderr, highlight=False, soft_wrap=True)
