"""What a result was made by: versions and machine, the command, and the commit of the code."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware that a number may depend on."""
    import numpy
    import torch

    out = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    if device.startswith("cuda"):
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = torch.version.cuda
    return out


def command_line() -> str:
    """The command that runs now, as one would type it; the program by its name, wherever it is installed."""
    program, *words = sys.argv or [""]
    path = Path(program)
    if path.name == "__main__.py":
        return shlex.join(["python", "-m", path.parent.name, *words])
    if path.suffix == ".py":
        return shlex.join(["python", path.name if path.is_absolute() else program, *words])
    return shlex.join([path.name, *words])


def commit() -> str | None:
    """The commit of the code, None outside a git checkout; `+` marks changes or new files anywhere in the package.

    $DEEPRNN_COMMIT goes first: where code was copied to another machine, only who copied it knows.
    """
    if variable := os.environ.get("DEEPRNN_COMMIT"):
        return variable
    file = Path(__file__)
    package = file.parents[1]
    head = _git(package, "rev-parse", "--short=12", "HEAD")
    if head is None or _git(package, "ls-files", "--error-unmatch", str(file)) is None:
        return None  # installed somewhere inside another project's checkout
    changes = _git(package, "status", "--porcelain", "--", str(package))
    return None if changes is None else f"{head}+" if changes else head


def has_changes(path: Path) -> bool:
    """Whether a file lies in a git checkout and is in no commit as it is now."""
    return bool(_git(path.absolute().parent, "status", "--porcelain", "--", path.name))


def _git(folder: Path, *words: str) -> str | None:
    """What git says there, None where it does not know.

    Without optional locks: a kill during `git status` would leave the user's checkout with a stale index.lock.
    """
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
