"""The one console: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from deeprnn.errors import need

if TYPE_CHECKING:
    from rich.console import Console


@lru_cache(maxsize=2)
def console(stderr: bool = False) -> Console:
    """The shared rich console for stdout or stderr: wraps at words on a terminal, never in a pipe or file."""
    make = need("rich.console", extra="cli").Console
    return make(stderr=stderr, highlight=False, soft_wrap=not make(stderr=stderr).is_terminal)


def program() -> str:
    """How a person types this command here: its name, or its path where the name would not be found."""
    called = Path(sys.argv[0])
    if called.name != "deeprnn" or shutil.which("deeprnn"):
        return "deeprnn"
    return os.path.relpath(called)
