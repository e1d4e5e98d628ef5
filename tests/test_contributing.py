"""The first contribution that CONTRIBUTING describes, made to a copy of the project as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A first contribution")[2]
PLACES = {  # what each file has behind the new line
    "src/deeprnn/cells/functions.py": "]  # fmt: skip\n",
    "tests/model/test_units.py": "]\nDOUBLE",
    "docs/guide/models.md": "`sigmoid`, `tanh`",
}
CHECKS = [
    r"model/test_units.py::test_value\[silu",
    r"model/test_units.py::test_gradients_to_second_order\[silu",
    r"model/test_units.py::test_every_elementwise_unit_has_a_row",
    r"test_guide_models.py::test_every_unit",
    r"backends/test_cpu.py::test_a_functions_value_and_slopes\[silu",
    r"backends/test_cpu.py::test_a_function_at_the_ends_of_its_range\[silu",
    r"backends/test_grid.py::test_cpu\[.*-silu-",
    r"backends/test_grid.py::test_the_reference.*-silu-",
    r"backends/test_emulated.py::test_every_unit",
    r"backends/test_random_cells.py::test_random_cells_use_every_function",
    r"generation/test_generate.py::test_the_quick_step",
    r"cells/test_shipped.py::test_every_unit.*indrnn",
]


def steps() -> dict[str, str]:
    """The code of each step by the file it goes into."""
    found = re.findall(r"^\d\. `([^`]+)`.*?```\w+\n(.*?)^ *```$", RECIPE, re.S | re.M)
    return {file: "".join(line[3:] + "\n" for line in code.splitlines()) for file, code in found}


def contribute(folder: Path) -> None:
    """A copy of the project with the recipe's lines in it."""
    for part in ("src", "tests", "docs/guide"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, code in steps().items():
        text = (folder / file).read_text(encoding="utf-8")
        before, after = text.split(PLACES[file])
        line = code if file.endswith(".py") else code.replace("\n", " ")
        (folder / file).write_text(before + line + PLACES[file] + after, encoding="utf-8")


def test_the_recipe_touches_the_table_its_test_row_and_a_line_of_docs():
    assert list(steps()) == list(PLACES)


def test_a_unit_added_by_the_recipe_works_on_every_backend(tmp_path):
    contribute(tmp_path)
    files = sorted({f"tests/{check.partition('::')[0]}" for check in CHECKS})
    words = "silu or test_units or every_unit or every_function or quick_step"
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", *files, "-k", words]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
    if shutil.which("g++") is None:
        CHECKS[:] = [check for check in CHECKS if "test_emulated" not in check]
    assert [check for check in CHECKS if not re.search(f"PASSED tests/{check}", run.stdout)] == []
