"""Reading .npz archives without trusting a size they claim, and never unpickling."""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from deeprnn.data.limits import check_bytes, read_bytes
from deeprnn.errors import UserError

# What zipfile raises on damaged archives, found by mutating them.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError)
_DAMAGE += (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, OverflowError)

_MAX_HEADER = 10_000
_HEADER = re.compile(
    r"\{'descr': '(?P<dtype>[<>|=]?(b1|[iu][1248]|f[248]|U\d{1,6}))', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(\d{1,15}(, ?|(?=\))))*)\), \}\s*"
)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive; object arrays, which need unpickling, are refused."""
    data = read_bytes(path)
    try:
        members = _members(data, path)
    except UserError:
        raise
    except _DAMAGE as error:
        raise UserError(f"{path} is damaged or no .npz archive: {error}") from error
    return {name.removesuffix(".npy"): _array(content, path) for name, content in members.items()}


def _members(data: bytes, path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # zipfile never inflates a member beyond its declared size, so declared sizes bound the memory.
        check_bytes(sum(member.file_size for member in archive.infolist()), f"{path}, decompressed,")
        if any(m.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for m in archive.infolist()):
            raise UserError(f"{path} uses a compression that numpy does not write")
        return {member.filename: archive.read(member) for member in archive.infolist()}


def _array(data: bytes, path: Path) -> np.ndarray:
    header, body = _header(data, path)
    found = _HEADER.fullmatch(header)
    if found is None:
        if re.search(r"'descr': *'\|O", header):
            raise UserError(f"{path} holds pickled objects, which are not read: save plain arrays")
        raise UserError(f"{path} holds an array that is neither numbers nor text: {header.strip()[:80]!r}")
    dtype = np.dtype(found["dtype"])
    shape = tuple(int(size) for size in found["shape"].split(",") if size.strip())
    if dtype.itemsize == 0 or math.prod(shape) * dtype.itemsize != len(body):
        raise UserError(f"{path} is damaged: an array claims shape {shape} and holds {len(body):,} bytes")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if found["fortran"] == "True" else "C")


def _header(data: bytes, path: Path) -> tuple[str, bytes]:
    """The text that describes an array, and the bytes after it.

    Read here and not by numpy, whose reader evaluates the text and believes the shape it finds.
    """
    version = data[6:7]
    if data[:6] != b"\x93NUMPY" or version not in (b"\x01", b"\x02", b"\x03"):
        raise UserError(f"{path} holds something that is no numpy array")
    start = 10 if version == b"\x01" else 12
    size = int.from_bytes(data[8:start], "little")
    if size > _MAX_HEADER or start + size > len(data):
        raise UserError(f"{path} is damaged: an array's header claims {size:,} bytes")
    return data[start : start + size].decode("latin-1"), data[start + size :]
