"""Reading .npz archives without trusting a size they claim, and never unpickling."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from deeprnn.data.limits import check_bytes, read_bytes
from deeprnn.errors import UserError


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive; object arrays, which need unpickling, are refused."""
    data = read_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            check_bytes(sum(member.file_size for member in members), f"{path}, decompressed,")
            return {m.filename.removesuffix(".npy"): _array(archive.read(m), path) for m in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise UserError(f"{path} is damaged or no .npz archive: {error}") from error


def _array(data: bytes, path: Path) -> np.ndarray:
    file = io.BytesIO(data)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} holds something that is no numpy array: {error}") from error
    if dtype.hasobject:
        raise UserError(f"{path} holds pickled objects, which are not read: save plain arrays")
    count = int(np.prod(np.array(shape, dtype=object)))
    rest = data[file.tell() :]
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(rest) or dtype.itemsize == 0:
        raise UserError(f"{path} is damaged: an array claims shape {shape} and holds {len(rest):,} bytes")
    return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")
