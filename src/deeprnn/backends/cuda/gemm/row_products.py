"""Many rows times a matrix on Hopper's tensor cores, as accurate as fp32: the input's product and its gradient.

Short rows (the input's product) are cut into parts before, by a kernel of their own (short_rows.cu); long ones (its
gradient) while they are loaded (long_rows.cu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import device_of
from deeprnn.backends.cuda.driver import Kernel, allocate, stream_of
from deeprnn.backends.cuda.gemm.outer_products import multiply_macro

ROWS, ROWS_SHORT, DEPTH, STAGES = 128, 64, 64, 3  # as in long_rows.cu and short_rows.cu
MAX_RESIDENT_INNER = 128  # numbers a row, up to which it is cut before
MOST_MATRICES, MOST_BIASES = 8, 16  # pieces, as in short_rows.cu
WIDEST_SHORT, LESS_WIDE, WIDEST = 200, 160, 136  # columns of a tile


class Added(NamedTuple):
    """A bias and the first column to which it is added: ([P,] n), the numbers of a member side by side."""

    bias: Tensor
    start: int = 0


class _MatrixPiece(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("start", "end", "member", "row", "column")),
    )


class _BiasPiece(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("start", "end", "member")))


class _Short(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "out", "x_parts", "parts", "x_factors", "factors")),
        *((n, ctypes.c_int64) for n in ("rows", "columns", "blocks", "tiles", "matrix_count", "bias_count")),
        ("matrices", _MatrixPiece * MOST_MATRICES),
        ("biases", _BiasPiece * MOST_BIASES),
    )


class _Long(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "matrix", "bias", "out", "parts", "shifts")),
        *((n, ctypes.c_int64) for n in ("rows", "columns", "tiles")),
        *((n, ctypes.c_int64) for n in ("matrix_member", "matrix_row", "matrix_column", "bias_member")),
    )


def tile_width(columns: int, widest: int) -> int:
    """Columns of a tile: as many tiles as must be, as even as can be, in eights."""
    tiles = -(-columns // widest)
    return -(-columns // (8 * tiles)) * 8


def short_width(columns: int, blocks: int, members: int, sm_count: int) -> int:
    """Of two tile widths, the one that gives the busiest warpgroup less to write."""

    def busiest(width: int) -> int:
        tiles = -(-columns // width) * members
        teams, waves = max(1, sm_count // tiles), -(-tiles // sm_count)
        return waves * -(-blocks // (2 * teams)) * width

    return min((tile_width(columns, widest) for widest in (WIDEST_SHORT, LESS_WIDE)), key=busiest)


def shared(width: int, inner: int) -> int:
    """Bytes of shared memory of a block."""
    if inner <= MAX_RESIDENT_INNER:
        matrix = -(-inner // DEPTH) * width * DEPTH * 4
        return 2 * STAGES * (ROWS_SHORT * DEPTH * 4 + 16) + matrix + width * 8 + 16 + 1024
    return STAGES * ((ROWS + width) * DEPTH * 4 + ROWS * 8 + 16) + 16 + width * 8 + 1024


def macros(width: int, inner: int) -> dict[str, str]:
    """What the kernels must be told."""
    return {"TN": str(width), "INNER": str(inner), "MULTIPLY(d, a, b, add)": multiply_macro(width)}


@lru_cache(maxsize=64)
def kernels(width: int, inner: int, device: int) -> tuple[Kernel, Kernel]:
    """What splits, and what multiplies."""
    short = inner <= MAX_RESIDENT_INNER
    code = nvrtc.cubin("gemm/short_rows.cu" if short else "gemm/long_rows.cu", macros(width, inner), "sm_90a")
    name = "split" if short else "split_matrix"
    return Kernel(code, name, device), Kernel(code, "rows_times", device, shared(width, inner))


def rows_times(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x ([P,] rows, K), matrix ([P,] N, K) and bias ([P,] N) by any strides -> ([P,] rows, N)."""
    if bias is not None:
        bias = bias if bias.stride(-1) == 1 else bias.contiguous()  # one number may stand for all of them
    if x.shape[-1] <= MAX_RESIDENT_INNER:
        return short_rows_times(x, [matrix], [] if bias is None else [Added(bias)])
    return _long_rows_times(x, matrix, bias)


def short_rows_times(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Added]) -> Tensor:
    """x ([P,] rows, K) times matrices ([P,] n, K) one above the other, and biases added up -> ([P,] rows, sum of n)."""
    *lead, count, inner = x.shape
    columns, members, device = sum(m.shape[-2] for m in matrices), lead[0] if lead else 1, x.device
    blocks, sm_count = -(-count // ROWS_SHORT), device_of(device.index).sm_count
    width = short_width(columns, blocks, members, sm_count)
    tiles, slices = -(-columns // width), -(-inner // DEPTH)
    out = x.new_empty((*lead, count, columns))
    job = _Short(x.data_ptr(), out.data_ptr())
    job.rows, job.columns, job.blocks, job.tiles = count, columns, blocks, tiles
    start = 0
    for place, matrix in zip(job.matrices, matrices, strict=False):
        *member, row, column = matrix.stride()
        place.at, place.start, place.end = matrix.data_ptr(), start, start + matrix.shape[-2]
        place.member, place.row, place.column = member[0] if member else 0, row, column
        start = place.end
    for piece, (bias, first) in zip(job.biases, biases, strict=False):
        piece.at, piece.start, piece.end = bias.data_ptr(), first, first + bias.shape[-1]
        piece.member = bias.stride(0) if lead else 0
    job.matrix_count, job.bias_count = len(matrices), len(biases)
    sizes = [members * tiles * slices * 2 * width * DEPTH * 2, members * tiles * width * 4]
    sizes += [members * blocks * slices * 2 * ROWS_SHORT * DEPTH * 2, members * blocks * ROWS_SHORT * 4]
    _memory, (job.parts, job.factors, job.x_parts, job.x_factors) = allocate(x, *sizes)
    split, times = kernels(width, inner, device.index)
    teams, grid, stream = max(1, sm_count // (tiles * members)), -(-tiles * width // 8), stream_of(device)
    split.launch(grid + blocks * ROWS_SHORT // 32, 256, [job], device, members, stream)
    times.launch(tiles * min(teams, -(-blocks // 2)), 384, [job], device, members, stream)
    return out


def _long_rows_times(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    *lead, count, inner = x.shape
    *_, columns, _ = matrix.shape
    members, device = lead[0] if lead else 1, x.device
    blocks, sm_count = -(-count // ROWS), device_of(device.index).sm_count
    width = tile_width(columns, WIDEST)
    tiles, slices = -(-columns // width), -(-inner // DEPTH)
    out, job = x.new_empty((*lead, count, columns)), _Long()
    job.x, job.matrix, job.out = x.data_ptr(), matrix.data_ptr(), out.data_ptr()
    job.rows, job.columns, job.tiles = count, columns, tiles
    *member, job.matrix_row, job.matrix_column = matrix.stride()
    job.matrix_member = member[0] if member else 0
    if bias is not None:
        job.bias, job.bias_member = bias.data_ptr(), bias.stride(0) if lead else 0
    sizes = [members * tiles * slices * 2 * width * DEPTH * 2, members * tiles * width * 4]
    _memory, (job.parts, job.shifts) = allocate(x, *sizes)
    split, times = kernels(width, inner, device.index)
    teams, grid, stream = max(1, sm_count // (tiles * members)), -(-tiles * width // 8), stream_of(device)
    split.launch(grid, 256, [job], device, members, stream)
    times.launch(tiles * min(teams, blocks), 512, [job], device, members, stream)
    return out
