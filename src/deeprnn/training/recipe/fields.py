"""Plain data to frozen dataclasses: an unknown or ill-typed field is an error that names the nearest right one."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

from deeprnn.errors import UserError, did_you_mean

T = TypeVar("T")

LARGEST = 3.4028234e38
"""the largest number in single precision, which parameters and gradients are kept in"""


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
    """The message for a field that does not exist: the nearest ones, and the rest only where they are few."""
    hint = did_you_mean(name, known)
    section = name.rpartition(".")[0]
    siblings = [field for field in known if field.rpartition(".")[0] == section]
    listed = f": known are {', '.join(siblings)}" if siblings and section else ""
    return f"unknown recipe field {shown(name)}{hint}{listed}"


def shown(value: Any) -> str:
    """A value for a message, cut where it is too long to read."""
    if (
        isinstance(value, int) and value.bit_length() > 200
    ):  # Python writes no number of more than 4,300 digits
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"recipe field {where!r} is a table of fields, got {shown(value)}")
        return read(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is Literal:
        known = typing.get_args(hint)
        if value not in known:
            suggestion = did_you_mean(str(value), known, cutoff=0.4)
            raise UserError(
                f"recipe field {where!r} must be one of {', '.join(known)}, got {shown(value)}{suggestion}"
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
        if LARGEST < abs(value) != math.inf:
            raise UserError(
                f"recipe field {where!r} must be within {LARGEST:.3g} of zero, got {shown(value)}"
            )
        return float(value)
    if hint is int and numeric and (isinstance(value, int) or value.is_integer()):
        if not -(2**63) <= value < 2**63:
            raise UserError(f"recipe field {where!r} must be below 2^63, got {shown(value)}")
        return int(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise UserError(f"recipe field {where!r} must be {names[hint]}, got {shown(value)}")
