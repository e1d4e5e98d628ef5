"""Plain data to frozen dataclasses: an unknown or ill-typed field is an error that names the nearest right one."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeVar

from deeprnn.errors import UserError

T = TypeVar("T")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def read(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass, and those inside it, from tables of plain values; `where` leads the names in errors."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise UserError(unknown(f"{where}{key}", [f"{where}{name}" for name in known]))
    hints = _hints(cls)
    return cls(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in data.items()})


def unknown(name: str, known: list[str]) -> str:
    """The message for a field that does not exist."""
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown recipe field {name!r}{hint}: known are {', '.join(known)}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"recipe field {where!r} is a table of fields, got {value!r}")
        return read(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is Literal:
        known = typing.get_args(hint)
        if value not in known:
            near = get_close_matches(str(value), [str(k) for k in known], n=1, cutoff=0.4)
            hint_text = f" (did you mean {near[0]!r}?)" if near else ""
            raise UserError(
                f"recipe field {where!r} must be one of {', '.join(map(str, known))}, got {value!r}{hint_text}"
            )
        return value
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(inner, v, where) for v in values)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and numeric:
        return float(value)
    if hint is int and numeric and float(value).is_integer():
        return int(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise UserError(f"recipe field {where!r} must be {names[hint]}, got {value!r}")
