"""The notebooks run at a small size, and the committed ones are those of their sources, with outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks need deeprnn[notebooks]")
pytest.importorskip("nbclient", reason="the notebooks need deeprnn[notebooks]")
pytest.importorskip("ipykernel", reason="the notebooks need deeprnn[notebooks]")
pytest.importorskip("matplotlib", reason="the notebooks need deeprnn[cli]")

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SMALL = {"music": "EPOCHS = 1", "text": "EPOCHS, CHARACTERS = 1, 60_000", "own_operator": "EPOCHS = 1"}


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(book: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in book.cells]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "text":
        pytest.importorskip("music21", reason="the chorales need deeprnn[bach]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    build = builder()
    book = build.notebook((FOLDER / f"{name}.py").read_text(encoding="utf-8"), SMALL[name])
    done = build.execute(book, seconds=120)
    assert SMALL[name] in [source for _, source in sources(done)]
    assert not [
        output for cell in done.cells for output in cell.get("outputs", []) if output.output_type == "error"
    ]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_what_is_committed_is_built_from_its_source(name: str) -> None:
    build = builder()
    place = FOLDER / f"{name}.ipynb"
    kept = nbformat.read(place, as_version=4)
    assert sources(kept) == sources(build.notebook((FOLDER / f"{name}.py").read_text(encoding="utf-8")))
    assert place.stat().st_size < build.LARGEST
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
