"""Finding files and showing progress."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")


def files_below(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Every file of a folder and its folders, in order, and what is none that can be read, with the reason."""
    files: list[Path] = []
    others: list[tuple[Path, str]] = []

    def unreadable(error: OSError) -> None:
        others.append((Path(error.filename), f"its files cannot be listed: {error.strerror}"))

    for root, folders, names in os.walk(folder, onerror=unreadable):
        links = [Path(root, name) for name in folders if os.path.islink(os.path.join(root, name))]
        others += [(link, "it is a link to a folder, which is not followed") for link in links]
        for path in (Path(root, name) for name in names):
            if os.path.isfile(path):
                files.append(path)
            elif path.is_symlink():
                others.append((path, "it is a link to nothing that can be read"))
            else:
                others.append((path, "it is no regular file"))  # a pipe could be waited on for ever
    return sorted(files), sorted(others)


def progress_bar(items: Iterable[Item], title: str) -> Iterable[Item]:
    """The items with a progress bar on a terminal's stderr; silently elsewhere, or without rich."""
    try:
        from rich.progress import track
    except ImportError:
        return items
    from deeprnn.console import console

    screen = console(stderr=True)
    return track(items, title, console=screen) if screen.is_terminal else items
