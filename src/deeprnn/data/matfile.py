"""Reading MATLAB 5 files of numeric and cell arrays, in bounded memory.

The music sets are cell arrays of uint8 piano rolls. This reads just such files: numbers and cells, no
structures, objects or text; every declared size is checked against the bytes that are there, so a damaged
or hostile file ends in a `UserError`. Ours and not scipy's, which would be one more package for the core.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deeprnn.data.limits import byte_limit, check_songs, read_bytes
from deeprnn.errors import UserError

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_CELL_CLASS = 1
_NUMERIC_CLASSES = range(6, 16)
_MAX_DEPTH = 8
_EMPTY = np.zeros((0, 0), np.uint8)  # one for all empty cells, which take eight bytes in a file

MatValue: TypeAlias = "np.ndarray | list[MatValue]"


def read_mat(path: Path) -> dict[str, MatValue]:
    """Named arrays of a MATLAB 5 file: numeric ones as numpy arrays, cells as flat lists."""
    data = read_bytes(path)
    if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
        hint = " (it is HDF5, MATLAB 7.3: save it with -v7)" if data[:4] == b"\x89HDF" else ""
        raise UserError(f"{path} is not a MATLAB 5 file{hint}")
    try:
        return _Reader("<" if data[126:128] == b"IM" else ">").variables(memoryview(data))
    except (_Damaged, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged or not of the expected layout: {error}") from error


class _Damaged(Exception):
    pass


class _Reader:
    def __init__(self, order: str) -> None:
        self.order = order
        self.budget = byte_limit()

    def variables(self, data: memoryview) -> dict[str, MatValue]:
        values: dict[str, MatValue] = {}
        at = 128
        while at + 8 <= len(data):
            kind, body, at = self.element(data, at, padded=False)
            if kind == _COMPRESSED:
                body = self.inflate(body)
                kind, body, _ = self.element(body, 0)
            if kind != _MATRIX:
                raise _Damaged(f"a top-level element has type {kind}, not an array")
            name, value = self.matrix(body, depth=0)
            values[name] = value
        return values

    def inflate(self, body: memoryview) -> memoryview:
        stream = zlib.decompressobj()
        plain = stream.decompress(body, self.budget + 1)
        self.budget -= len(plain)
        if self.budget < 0:
            raise _Damaged("it inflates beyond the size limit: set DEEPRNN_MAX_BYTES to read it")
        return memoryview(plain)

    def element(self, data: memoryview, at: int, padded: bool = True) -> tuple[int, memoryview, int]:
        """One tagged element: (type, body, where the next begins). Bodies are views: nesting copies nothing."""
        kind, size = struct.unpack_from(self.order + "II", data, at)
        if kind >> 16:  # small format: size and type share one word, up to four bytes of body follow
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
            if size > 4:
                raise _Damaged(f"a small element claims {size} bytes")
        else:
            start = at + 8
            end = start + size + (-size % 8 if padded else 0)
        if start + size > len(data):
            raise _Damaged(f"an element of {size:,} bytes runs past the end")
        return kind, data[start : start + size], end

    def numbers(self, data: memoryview, at: int) -> tuple[np.ndarray, int]:
        kind, body, at = self.element(data, at)
        if kind not in _NUMBERS:
            raise _Damaged(f"element type {kind} is not numeric")
        dtype = np.dtype(self.order + _NUMBERS[kind])
        if len(body) % dtype.itemsize:
            raise _Damaged(f"{len(body)} bytes do not divide into numbers of {dtype.itemsize}")
        return np.frombuffer(body, dtype), at

    def matrix(self, body: memoryview, depth: int) -> tuple[str, MatValue]:
        if not body:
            return "", _EMPTY
        flags, at = self.numbers(body, 0)
        dims, at = self.numbers(body, at)
        name, at = self.numbers(body, at)
        if flags.size < 1 or dims.size < 2 or (dims < 0).any():
            raise _Damaged("an array header is malformed")
        kind, shape = int(flags[0]) & 0xFF, tuple(int(d) for d in dims)
        count = int(np.prod(np.array(shape, dtype=object)))
        title = name.tobytes().decode("ascii", "replace")
        if kind == _CELL_CLASS:
            return title, self.cells(body, at, count, depth)
        if kind not in _NUMERIC_CLASSES:
            raise _Damaged(f"array {title!r} has class {kind}; only numbers and cells are read")
        values, _ = self.numbers(body, at)
        if values.size != count:
            raise _Damaged(f"array {title!r} has {values.size} numbers for shape {shape}")
        return title, values.reshape(shape, order="F")

    def cells(self, body: memoryview, at: int, count: int, depth: int) -> list[MatValue]:
        check_songs(count, "a cell array")
        if depth >= _MAX_DEPTH:
            raise _Damaged("cells are nested too deeply")
        if count * 8 > len(body):
            raise _Damaged(f"{count:,} cells claimed in {len(body):,} bytes")
        values: list[MatValue] = []
        for _ in range(count):
            kind, cell, at = self.element(body, at)
            if kind != _MATRIX:
                raise _Damaged(f"a cell has type {kind}, not an array")
            values.append(self.matrix(cell, depth + 1)[1])
        return values
