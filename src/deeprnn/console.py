"""The one console: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprnn.errors import need

if TYPE_CHECKING:
    from rich.console import Console


@lru_cache(maxsize=2)
def console(stderr: bool = False) -> Console:
    """The shared rich console for stdout or stderr: wraps at words on a terminal, never in a pipe or file."""
    make = need("rich.console", extra="cli").Console
    return make(stderr=stderr, highlight=False, soft_wrap=not make(stderr=stderr).is_terminal)


def escape(text: str) -> str:
    """A person's own words, such as a file's name, kept from being read as rich's [markup]."""
    return need("rich.markup", extra="cli").escape(text)


def show_table(table: Any) -> None:
    """Print a table: to fit a terminal, and as wide as it needs to be in a pipe or file."""
    screen = console()
    if not screen.is_terminal:
        screen = need("rich.console", extra="cli").Console(highlight=False, width=1000)
    screen.print(table)


def program() -> str:
    """How a person types this command here: its name, or its path where the name would not be found."""
    called = Path(sys.argv[0])
    if called.name != "deeprnn" or shutil.which("deeprnn"):
        return "deeprnn"
    return os.path.relpath(called)
