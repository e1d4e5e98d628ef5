"""Reading pickles of plain data without running anything in them.

`pickle.load` executes what a file asks for. This interprets the few instructions that describe numbers,
text, tuples, lists, dicts and numpy scalars; it imports nothing, calls nothing and refuses everything else,
so there is no code path from a file to an arbitrary function.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.limits import read_bytes
from deeprnn.errors import UserError

_ACCEPTED = {
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # how protocol 2 writes a scalar's bytes
}
_KINDS = {f"{kind}{size}" for kind, sizes in (("i", "1248"), ("u", "1248"), ("f", "248")) for size in sizes}


class _Refused(Exception):
    pass


class _Global:
    """The name of something a pickle would import: a label for what `reduce` does itself, never the thing."""

    def __init__(self, module: str, name: str) -> None:
        if (module, name) not in _ACCEPTED:
            raise _Refused(
                f"it would import {module}.{name}; only numbers, text, tuples, lists, dicts and numpy scalars "
                "are read, and nothing of it was run"
            )
        self.means = _ACCEPTED[module, name]


class _Dtype:
    def __init__(self, text: object) -> None:
        text = _text(text)
        if text not in _KINDS and text != "b1":
            raise _Refused(f"it holds a numpy scalar of type {text!r}")
        self.kind, self.order = text, "<"

    def restore(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or _text(state[1]) not in ("<", ">", "|", "="):
            raise _Refused("a numpy type is malformed")
        self.order = {"|": "<", "=": "<"}.get(_text(state[1]), _text(state[1]))

    def value(self, raw: object) -> int | float | bool:
        data = raw.encode("latin-1", "replace") if isinstance(raw, str) else raw
        dtype = np.dtype(self.order + self.kind)
        if not isinstance(data, bytes) or len(data) != dtype.itemsize:
            raise _Refused("a numpy scalar has the wrong number of bytes")
        return np.frombuffer(data, dtype)[0].item()


def read_pickle(path: Path) -> Any:
    """The plain data in a pickle file, or a `UserError` that says what it would have done."""
    return loads(read_bytes(path), str(path))


def loads(data: bytes, what: str = "the pickle") -> Any:
    """The plain data in a pickle."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.execute(opcode.name, argument)
    except _Refused as error:
        raise UserError(f"{what} is refused: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        raise UserError(f"{what} is damaged or no pickle: {error}") from error
    raise UserError(f"{what} is damaged: it ends before its data does")


class _Machine:
    """A pickle's stack, marks and memo, for data only."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"it uses the instruction {name}, which plain data does not need")

    def pop(self) -> Any:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("a value is missing")
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def reduce(self) -> Any:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Global) or not isinstance(arguments, tuple) or not arguments:
            raise _Refused("it calls something other than numpy's scalar")
        if function.means == "dtype":
            return _Dtype(arguments[0])
        if function.means == "encode":
            return _text(arguments[0]).encode("latin-1")
        if not isinstance(arguments[0], _Dtype) or len(arguments) != 2:
            raise _Refused("a numpy scalar is malformed")
        return arguments[0].value(arguments[1])

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError("items are appended to something that is no list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("entries are set in something that is no dict")
        if not all(isinstance(key, (str, bytes, int, float)) for key in items[::2]):
            raise TypeError("a dict's key is neither text nor a number")  # hashing deep tuples can overflow
        target.update(zip(items[::2], items[1::2], strict=True))

    def build(self) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], _Dtype):
            raise _Refused("it sets an object's state")
        self.stack[-1].restore(state)

    def tuple_of(self, count: int) -> None:
        self.stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    def named_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_Global(_text(module), _text(name)))


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise TypeError(f"text was expected, not {type(value).__name__}")
    return value


def _pair(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_UNICODE = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_VALUES = frozenset((*_NUMBERS, *_STRINGS, *_UNICODE))
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    "MARK": lambda m, a: m.marks.append(len(m.stack)),
    "POP": lambda m, a: m.pop(),
    "POP_MARK": lambda m, a: m.since_mark(),
    "TUPLE": lambda m, a: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, a: m.tuple_of(1),
    "TUPLE2": lambda m, a: m.tuple_of(2),
    "TUPLE3": lambda m, a: m.tuple_of(3),
    "LIST": lambda m, a: m.stack.append(m.since_mark()),
    "DICT": lambda m, a: (lambda items: (m.stack.append({}), m.update(items)))(m.since_mark()),
    "APPEND": lambda m, a: m.extend([m.pop()]),
    "APPENDS": lambda m, a: m.extend(m.since_mark()),
    "SETITEM": lambda m, a: m.update(_pair(m)),
    "SETITEMS": lambda m, a: m.update(m.since_mark()),
    "GET": lambda m, a: m.stack.append(m.memo[int(a)]),
    "BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "LONG_BINGET": lambda m, a: m.stack.append(m.memo[a]),
    "PUT": lambda m, a: m.memo.__setitem__(int(a), m.stack[-1]),
    "BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "LONG_BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "MEMOIZE": lambda m, a: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "GLOBAL": lambda m, a: m.stack.append(_Global(*str(a).split(" ", 1))),
    "STACK_GLOBAL": lambda m, a: m.named_global(),
    "REDUCE": lambda m, a: m.stack.append(m.reduce()),
    "BUILD": lambda m, a: m.build(),
}
