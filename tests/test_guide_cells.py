"""The code on docs/guide/cells.md runs, block after block, and the page knows every shipped cell."""

from __future__ import annotations

import re
from pathlib import Path

from deeprnn.cells.library import LIBRARY
from deeprnn.training.recipe import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "cells.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)


def test_the_blocks_of_the_page_run():
    names: dict = {"__name__": "guide"}
    for number, block in enumerate(blocks("python"), 1):
        exec(compile(block, f"cells.md, block {number}", "exec"), names)
    assert names["rates"].shape == (200, 4, 64)


def test_the_recipe_on_the_page_is_one():
    import tomllib

    (block,) = blocks("toml")
    assert Recipe.from_dict(tomllib.loads(block)).model.hidden == (300, 300)


def test_every_shipped_cell_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for name in LIBRARY:
        assert f"`{name}`" in text
