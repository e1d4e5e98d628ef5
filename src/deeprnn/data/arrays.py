"""Reading .npz archives by numpy, after a look at the sizes they claim; nothing is unpickled."""

from __future__ import annotations

import io
import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from deeprnn.data.limits import check_bytes, read_bytes
from deeprnn.errors import UserError

# What zipfile and numpy raise on damaged archives, found by mutating them.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, SyntaxError, TypeError)
_DAMAGE += (tokenize.TokenError,)  # numpy reads a header as Python's own text
_DAMAGE += (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, OverflowError, MemoryError)

_MAX_MEMBERS = 1000
_MEMBER = b"PK\1\2"  # begins each entry of a zip's directory
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive; object arrays, which need unpickling, are refused."""
    data = read_bytes(path)
    if data.count(_MEMBER) > _MAX_MEMBERS:  # zipfile makes an object of each before anyone can ask
        raise UserError(f"{path} holds more than {_MAX_MEMBERS:,} arrays, or is no .npz archive")
    try:
        archive = np.load(io.BytesIO(data), allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise UserError(f"{path} is one array and no .npz archive: save several by name with np.savez")
        with archive:
            _check_sizes(archive.zip, path)
            return {name: archive[name] for name in archive.files}
    except UserError:
        raise
    except _DAMAGE as error:
        raise UserError(f"{path} is damaged or no .npz archive: {error}") from error


def _check_sizes(archive: zipfile.ZipFile, path: Path) -> None:
    """Compare what each member claims with what is there: numpy would make room for a claim first."""
    members = archive.infolist()
    # zipfile never inflates a member beyond its declared size, so declared sizes bound the memory.
    check_bytes(sum(member.file_size for member in members), f"{path}, decompressed,")
    for member in members:
        if member.compress_type not in _COMPRESSIONS:
            raise UserError(f"{path} uses a compression that numpy does not write")
        with archive.open(member) as file:
            shape, dtype = _header(file, path)
            stored = member.file_size - file.tell()
        if dtype.hasobject:
            raise UserError(f"{path} holds pickled objects, which are not read: save plain arrays")
        if dtype.kind not in "biufU" or dtype.itemsize == 0:
            raise UserError(f"{path} holds an array of {dtype}, which is neither numbers nor text")
        if math.prod(shape) * dtype.itemsize != stored:
            raise UserError(f"{path} is damaged: an array claims shape {shape} and holds {stored:,} bytes")


def _header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of a stored array."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise UserError(f"{path} holds an array in numpy's format {version}; 1.0 and 2.0 are read")
    shape, _, dtype = readers[version](file)
    return shape, dtype
