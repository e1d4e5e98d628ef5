"""Is what we would publish whole? The wheel in an empty environment runs the quick tests of the sdist: make dist.

python scripts/check_dist.py dist
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("pytest", "hypothesis", "httpx", "scipy")
TESTS = (
    "tests/test_architecture.py",
    "tests/test_cli.py",
    "tests/model/test_equations.py",
    "tests/model/test_models.py",
    "tests/model/test_layers.py",
    "tests/backends/test_cpu.py",
    "tests/data/test_importing.py",
    "tests/data/test_midi.py",
    "tests/training/test_recipe.py",
    "tests/runs/test_checkpoint.py",
    "tests/render",
    "tests/web/test_api.py",
)
"""a minute or two, and something of every part: models, kernels, data, recipes, runs, pictures, the page"""


def run(*words: str | Path, cwd: Path = ROOT) -> None:
    """A command whose failure is ours; this checkout's sources are out of its reach."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(word) for word in words], cwd=cwd, env=env, check=True)


def only(folder: Path, pattern: str) -> Path:
    """The one file of a kind."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder} holds {len(found)} files {pattern}: build one of each")
    return found[0]


def missing_from_wheel(wheel: Path) -> list[str]:
    """Files of the package in this checkout that the wheel lacks: sources of kernels, recipes, the page's files."""
    listed = subprocess.run(
        ["git", "ls-files", "src/deeprnn"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours = {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        return sorted(ours - set(archive.namelist()))


def main(folder: Path) -> None:
    """Look inside, install, test."""
    wheel, sdist = only(folder, "*.whl"), only(folder, "*.tar.gz")
    if missing := missing_from_wheel(wheel):
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="deeprnn-dist-") as place:
        python = Path(place) / "env" / "bin" / "python"
        venv.create(python.parent.parent, with_pip=True)
        pip = (
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            ROOT / "constraints.txt",
        )
        run(*pip, f"{wheel}[all]", *TOOLS)
        with tarfile.open(sdist) as archive:
            archive.extractall(place, filter="data")
        source = Path(place) / sdist.name.removesuffix(".tar.gz")
        (source / "src").rename(Path(place) / "src-is-not-used")
        where = "import deeprnn, sys; assert deeprnn.__file__.startswith(sys.prefix), deeprnn.__file__"
        run(python, "-c", where, cwd=source)
        run(python, "-m", "deeprnn", "doctor", cwd=source)
        run(python, "-m", "pytest", *TESTS, cwd=source)
    print(f"{wheel.name} and {sdist.name} are whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
