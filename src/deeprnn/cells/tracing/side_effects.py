"""What a step does besides returning its new states: noticed and undone while the step is recorded.

A step that does something has to be called at every step of every sequence: no description would do it. Looked at are
the cell with all that it holds, its classes, and the globals and closures that its functions read.
"""

from __future__ import annotations

import builtins
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from deeprnn.cells.fingerprint import OF_EVERY_CLASS, OWN, SCALARS, contents, of_library
from deeprnn.cells.opaque import content_of, restorer
from deeprnn.cells.surroundings import MISSING, Variable, variables

DEEPEST = 4
"""levels of lists and objects within each other that are watched"""
LONGEST = 1000
"""items of a list that are looked into"""
WHOLE = (*SCALARS, Tensor, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)
"""what holds nothing that a step could change, or says so in another way"""
HEARD = (builtins.print, builtins.input, builtins.breakpoint)
"""functions whose calls a person waits for"""
INSIDE = ("_parameters", "_buffers", "_modules")
"""what a module keeps its tensors and parts in"""
GENERATORS: tuple[tuple[str, Callable[[], Any], Callable[[Any], None]], ...] = (
    ("Python's random", random.getstate, random.setstate),
    ("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state),
)
"""of random numbers, beside torch's: how their states are read and set"""


class Place(NamedTuple):
    """Something that a step may change, and what it held."""

    name: str
    """as the user would write it"""
    thing: Any
    items: dict[Any, Any]
    restore_content: Callable[[], None] | None
    computed: frozenset[str]
    """names that hooks may change: weights that they compute"""

    @classmethod
    def of(cls, name: str, thing: Any, *computed: str) -> Place:
        """As the thing is now."""
        restore = None if content_of(thing) is None else restorer(thing)
        return cls(name, thing, _items(thing), restore, frozenset(computed))

    def change(self) -> str | None:
        """The name of what has been changed."""
        now = _items(self.thing)
        for key in {**self.items, **now}:
            if key not in self.computed and not _same(self.items.get(key, MISSING), now.get(key, MISSING)):
                return f"{self.name}.{key}" if isinstance(key, str) else self.name
        return None

    def restore(self) -> None:
        """Let the thing hold what it did."""
        thing, now = self.thing, _items(self.thing)
        if now.keys() == self.items.keys() and all(_same(now[k], v) for k, v in self.items.items()):
            return
        if self.restore_content is not None:
            self.restore_content()
        elif isinstance(thing, list):
            thing[:] = self.items.values()
        elif isinstance(thing, set):
            thing.clear()
            thing.update(self.items.values())
        elif isinstance(thing, deque):
            thing.clear()
            thing.extend(self.items.values())
        elif isinstance(thing, dict):  # never empty: other threads may look into it
            for key in now.keys() - self.items.keys():
                del thing[key]
            thing.update(self.items)
        else:
            for key in now.keys() - self.items.keys():
                delattr(thing, key)
            for key, value in self.items.items():
                if not _same(now.get(key, MISSING), value):
                    setattr(thing, key, value)


class Binding(NamedTuple):
    """A variable that a step may bind anew, and what it stood for."""

    variable: Variable
    value: Any

    def change(self) -> str | None:
        """The variable's name, if it stands for something else."""
        return None if _same(self.value, self.variable.value) else str(self.variable)

    def restore(self) -> None:
        """Let it stand for what it did."""
        if not _same(self.value, self.variable.value):
            self.variable.bind(self.value)


@contextmanager
def undone(module: nn.Module) -> Iterator[Callable[[], str | None]]:
    """Inside, a function says what has been changed about a module, or which numbers were drawn; undone at the end."""
    places = [*_places(module), *_places_around(module)]
    states = [get_state() for _, get_state, _ in GENERATORS]

    def change() -> str | None:
        for place in places:
            if (name := place.change()) is not None:
                return f"the step changes {name}"
        for (name, get_state, _), state in zip(GENERATORS, states, strict=True):
            if repr(get_state()) != repr(state):
                return f"the step draws numbers by {name}"
        return None

    try:
        yield change
    finally:
        for place in places:
            place.restore()
        for (_, get_state, set_state), state in zip(GENERATORS, states, strict=True):
            if repr(get_state()) != repr(state):
                set_state(state)


def iterator_of(module: nn.Module) -> str | None:
    """The name of something that reading a step would move on, and nothing could move back."""
    for place in (*_places(module), *_places_around(module)):
        if isinstance(place, Place) and hasattr(type(place.thing), "__next__"):
            return place.name
    return None


@contextmanager
def heard(refuse: Callable[[str, Any], Exception]) -> Iterator[None]:
    """Inside, a call of `print` and its like raises instead, in this thread alone."""

    def on_event(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and any(function is heard for heard in HEARD):
            raise refuse(function.__name__, frame)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)


def _places_around(module: nn.Module) -> Iterator[Place | Binding]:
    """Variables that the step's functions read, what these stand for, and the classes of the module's parts."""
    parts = {id(part) for part in module.modules()}
    for variable in variables(module):
        value = variable.value
        if variable.stored:
            yield Binding(variable, value)
        if value is not MISSING and id(value) not in parts:
            yield from _places_inside(str(variable), value, DEEPEST)
    for kind in {type(part) for part in module.modules()}:
        yield from _places_inside(kind.__name__, kind, DEEPEST)


def _places(module: nn.Module) -> Iterator[Place]:
    for path, part in module.named_modules():
        name = f"self.{path}" if path else "self"
        computed = [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        yield Place.of(name, part.__dict__, *computed)
        yield from (Place.of(name, part.__dict__[home]) for home in INSIDE)
        for key, value in part.__dict__.items():
            if key not in OWN:
                yield from _places_inside(f"{name}.{key}", value, DEEPEST)


def _places_inside(name: str, value: Any, depth: int) -> Iterator[Place]:
    """Lists, dictionaries, objects, classes and modules that are no parts, and those inside them."""
    if isinstance(value, WHOLE) or not depth:
        return
    if isinstance(value, nn.Module):
        for part in value.modules():
            yield Place.of(name, part.__dict__)
            yield from (Place.of(name, part.__dict__[home]) for home in INSIDE)
        return
    if isinstance(value, type):
        for base in value.__mro__:
            if not of_library(base.__module__):
                yield Place.of(name, base)
        return
    if not isinstance(value, (tuple, frozenset)):
        yield Place.of(name, value)
    if content_of(value) is None and len(items := _items(value)) <= LONGEST:
        for key, item in items.items():
            yield from _places_inside(f"{name}.{key}" if isinstance(key, str) else name, item, depth - 1)


def _items(thing: Any) -> dict[Any, Any]:
    """What a thing holds, by name or by number."""
    if (content := content_of(thing)) is not None:
        return {None: repr(content)}
    if isinstance(thing, type):
        return {key: value for key, value in vars(thing).items() if key not in OF_EVERY_CLASS}
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return dict(enumerate(thing))
    return contents(thing)


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, SCALARS) and type(before) is type(now) and before == now)
