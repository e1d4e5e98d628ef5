"""Many rows times a matrix on Hopper's tensor cores, as accurate as fp32: the input's product and its gradient.

Short rows (the input's product) are cut into parts before, by a kernel of their own (entry.cu); long ones (its
gradient) while they are loaded (rows.cu).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.launch import device_of
from deeprnn.backends.cuda.tall import multiply_macro

ROWS, ROWS_SHORT, DEPTH, STAGES = 128, 64, 64, 3  # as in rows.cu and entry.cu
SHORT = 128  # numbers a row, up to which it is cut before
WIDEST_SHORT, WIDEST = 200, 136  # columns of a tile


class _Short(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("x", "matrix", "bias", "out")),
        *((n, ctypes.c_void_p) for n in ("x_parts", "parts", "x_factors", "factors")),
        *((n, ctypes.c_int64) for n in ("rows", "columns", "blocks", "tiles")),
        *((n, ctypes.c_int64) for n in ("matrix_member", "matrix_row", "matrix_column", "bias_member")),
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


def shared(width: int, inner: int) -> int:
    """Bytes of shared memory of a block."""
    if inner <= SHORT:
        matrix = -(-inner // DEPTH) * width * DEPTH * 4
        return 2 * STAGES * (ROWS_SHORT * DEPTH * 4 + 16) + matrix + width * 8 + 16 + 1024
    return STAGES * ((ROWS + width) * DEPTH * 4 + ROWS * 8 + 16) + 16 + width * 8 + 1024


def macros(width: int, inner: int) -> dict[str, str]:
    """What the kernels must be told."""
    return {"TN": str(width), "INNER": str(inner), "MULTIPLY(d, a, b, add)": multiply_macro(width)}


@lru_cache(maxsize=64)
def kernels(width: int, inner: int, device: int) -> tuple[Kernel, Kernel]:
    """What splits, and what multiplies."""
    short = inner <= SHORT
    code = nvrtc.cubin("entry.cu" if short else "rows.cu", macros(width, inner), "sm_90a")
    name = "split" if short else "split_matrix"
    return Kernel(code, name, device), Kernel(code, "rows_times", device, shared(width, inner))


def rows_times(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (P, rows, K), matrix (P, N, K) by any strides, bias (P, N) -> (P, rows, N)."""
    members, count, inner = x.shape
    columns, device = matrix.shape[-2], x.device
    short = inner <= SHORT
    width = tile_width(columns, WIDEST_SHORT if short else WIDEST)
    tiles, slices = -(-columns // width), -(-inner // DEPTH)
    blocks = -(-count // (ROWS_SHORT if short else ROWS))
    out = x.new_empty(members, count, columns)
    job = _Short() if short else _Long()
    job.x, job.matrix, job.out = x.data_ptr(), matrix.data_ptr(), out.data_ptr()
    job.rows, job.columns, job.tiles = count, columns, tiles
    job.matrix_member, job.matrix_row, job.matrix_column = matrix.stride()
    if bias is not None:
        job.bias, job.bias_member = bias.data_ptr(), bias.stride(0)
    parts = torch.empty(members * tiles * slices * 2 * width * DEPTH, dtype=torch.float16, device=device)
    factors = torch.empty(members * tiles * width, dtype=torch.int32, device=device)
    job.parts = parts.data_ptr()
    split, times = kernels(width, inner, device.index)
    teams, grid = max(1, device_of(device.index).processors // (tiles * members)), -(-tiles * width // 8)
    if isinstance(job, _Short):
        x_parts = parts.new_empty(members * blocks * slices * 2 * ROWS_SHORT * DEPTH)
        x_factors = x.new_empty(members * blocks * ROWS_SHORT)
        job.factors, job.blocks = factors.data_ptr(), blocks
        job.x_parts, job.x_factors = x_parts.data_ptr(), x_factors.data_ptr()
        split.launch(grid + blocks * ROWS_SHORT // 32, 256, [job], device, rows=members)
        times.launch(tiles * min(teams, -(-blocks // 2)), 384, [job], device, rows=members)
    else:
        job.shifts = factors.data_ptr()
        split.launch(grid, 256, [job], device, rows=members)
        times.launch(tiles * min(teams, blocks), 512, [job], device, rows=members)
    return out
