"""What a step reads besides the cell: globals and closures of its functions, and of those that they call.

A helper that is defined anew in a notebook, or a constant with a new value, changes the step as an attribute does.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from deeprnn.cells.fingerprint import Held, frozen, function_of, of_library

MISSING = object()
OURS = __name__.partition(".")[0] + "."
Home = dict[str, Any] | ref
"""a namespace, or a function whose closure is meant: it may hold the cell, which must not keep itself alive"""


class Variable(NamedTuple):
    """A name in a namespace, or the number of a variable in a closure."""

    home: Home
    name: Any
    stored: bool
    """whether the code binds it"""

    @property
    def value(self) -> Any:
        """What it stands for; `MISSING` where it is not bound."""
        if isinstance(self.home, dict):
            return self.home.get(self.name, MISSING)
        function = self.home()
        try:
            return MISSING if function is None else function.__closure__[self.name].cell_contents
        except ValueError:  # not bound yet
            return MISSING

    def bind(self, value: Any) -> None:
        """Let it stand for another value, or for none."""
        if isinstance(self.home, dict):
            if value is MISSING:
                self.home.pop(self.name, None)
            else:
                self.home[self.name] = value
        elif (function := self.home()) is not None:
            if value is MISSING:
                del function.__closure__[self.name].cell_contents
            else:
                function.__closure__[self.name].cell_contents = value

    def __str__(self) -> str:
        if isinstance(self.home, dict):
            return f"the global {self.name}"
        return f"{self.home().__code__.co_freevars[self.name]} of a closure"  # type: ignore[union-attr]


class Name(NamedTuple):
    """A variable and what it stood for; of the cell's own parts only that they are the same."""

    variable: Variable
    known: Any
    is_part: bool

    def holds(self) -> bool:
        """Whether it still stands for that."""
        return _known(self.variable.value, self.is_part) == self.known


def surroundings(module: nn.Module, held: Held = None) -> tuple[Name, ...]:
    """The names that the code of a module's classes and functions may read; what libraries read is left out."""
    parts = {id(part) for part in module.modules()}
    return tuple(
        Name(variable, _known(value, is_part := id(value) in parts, held), is_part)
        for variable in variables(module)
        if (value := variable.value) is not MISSING
    )


def unchanged(names: tuple[Name, ...]) -> bool:
    """Whether every name stands for what it did."""
    return all(name.holds() for name in names)


def variables(module: nn.Module) -> list[Variable]:
    """The variables that the code of a module's classes and functions may read or bind, bound or not."""
    found: dict[tuple[int, Any], Variable] = {}
    seen: set[int] = set()
    waiting = [function for part in module.modules() for function in _functions_of(part)]
    while waiting:
        function = waiting.pop()
        if id(function) in seen or _is_known(function.__module__):
            continue
        seen.add(id(function))
        for variable in _variables_in(function):
            key = id(variable.home), variable.name
            if key not in found:
                waiting += _functions_behind(variable.value)
            if key not in found or variable.stored:
                found[key] = variable
    return list(found.values())


def _functions_of(part: nn.Module) -> Iterator[FunctionType]:
    """Functions of a module's classes and, set as attributes, of its own."""
    for base in type(part).__mro__:
        if not of_library(base.__module__):
            methods = (value for name, value in vars(base).items() if name != "__init__")
            yield from (function for value in methods if (function := function_of(value)) is not None)
    for value in vars(part).values():
        if not isinstance(value, nn.Module):  # those are parts, or none of the step's
            yield from _functions_behind(value)


def _functions_behind(value: Any) -> Iterator[FunctionType]:
    """Functions that may run when code uses a value: itself, or methods of its class."""
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    if (function := function_of(value)) is not None:
        yield function
    elif isinstance(value, nn.Module):
        for part in value.modules():
            yield from _functions_of(part)
    else:
        for base in (value if isinstance(value, type) else type(value)).__mro__:
            if not _is_known(base.__module__):
                yield from (f for inner in vars(base).values() if (f := function_of(inner)) is not None)


def _stays(module: str | None) -> bool:
    """Whether code of a module of that name stays as it is, here too."""
    return of_library(module) or (module is not None and module.startswith(OURS))


def _is_known(module: str | None) -> bool:
    """Whether functions of a module of that name read nothing that changes; its own names may (`os.environ`)."""
    return _stays(module) or (module is not None and module.partition(".")[0] in sys.stdlib_module_names)


def _variables_in(function: FunctionType) -> Iterator[Variable]:
    """Names that a function may read: in its globals, in modules among them or imported, and in its closure."""
    used = _uses(function.__code__)
    for name in used.globals | used.stored_globals:
        value = function.__globals__.get(name, MISSING)
        if not isinstance(value, ModuleType) or not _stays(value.__name__):
            yield Variable(function.__globals__, name, name in used.stored_globals)
    modules = [function.__globals__.get(name) for name in used.globals]
    for module in [*modules, *(sys.modules.get(name) for name in used.imports)]:
        if isinstance(module, ModuleType) and not _stays(module.__name__):
            yield from (
                Variable(module.__dict__, name, name in used.stored_attributes) for name in used.attributes
            )
    for k, name in enumerate(function.__code__.co_freevars):
        yield Variable(ref(function), k, name in used.stored_cells)


class _Uses(NamedTuple):
    """Names in code, by what is done with them."""

    globals: set[str]
    stored_globals: set[str]
    attributes: set[str]
    stored_attributes: set[str]
    imports: set[str]
    stored_cells: set[str]


PLACES = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "STORE_GLOBAL": 1, "DELETE_GLOBAL": 1, "LOAD_ATTR": 2, "LOAD_METHOD": 2,
    "IMPORT_FROM": 2, "STORE_ATTR": 3, "DELETE_ATTR": 3, "IMPORT_NAME": 4, "STORE_DEREF": 5, "DELETE_DEREF": 5,
}  # fmt: skip
"""of an instruction's name in `_Uses`"""


def _uses(code: CodeType) -> _Uses:
    found = _Uses(*(set() for _ in _Uses._fields))
    for instruction in dis.get_instructions(code):
        if (place := PLACES.get(instruction.opname)) is not None:
            found[place].add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for names, more in zip(found, _uses(inner), strict=True):
                names |= more
    found.attributes.update(found.stored_attributes)
    return found


def _known(value: Any, is_part: bool, held: Held = None) -> Any:
    """As attributes are known; the cell's own parts are looked at elsewhere."""
    return frozen(value, held, 0 if is_part else 4)
