"""Inputs that did harm once, or would be expected to, small enough to try every time."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.data.makers import midi_file, npz_bytes, variable_length
from tests.torture.seeds import safetensors_file

Specimens = dict[str, Callable[[], bytes]]

PICKLE: Specimens = {
    "a dict whose keys collide": lambda: (
        b"\x80\x02}(" + b"".join(_long(k * (2**61 - 1)) + b"K\x00" for k in range(1, 40_000)) + b"u."
    ),
    "millions of empty lists": lambda: b"\x80\x02" + b"]" * 6_000_000 + b".",
    "lists in lists": lambda: b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a list of itself": lambda: b"\x80\x02}(X\x05\0\0\0train]q\x00h\x00aX\x05\0\0\0valid]X\x04\0\0\0test]u.",
    "doubled thirty times": lambda: (
        b"\x80\x02]" + b"".join(b"q%c(h%ch%ce" % (i, i, i) for i in range(30)) + b"."
    ),
    "a number of a million digits": lambda: b"\x80\x02I" + b"9" * 1_000_000 + b"\n.",
    "a tuple as key": lambda: b"\x80\x02}" + b"(" * 10_000 + b"t" * 10_000 + b"K\x00s.",
}
NPZ: Specimens = {
    "millions of empty songs": lambda: npz_bytes(
        **{split: np.zeros((0, 88), np.uint8) for split in ("train", "valid", "test")},
        **{f"{split}_len": np.zeros(20_000_000, np.uint8) for split in ("train", "valid", "test")},
    ),
    "gigabytes of silence": lambda: npz_bytes(train=np.zeros((200_000, 88), np.float64)),
    "a vocabulary of a million": lambda: npz_bytes(
        vocabulary=np.array([""] * 1_000_000), kind=np.array("char"), train=np.zeros(3, np.uint8)
    ),
}
JSON: Specimens = {
    "millions of empty songs": lambda: b'{"train":[' + b"[]," * 3_000_000 + b'[]],"valid":[],"test":[]}',
    "nested a hundred thousand times": lambda: b"[" * 100_000,
    "a number of a million digits": lambda: b'{"train":[[[' + b"9" * 1_000_000 + b']]],"valid":[],"test":[]}',
    "a frame of a million notes": lambda: (
        b'{"train":[[[' + b"60," * 1_000_000 + b'60]]],"valid":[],"test":[]}'
    ),
    "not UTF-8": lambda: b'{"train": "\xff\xfe"}',
}
MAT: Specimens = {
    "a bomb": lambda: _mat(struct.pack("<II", 15, 0) + zlib.compress(b"\0" * 100_000_000)),
    "a bomb in its place": lambda: _mat(
        _compressed(zlib.compress(b"\x0e\0\0\0\xf8\xff\xff\0" + b"\0" * 100_000_000))
    ),
    "a size of gigabytes": lambda: _mat(struct.pack("<II", 14, 2**31)),
}
MIDI: Specimens = {
    "a note at the end of time": lambda: midi_file(
        [[(0, b"\x90\x40\x40"), (0x0FFFFFFF, b"\x80\x40\x00")] * 20]
    ),
    "a tick a year": lambda: midi_file([[(0x0FFFFFFF, b"\x90\x40\x40"), (1, b"\x80\x40\x00")]], division=1),
    "notes that never end": lambda: midi_file([[(0, b"\x90\x40\x40")] * 200_000]),
    "a text of gigabytes": lambda: midi_file([[(0, b"\xff\x01" + variable_length(0x0FFFFFFF))]]),
    "sixty thousand tracks": lambda: midi_file([[]] * 60_000, kind=2),
    "a count of tracks that are not there": lambda: b"MThd\0\0\0\6\0\1\xff\xff\1\xe0",
}
TEXT: Specimens = {
    "twenty megabytes": lambda: b"the cat sat on the mat\n" * 900_000,
    "one line of ten megabytes": lambda: b"a" * 10_000_000,
    "every character there is": lambda: "".join(
        map(chr, [*range(32, 0xD800), *range(0xE000, 0x30000)])
    ).encode(),
    "a million words": lambda: b" ".join(b"%x" % i for i in range(1_000_000)),
    "three letters": lambda: b"abc",
    "three lines": lambda: b"a\nb\nc\n",
    "nothing": lambda: b"",
    "zeros": lambda: b"\0" * 100_000,
    "newlines": lambda: b"\n" * 1_000_000,
}
TOML: Specimens = {
    "not UTF-8": lambda: b'name = "\xff"',
    "a number of ten thousand digits": lambda: b"seeds = [" + b"9" * 10_000 + b"]",
    "three thousand brackets": lambda: b"seeds = " + b"[" * 3000 + b"]" * 3000,
    "a million tables": lambda: b"".join(b"[a%d]\n" % i for i in range(100_000)),
    "a thousand dots": lambda: b".".join([b"a"] * 3000) + b" = 1",
    "an infinite bias": lambda: b"[init]\nbias = 1e308\n",
    "a hundred million lanes": lambda: b"[data]\nlanes = 100000000\n",
}
SAFETENSORS: Specimens = {
    "a header of gigabytes": lambda: struct.pack("<Q", 2**40) + b"{}",
    "a tensor of gigabytes": lambda: safetensors_file(
        {"levels.0.b": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b""
    ),
    "tensors that overlap": lambda: safetensors_file(
        {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}, b"\0" * 16
    ),
    "nested": lambda: safetensors_file(b"[" * 100_000, b""),
    "nothing": lambda: b"",
}


def run_json(info: dict[str, Any]) -> Specimens:
    """Harmful versions of a run's run.json."""
    model = info["model"]
    deep = {**info, "model": {**model, "levels": model["levels"] * 20_000}}
    wide = {
        **info,
        "model": {**model, "levels": [{**level, "hidden_size": 10**7} for level in model["levels"]]},
    }
    return {
        "nested seven hundred times": lambda: b'{"model":' + b"[" * 700 + b"]" * 700 + b"}",
        "twenty thousand levels": lambda: json.dumps(deep).encode(),
        "ten million units": lambda: json.dumps(wide).encode(),
        "data that is a number": lambda: json.dumps({**info, "data": 7}).encode(),
        "no data": lambda: json.dumps({key: value for key, value in info.items() if key != "data"}).encode(),
    }


def _long(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def _mat(element: bytes) -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + element


def _compressed(body: bytes) -> bytes:
    return struct.pack("<II", 15, len(body)) + body
