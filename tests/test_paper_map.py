"""docs/paper-map.md names functions that exist, tests that exist, and every equation and model there is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import deeprnn
import deeprnn.model.equations
import deeprnn.model.models

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if line.startswith("|") and "`" in line]
FUNCTIONS = sorted(set(re.findall(r"`(deeprnn\.[\w.]+)`", "\n".join(ROWS))))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", "\n".join(ROWS))))


def resolve(name: str):
    """The object a dotted name stands for: the longest importable module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name and name.startswith(error.name):
                continue
            raise
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"{name} cannot be imported")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_function_exists(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("name", TESTS)
def test_the_test_exists(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_both(row):
    assert re.search(r"`deeprnn\.", row)
    assert re.search(r"`tests/", row)


def test_every_displayed_equation_is_on_the_map():
    """A function of equations.py whose docstring cites the paper is an equation of it."""
    cited = {
        f"deeprnn.model.equations.{name}"
        for name, function in inspect.getmembers(deeprnn.model.equations, inspect.isfunction)
        if re.search(r"Eqs?\. \(|Sec\. ", function.__doc__ or "")
    }
    assert len(cited) >= 5
    assert cited <= set(FUNCTIONS)


def test_every_builder_is_on_the_map():
    builders = {n for n in deeprnn.__all__ if n.endswith("rnn") and n.islower() and n != "deeprnn"}
    assert {f"deeprnn.model.models.{n}" for n in builders} <= set(FUNCTIONS)
    assert len(builders) == 8


def test_the_program_calls_every_equation():
    """One that only tests call would make this map say what is not so."""
    texts = {p: p.read_text(encoding="utf-8") for p in Path(deeprnn.__file__).parent.rglob("*.py")}
    used = set(re.findall(r"\bequations\.(\w+)", "\n".join(texts.values())))
    for text in texts.values():
        for imported in re.findall(r"from deeprnn\.model\.equations import (.+)", text):
            used |= set(re.findall(r"\w+", imported))
    functions = inspect.getmembers(deeprnn.model.equations, inspect.isfunction)
    own = {name: f for name, f in functions if f.__module__ == "deeprnn.model.equations"}
    for called in used & set(own):
        used |= set(re.findall(r"\w+", inspect.getsource(own[called])))
    assert set(own) <= used


def test_the_papers_five_numbered_equations_are_cited_in_the_code():
    text = inspect.getsource(deeprnn.model.equations)
    assert set(re.findall(r"\((\d)\)", " ".join(re.findall(r"Eqs?\. [^.]*\.", text)))) == set("12345")
