"""The fields of specs: checked, and read from plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from deeprnn.errors import UserError, did_you_mean
from deeprnn.model.units import Unit, named

T = TypeVar("T")
Units = str | Unit | Sequence[str | Unit]
LARGEST = 2**31 - 1
"""no layer is wider: a matrix between two of them has a number of weights that 64 bits hold"""


def positive(owner: str, **sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1, or that is above `LARGEST`."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{owner}: {name} must be a whole number of at least 1, got {value!r}")
        if value > LARGEST:
            shown = f"{value:,}" if value < 10**30 else "far more"
            raise UserError(f"{owner}: {name} must be at most {LARGEST:,}, got {shown}")


def boolean(owner: str, **flags: bool) -> None:
    """Refuse what is neither True nor False: "no" and 0.5 would count as yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise UserError(f"{owner}: {name} must be True or False, got {value!r}")


def one_of(owner: str, name: str, value: object, literal: Any) -> None:
    """Refuse a value that is none of a Literal's."""
    known = get_args(literal)
    if value not in known:
        raise UserError(f"{owner}: {name} must be one of {', '.join(known)}, got {value!r}")


def unit_list(owner: str, units: Units, count: int) -> tuple[str, ...]:
    """One unit name per layer; a single one serves all layers. A function is registered by its name."""
    if not (isinstance(units, (str, tuple, list)) or callable(units)):
        raise UserError(f"{owner}: units must be a name, a function or one of them per layer, got {units!r}")
    layer_units = (units,) if isinstance(units, str) or callable(units) else tuple(units)
    layer_units = layer_units * count if len(layer_units) == 1 else layer_units
    if len(layer_units) != count:
        raise UserError(f"{owner}: {count} layers need {count} units (or one for all), got {layer_units!r}")
    return tuple(named(unit) for unit in layer_units)


def mapping(owner: str, data: Any) -> dict[str, Any]:
    """The data itself, refused where it is no table of named fields."""
    if not isinstance(data, dict):
        raise UserError(f"{owner}: a table of named fields is expected, got {data!r}")
    return data


def as_tuple(spec: object, *names: str) -> None:
    """Let lists (from JSON or a careless caller) stand where tuples are kept, so that specs hash."""
    for name in names:
        object.__setattr__(spec, name, tuple(getattr(spec, name)))


def positive_each(spec: object, owner: str, *names: str) -> None:
    """Keep lists of sizes as tuples, refusing what is not a list of whole numbers of at least 1."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, (tuple, list)):
            raise UserError(f"{owner}: {name} must be a list of sizes, such as ({value!r},), got {value!r}")
        as_tuple(spec, name)
        for i, size in enumerate(value):
            positive(owner, **{f"{name}[{i}]": size})


def read(cls: type[T], data: dict[str, Any]) -> T:
    """Make a dataclass from plain data; an unknown key is an error that lists the known ones."""
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in mapping(cls.__name__, data):
        if key not in known:
            hint = did_you_mean(key, known)
            raise UserError(f"{cls.__name__}: unknown field {key!r}{hint}: known are {', '.join(known)}")
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if f.name not in data and not has_default:
            raise UserError(f"{cls.__name__}: field {f.name!r} is missing: known are {', '.join(known)}")
    clean = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return cls(**clean)
