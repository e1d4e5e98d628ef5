"""What a step does besides returning its new states: noticed and undone while the step is recorded.

A step that does something has to be called at every step of every sequence: no description would do it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from deeprnn.cells.fingerprint import OWN, PLAIN, contents
from deeprnn.cells.opaque import content_of, restorer

DEEPEST = 3
"""levels of lists and objects within each other that are watched"""
INSIDE = ("_parameters", "_buffers", "_modules")
"""what a module keeps its tensors and parts in"""
GENERATORS: tuple[tuple[str, Callable[[], Any], Callable[[Any], None]], ...] = (
    ("Python's random", random.getstate, random.setstate),
    ("numpy.random", lambda: np.random.get_state(legacy=False), np.random.set_state),
)
"""of random numbers, beside torch's: how their states are read and set"""
MISSING = object()


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
                setattr(thing, key, value)


@contextmanager
def undone(module: nn.Module) -> Iterator[Callable[[], str | None]]:
    """Inside, a function says what has been changed about a module, or which numbers were drawn; undone at the end."""
    places = list(_places(module))
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
    """Lists, dictionaries and objects, and those inside them."""
    whole = isinstance(value, (*PLAIN, Tensor, nn.Module, type)) or callable(value)
    if whole or not depth:
        return
    if not isinstance(value, (tuple, frozenset)):
        yield Place.of(name, value)
    if content_of(value) is None:
        for key, item in _items(value).items():
            yield from _places_inside(f"{name}.{key}" if isinstance(key, str) else name, item, depth - 1)


def _items(thing: Any) -> dict[Any, Any]:
    """What a thing holds, by name or by number."""
    if (content := content_of(thing)) is not None:
        return {None: repr(content)}
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, (list, tuple, set, frozenset, deque)):
        return dict(enumerate(thing))
    return contents(thing)


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, PLAIN) and type(before) is type(now) and before == now)
