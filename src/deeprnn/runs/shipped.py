"""Trained runs that come with the package, so that there is something to hear before anything is trained."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "shipped"


def names() -> list[str]:
    """What `deeprnn generate NAME` plays without training."""
    return sorted(path.parent.name for path in FOLDER.glob("*/run.json"))


def find(path: str | Path) -> Path | None:
    """The folder of a shipped run by its bare name, which any file or folder of the user's goes before."""
    name = str(path)
    return FOLDER / name if name in names() and not Path(name).exists() else None


def is_shipped(folder: Path) -> bool:
    """Whether a run belongs to the package, which nobody may change."""
    return FOLDER in folder.resolve().parents
