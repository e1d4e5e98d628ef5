"""Cells by name: shipped ones, and a user's own by where they are written.

    lstm                            a shipped cell
    my_package.my_module:Paced      a class of a module
    my_cells.py:Paced               a class of a Python file

`find` looks among the classes that are loaded and never imports: a run folder that names a cell cannot make this
process run code. `load` imports; it is called with what a person asked for, on the command line or in a recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deeprnn.cells.cell import Cell
from deeprnn.cells.library import LIBRARY
from deeprnn.errors import UserError

VARIABLE = "DEEPRNN_IMPORT"
"""environment variable: files and modules that are imported before a cell is looked for"""


class MissingCell(UserError):
    """A cell whose class this process does not know."""


def is_file(where: str) -> bool:
    """Whether the part before the colon names a file rather than a module."""
    return where.endswith(".py")


def is_own(name: str) -> bool:
    """Whether a word can name a user's cell: a file, or file or module, a colon and a class."""
    where, _, cls = name.rpartition(":")
    module = all(part.isidentifier() for part in where.split("."))
    return is_file(name) or ((is_file(where) or module) and cls.isidentifier())


def split(name: str) -> tuple[str, str]:
    """(file or module, class) of a user's cell."""
    where, _, cls = name.rpartition(":")
    if name.endswith(".py"):
        where, cls = name, ""
    if not where or (not cls and not is_file(where)):
        near = get_close_matches(name, LIBRARY, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UserError(
            f"no cell {name!r}{hint}: known are {', '.join(LIBRARY)}; your own is named by its file or module and its "
            "class, such as my_cells.py:Paced or my_package.my_module:Paced"
        )
    return where, cls


def short(name: str) -> str:
    """What a person calls a cell: `lstm`, `Paced`."""
    return name if name in LIBRARY else split(name)[1]


def label(name: str) -> str:
    """The cell's class, as tables and pictures name it: `LSTM`, `Paced`."""
    make = LIBRARY.get(name)
    return short(name) if make is None else getattr(make, "func", make).__name__


def import_option(name: str) -> str:
    """What commands need to find the cell again: `--import my_cells.py`, empty for a shipped one."""
    return "" if not name or name in LIBRARY else f"--import {shlex.quote(split(name)[0])}"


def code(name: str) -> bytes:
    """The file in which a user's cell is written; nothing for a shipped one. Where it is a module, it is loaded."""
    if not name or name in LIBRARY:
        return b""
    file = import_from(split(name)[0]).__file__
    return Path(file).read_bytes() if file else b""


def rooted(name: str) -> str:
    """The name with the path of a file made absolute."""
    if not name or name in LIBRARY:
        return name
    where, cls = split(name)
    return f"{Path(where).expanduser().absolute()}:{cls}" if is_file(where) else name


def load(name: str) -> str:
    """Import the file or module of a user's cell; the cell's full name."""
    if name in LIBRARY:
        return name
    where, cls = split(name)
    module = import_from(where)
    cells = [
        n for n, value in vars(module).items() if _is_cell(value) and value.__module__ == module.__name__
    ]
    if not cls and len(cells) == 1:
        cls = cells[0]
    if not _is_cell(getattr(module, cls, None) if cls else None):
        found = f"it has {', '.join(cells)}" if cells else "it has no subclass of deeprnn.Cell"
        asked = f"has no cell {cls!r}" if cls else "needs the name of a class, as in my_cells.py:Paced"
        raise UserError(f"{where} {asked}: {found}")
    return rooted(f"{where}:{cls}")


def import_from(where: str) -> ModuleType:
    """A Python file, or a module that may lie in the current folder; once loaded, the same again."""
    if not is_file(where):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise UserError(f"no module {where!r} ({error}): is it installed, or in this folder?") from None
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {where}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and Path(module.__file__).resolve() == path:  # type: ignore[arg-type]
            return module
    name = path.stem if path.stem not in sys.modules else f"deeprnn_cells_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find(name: str) -> Any:
    """What builds the cell of that name: a shipped one, or a class that is loaded."""
    if name in LIBRARY:
        return LIBRARY[name]
    where, cls = split(name)
    for asked in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        import_from(asked)
    known = [c for c in _subclasses(Cell) if c.__qualname__ == cls and _written_in(c, where)]
    if not known:
        raise MissingCell(
            f"the cell {cls} of {Path(where).name if is_file(where) else where} is not loaded here, and is never "
            "imported because a run or a model names it: import its module first, or give it to the command: "
            f"{import_option(name)}"
        )
    return known[-1]


def _is_cell(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Cell) and value is not Cell


def _subclasses(cls: type) -> Iterator[type]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _written_in(cls: type, where: str) -> bool:
    """Whether a class comes from that module, or from a file of that name, which may have moved."""
    if not is_file(where):
        return cls.__module__ == where
    return (
        os.path.basename(getattr(sys.modules.get(cls.__module__), "__file__", None) or "") == Path(where).name
    )


def build(name: str, input_size: int, hidden_size: int, options: Sequence[str] = ()) -> Cell:
    """A cell by name; options are written as in a call: depth=3."""
    make, given = find(name), {}
    fixed = {"input_size", "hidden_size", "device", "dtype"} if name in LIBRARY else set()
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"cell option {option!r} must be written name=value, such as zoneout=0.1")
        if key.strip() in fixed:
            raise UserError(
                f"cell option {option!r}: that is decided by the model and the run, not by the cell"
            )
        given[key.strip()] = _value(value.strip())
    too_large = (
        RuntimeError if name in LIBRARY else ()
    )  # in a user's cell it may be anything: with its traceback
    try:
        inspect.signature(make).bind(input_size, hidden_size, **given)
        _check_known(make, given)
    except TypeError as error:
        raise _unbuildable(name, input_size, hidden_size, given, error) from None
    try:
        cell = make(input_size, hidden_size, **given)
    except too_large as error:
        raise _unbuildable(name, input_size, hidden_size, given, error) from error
    if not isinstance(cell, Cell):
        raise UserError(f"{name} gives a {type(cell).__name__}: a deeprnn.Cell is expected")
    return cell


def _unbuildable(
    name: str, input_size: int, hidden_size: int, given: dict[str, Any], error: Exception
) -> UserError:
    options = "".join(f", {k}={v!r}" for k, v in given.items())
    sizes = f"input_size={input_size}, hidden_size={hidden_size}"
    return UserError(f"cell {short(name)} cannot be built from {sizes}{options}: {error}")


def _check_known(make: Any, given: dict[str, Any]) -> None:
    known = arguments(make)
    for key in given:
        if known and key not in known:
            raise TypeError(f"it has no argument {key!r}; known are {', '.join(known)}")


def arguments(make: Any) -> list[str]:
    """The names that a cell's constructor takes, those of the shipped cells' base included; empty if it takes any."""
    cls = getattr(make, "func", make)
    names: list[str] = []
    for owner in inspect.getmro(cls) if inspect.isclass(cls) else ():
        takes = inspect.signature(owner.__init__).parameters if "__init__" in vars(owner) else {}
        names += [
            n for n, p in takes.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and n != "self"
        ]
        if takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            return list(dict.fromkeys(names))
    return []


def _value(text: str) -> Any:
    """A number, true, false, a list such as 100+50, or a word."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "+" in text[1:]:
        return tuple(_value(part) for part in text.split("+"))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def on_meta(name: str, input_size: int, hidden_size: int, options: Sequence[str] = ()) -> Cell:
    """The same without numbers, for its shapes."""
    with torch.device("meta"):
        return build(name, input_size, hidden_size, options).to("meta")
