"""TOML text to plain data and back; a file or value that cannot be read is an error in one sentence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeprnn.errors import UserError

MOST_BYTES = 2**22
"""of a recipe's file: room for `MOST_NUMBERS` seeds"""
MOST_NUMBERS = 100_000
"""that a range such as 1..5 may stand for"""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES:,} bytes: that is no recipe")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte, place = content[error.start], error.start + 1
        raise UserError(f"{path} is not UTF-8 text (byte {place} is {byte:#04x}): save it as UTF-8") from None
    except RecursionError:
        raise UserError(f"{path} is not a recipe: its brackets are nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except ValueError:  # Python converts no number of more than 4,300 digits
        raise UserError(f"{path} is not a recipe: a number in it has thousands of digits") from None


def parse_value(text: str) -> Any:
    """A command-line value as TOML would read it; `1,2` is a list, `1..5` a range, anything else is text."""
    first, dots, last = text.partition("..")
    if dots and _is_number(first) and _is_number(last):
        count = int(last) - int(first) + 1
        if not 0 < count <= MOST_NUMBERS:
            raise UserError(f"{text}: a range counts upwards and stands for at most {MOST_NUMBERS:,} numbers")
        return list(range(int(first), int(last) + 1))
    if "," in text and not text.lstrip().startswith(("[", '"', "'")):
        return [parse_value(part.strip()) for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # the field that it is for will say what it wants instead
        return text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def write_toml(data: Mapping[str, Any]) -> str:
    """Plain values first, then one table for each mapping."""
    plain = [f"{k} = {_toml_value(v)}" for k, v in data.items() if not isinstance(v, Mapping)]
    tables = [
        f"\n[{name}]\n" + "\n".join(f"{k} = {_toml_value(v)}" for k, v in table.items())
        for name, table in data.items()
        if isinstance(table, Mapping)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _toml_value(value: Any) -> str:
    # JSON's own escapes would write an emoji as two surrogates, which TOML does not know.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
