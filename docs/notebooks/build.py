"""Build the notebooks from their sources and run them: `python docs/notebooks/build.py [NAME ...]`.

A source is a Python file of cells: `# %% [markdown]` begins text, `# %%` begins code, `# %% parameters` begins
the code that a test may replace to run the notebook at a smaller size.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("music", "text", "own_operator")
LARGEST = 300_000  # bytes of a notebook with its outputs


def notebook(source: str, parameters: str | None = None) -> Any:
    """The cells of a source; `parameters` replaces the code of the cell so marked."""
    from nbformat import v4

    cells = []
    parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)[1:]
    for number, (mark, body) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        text = body.strip("\n")
        if "[markdown]" in mark:
            cell = v4.new_markdown_cell("\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n")))
        else:
            replaced = "parameters" in mark and parameters is not None
            cell = v4.new_code_cell(parameters if replaced else text)
        cell["id"] = f"cell-{number:02d}"  # by place, so that building again changes nothing but outputs
        cells.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return v4.new_notebook(cells=cells, metadata={**kernel, "language_info": {"name": "python"}})


def execute(book: Any, seconds: int = 600) -> Any:
    """Run every cell; an error in one is an error here."""
    from nbclient import NotebookClient

    NotebookClient(book, timeout=seconds, kernel_name="python3", record_timing=False).execute()
    for cell in book.cells:
        cell.metadata.clear()
    return book


def build(name: str) -> Path:
    """Write one executed notebook."""
    import nbformat

    book = execute(notebook((HERE / f"{name}.py").read_text(encoding="utf-8")))
    book.metadata["language_info"] = {"name": "python"}
    content = nbformat.writes(book) + "\n"
    if len(content) > LARGEST:
        raise SystemExit(f"{name}.ipynb would hold {len(content):,} bytes; at most {LARGEST:,} are kept")
    place = HERE / f"{name}.ipynb"
    place.write_text(content, encoding="utf-8")
    return place


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        print(build(wanted))
