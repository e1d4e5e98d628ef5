"""What a step reads besides the cell: globals and closures of its functions, and of those that they call.

A helper that is defined anew in a notebook, or a constant with a new value, changes the step as an attribute does.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from deeprnn.cells.fingerprint import Held, frozen, function_of, known_by_address, of_library

MISSING = object()
OURS = __name__.partition(".")[0] + "."
Home = dict[str, Any] | ref
"""a namespace, or a function whose closure is meant: it may hold the cell, which must not keep itself alive"""


class Name(NamedTuple):
    """A name in a namespace, or the number of a variable in a closure, and what it stood for."""

    home: Home
    name: Any
    known: Any

    def holds(self) -> bool:
        """Whether it still stands for that."""
        return _known(_look_up(self.home, self.name)) == self.known


def surroundings(module: nn.Module, held: Held = None) -> tuple[Name, ...]:
    """The names that the code of a module's classes and functions may read; what libraries read is left out."""
    found: dict[tuple[int, Any], Name] = {}
    seen: set[int] = set()
    waiting = [function for part in module.modules() for function in _functions_of(part)]
    while waiting:
        function = waiting.pop()
        if id(function) in seen or _stays(function.__module__):
            continue
        seen.add(id(function))
        for home, name in _names_in(function):
            if (id(home), name) in found or (value := _look_up(home, name)) is MISSING:
                continue
            found[id(home), name] = Name(home, name, _known(value, held))
            if (called := function_of(value)) is not None:
                waiting.append(called)
    return tuple(found.values())


def unchanged(names: tuple[Name, ...]) -> bool:
    """Whether every name stands for what it did."""
    return all(name.holds() for name in names)


def _functions_of(part: nn.Module) -> Iterator[FunctionType]:
    """Functions of a module's classes and, set as attributes, of its own."""
    for base in type(part).__mro__:
        if not of_library(base.__module__):
            methods = (value for name, value in vars(base).items() if name != "__init__")
            yield from (function for value in methods if (function := function_of(value)) is not None)
    yield from (value for value in vars(part).values() if isinstance(value, FunctionType))


def _stays(module: str | None) -> bool:
    """Whether code of a module of that name stays as it is, here too."""
    return of_library(module) or (module is not None and module.startswith(OURS))


def _names_in(function: FunctionType) -> Iterator[tuple[Home, Any]]:
    """Names that a function may read: in its globals, in the modules among them, and in its closure."""
    names = _names_of(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, ModuleType):
            yield function.__globals__, name
        elif not _stays(value.__name__):
            yield function.__globals__, name
            yield from ((value.__dict__, inner) for inner in names)
    yield from ((ref(function), k) for k in range(len(function.__closure__ or ())))


def _names_of(code: CodeType) -> set[str]:
    inner = [_names_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


def _look_up(home: Home, name: Any) -> Any:
    if isinstance(home, dict):
        return home.get(name, MISSING)
    function = home()
    try:
        return MISSING if function is None else function.__closure__[name].cell_contents
    except ValueError:  # not bound yet
        return MISSING


def _known(value: Any, held: Held = None) -> Any:
    """As attributes are known, but a tensor by itself: the recorded step holds on to it."""
    return known_by_address(value, held) if isinstance(value, (Tensor, nn.Module)) else frozen(value, held)
