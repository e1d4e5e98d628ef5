"""Values that programs trip over, and ways to change bytes and trees a little."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 127, 128, 255, 256, 32_767, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**61 - 1, 2**63, 2**64, -(2**63),
    10**8, 10**11, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e-45, 1e38, 1e39, 1e308, -1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "\0", "\n", "a" * 300, "é", "😀", "\ud800", "\u202e", "²", "٣", "..", "../../etc/passwd", "/dev/zero", "~",
    "[/red]", "[bold]", "%s%n", "{0}", "$(touch canary)", "`touch canary`", "__import__('os').system('touch canary')",
    "<script>alert(1)</script>", "'; DROP TABLE runs; --", "None", "nan", "true", "1..5", "1..99999999999", "²..³",
    "[" * 3000, "9" * 5000, "1e999", "0x10", "1_000", "--help",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [[[[[[[[]]]]]]]])
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, *OTHERS)
LONGEST = 8_000_000
"""characters of a mutated tree: repetitions of repetitions multiply, and to write hundreds of megabytes takes longer
than any input may take to be read"""
BYTES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


def mutated(original: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with a few of them changed, cut out, put in, repeated, or taken from another input."""
    data = bytearray(original)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        at = chance.randrange(len(data) + 1)
        size = chance.choice((1, 2, 4, 8, 40))
        match chance.choice(("set", "flip", "number", "cut", "insert", "truncate", "repeat", "splice")):
            case "set" if data:
                data[at - 1] = chance.choice(BYTES)
            case "flip" if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case "number":
                form, limit = chance.choice(
                    (("<H", 2**16), (">H", 2**16), ("<I", 2**32), (">I", 2**32), ("<Q", 2**64))
                )
                packed = struct.pack(
                    form, chance.choice((0, 1, limit - 1, limit // 2, chance.randrange(limit)))
                )
                data[at : at + len(packed)] = packed
            case "cut":
                del data[at : at + size]
            case "insert":
                data[at:at] = chance.randbytes(size)
            case "truncate":
                del data[at:]
            case "repeat":
                data[at:at] = data[at : at + size] * chance.choice((1, 2, 50, 2000))
            case "splice" if others:
                other = chance.choice(list(others))
                begin = chance.randrange(len(other) + 1)
                data[at : at + size] = other[begin : begin + size * 4]
    return bytes(data)


def mutated_tree(original: Any, chance: random.Random) -> Any:
    """JSON-like data with a few of its parts changed, removed, repeated or buried."""
    box = {"": copy.deepcopy(original)}
    for _ in range(chance.choice((1, 1, 2, 3))):
        holder: Any = box
        key: Any = ""
        while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.85:
            holder = holder[key]
            key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        match chance.choice(("value", "value", "value", "remove", "repeat", "bury", "rename")):
            case "value":
                holder[key] = copy.deepcopy(chance.choice(VALUES))  # the next change may be in it
            case "remove" if holder is not box:
                del holder[key]
            case "repeat":
                holder[key] = [holder[key]] * chance.choice((1, 2, 1000))
            case "bury":
                for _ in range(chance.choice((1, 3, 200))):
                    holder[key] = [holder[key]]
            case "rename" if isinstance(holder, dict) and holder is not box:
                holder[chance.choice(TEXTS)] = holder.pop(key)
    return box[""] if length(box, {}) <= LONGEST else mutated_tree(original, chance)


def length(tree: Any, known: dict[int, int]) -> int:
    """About how many characters a tree has as JSON; a part that occurs often is looked at once."""
    if not isinstance(tree, dict | list):
        return 6 * len(tree) if isinstance(tree, str) else len(str(tree))  # an escape has six
    if id(tree) not in known:
        total = 2
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            total += length(part, known) + (6 * len(str(key)) + 4 if isinstance(tree, dict) else 2)
        known[id(tree)] = total
    return known[id(tree)]


def as_json(tree: Any) -> bytes:
    """JSON of anything, numbers that are none included; what Python alone can hold is spelt as text."""
    return json.dumps(tree, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
