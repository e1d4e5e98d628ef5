"""Reading pickles of plain data without running anything in them.

`pickle.load` executes what a file asks for. This interprets the few instructions that describe numbers,
text, tuples, lists, dicts and numpy scalars; it imports nothing, calls nothing and refuses everything else,
so there is no code path from a file to an arbitrary function.

A `pickle.Unpickler` whose `find_class` knows a few names would run nothing either, but it cannot be bounded:
a byte makes a list of 64, five bytes make a memo of 32 gigabytes, and dict keys can be chosen to collide.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from deeprnn.data.limits import check_memory, read_bytes
from deeprnn.errors import UserError

_ACCEPTED = {
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",  # how protocol 2 writes a scalar's bytes
}
_OFTEN = 256  # instructions between two looks at the memory in use
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
    machine = _Machine(lambda used: check_memory(len(data) + used, len(data), what))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return machine.pop()
            machine.execute(opcode.name, argument)
            if count % _OFTEN == 0:
                machine.count()
    except UserError:
        raise
    except _Refused as error:
        raise UserError(f"{what} is refused: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        raise UserError(f"{what} is damaged or no pickle: {error}") from error
    raise UserError(f"{what} is damaged: it ends before its data does")


class _Machine:
    """A pickle's stack, marks and memo, for data only."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.made = 0  # bytes of the objects made so far, never given back
        self.check = check  # of bytes of memory

    def count(self, more: int = 0) -> None:
        """Check what is in use, and `more` bytes."""
        references = 9 * (
            len(self.stack) + len(self.marks) + len(self.memo)
        )  # lists keep an eighth in reserve
        self.check(self.made + references + more)

    def execute(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            if not (type(argument) is int and -5 <= argument <= 256):  # Python keeps one of each of these
                self.made += _object_bytes(argument)
            self.stack.append(argument)
        elif name in _CONSTANTS:
            made = _CONSTANTS[name]()
            self.made += _object_bytes(made) if isinstance(made, list | dict) else 0
            self.stack.append(made)
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
        count = len(self.stack) - at
        if count > _OFTEN:
            self.count(more=8 * count)  # they are held twice for a moment
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def remember(self, number: int) -> None:
        """Number the top of the stack; writers count up from 0, or from 1."""
        if not self.memo and number == 1:
            self.memo.append(None)
        if number != len(self.memo):
            raise IndexError(f"object {number} is numbered where {len(self.memo)} comes next")
        self.memo.append(self.stack[-1])

    def recall(self, number: int) -> None:
        if not 0 <= number < len(self.memo):
            raise IndexError(f"object {number} is asked for before it is there")
        self.stack.append(self.memo[number])

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
        self.made += 9 * len(items)
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("entries are set in something that is no dict")
        for key in items[::2]:
            if not isinstance(key, str | bytes):  # numbers can be chosen so that all have one hash
                raise TypeError(f"a dict's key is an {type(key).__name__}, not text")
        self.made += 100 * len(items)
        target.update(zip(items[::2], items[1::2], strict=True))

    def build(self) -> None:
        state = self.pop()
        if not isinstance(self.stack[-1], _Dtype):
            raise _Refused("it sets an object's state")
        self.stack[-1].restore(state)

    def tuple_of(self, items: Iterable[Any]) -> None:
        made = tuple(items)
        self.made += _object_bytes(made) if made else 0  # all empty ones are the same
        self.stack.append(made)

    def top(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def list_of(self, items: list[Any]) -> None:
        self.made += _object_bytes(items)
        self.stack.append(items)

    def named_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_Global(_text(module), _text(name)))


def _object_bytes(value: object) -> int:
    return sys.getsizeof(value) + 8  # allocations are rounded up to multiples of 16


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise TypeError(f"text was expected, not {type(value).__name__}")
    return value


def _pair(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


# Without LONG4, a number of more than 255 bytes.
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT")
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
    "TUPLE": lambda m, a: m.tuple_of(m.since_mark()),
    "TUPLE1": lambda m, a: m.tuple_of(m.top(1)),
    "TUPLE2": lambda m, a: m.tuple_of(m.top(2)),
    "TUPLE3": lambda m, a: m.tuple_of(m.top(3)),
    "LIST": lambda m, a: m.list_of(m.since_mark()),
    "DICT": lambda m, a: (lambda items: (m.stack.append({}), m.update(items)))(m.since_mark()),
    "APPEND": lambda m, a: m.extend([m.pop()]),
    "APPENDS": lambda m, a: m.extend(m.since_mark()),
    "SETITEM": lambda m, a: m.update(_pair(m)),
    "SETITEMS": lambda m, a: m.update(m.since_mark()),
    "GET": lambda m, a: m.recall(int(a)),
    "BINGET": lambda m, a: m.recall(a),
    "LONG_BINGET": lambda m, a: m.recall(a),
    "PUT": lambda m, a: m.remember(int(a)),
    "BINPUT": lambda m, a: m.remember(a),
    "LONG_BINPUT": lambda m, a: m.remember(a),
    "MEMOIZE": lambda m, a: m.remember(len(m.memo)),
    "GLOBAL": lambda m, a: m.stack.append(_Global(*str(a).split(" ", 1))),
    "STACK_GLOBAL": lambda m, a: m.named_global(),
    "REDUCE": lambda m, a: m.stack.append(m.reduce()),
    "BUILD": lambda m, a: m.build(),
}
