"""The one console: rich on a terminal, plain lines elsewhere.

What is printed is taken as it stands: markup and emoji codes are off, so that a file called `[/red]` or
`:dog:` is shown by its name. Style comes from `styled`. Names and labels may come from a stranger's run or file:
their control characters, which could retitle or clear a terminal, are shown as signs.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from deeprnn.errors import need

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

UNBOUNDED = 1000
"""columns of what is no terminal"""
_SIGNS = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    127: "\u2421",
    **dict.fromkeys(range(128, 160), "\ufffd"),
}


def printable(text: str) -> str:
    """The text with control characters, all but newlines and tabs, as signs that no terminal acts on."""
    return text.translate(_SIGNS)


class PrintableFormatter(logging.Formatter):
    """Messages of the log as they may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@lru_cache(maxsize=1)
def _console_class() -> type[Console]:
    class Printable(need("rich.console", extra="cli").Console):
        """A console whose every plain string is `printable`."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    return Printable


@lru_cache(maxsize=2)
def console(stderr: bool = False) -> Console:
    """The shared rich console for stdout or stderr: wraps at words on a terminal, never in a pipe or file."""
    make = _console_class()
    soft_wrap = not make(stderr=stderr).is_terminal
    return make(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text in several styles: plain strings, and pairs of a string and its style."""
    clean = [printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    return need("rich.text", extra="cli").Text.assemble(*clean)


def width() -> int:
    """Columns of the terminal; as many as anything needs where output goes to a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED


def show_rows(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print a table; where the terminal is too narrow the `spare` columns are left out, the first of them first."""
    shown = fitting(headings, rows, spare, gap=1)
    table = need("rich.table", extra="cli").Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in shown:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        cells = dict(zip(headings, row, strict=True))
        table.add_row(*(cells[heading] for heading in shown))
    show_table(table)


def fitting(
    headings: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], gap: int
) -> list[str]:
    """The headings whose columns fit the terminal side by side, `gap` characters apart."""
    sizes = {
        heading: max(len(heading), *(len(row[i]) for row in rows)) if rows else len(heading)
        for i, heading in enumerate(headings)
    }
    shown = list(headings)
    for heading in spare:
        if sum(sizes[name] + gap for name in shown) - gap <= width():
            break
        shown.remove(heading)
    return shown


def show_table(table: Any) -> None:
    """Print a table of rich: to fit a terminal, and as wide as it needs to be in a pipe or file."""
    screen = console()
    if not screen.is_terminal:
        screen = _console_class()(highlight=False, markup=False, emoji=False, width=UNBOUNDED)
    screen.print(table)


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Terms and what is to be said about them: side by side, or one below the other where the terminal is narrow."""
    term = max(len(name) for name, _ in rows)
    if term + max(len(text) for _, text in rows) + 4 <= width():
        return "\n".join(f"  {name:<{term}}  {text}" for name, text in rows)
    if term <= width() // 3:
        indent = " " * (term + 4)
        return "\n".join(
            fill(f"  {name:<{term}}  {text}", width(), subsequent_indent=indent) for name, text in rows
        )
    lines = [
        (f"  {name}", fill(text, width(), initial_indent=" " * 6, subsequent_indent=" " * 6))
        for name, text in rows
    ]
    return "\n".join(line for pair in lines for line in pair)


def program() -> str:
    """How a person types this command here: its name, or its path where the name would not be found."""
    called = Path(sys.argv[0])
    if called.name != "deeprnn" or shutil.which("deeprnn"):
        return "deeprnn"
    return os.path.relpath(called)
