"""Sums of outer products over many rows on Hopper's tensor cores, as accurate as fp32 and split while loading.

Σ_r left[r, m] right[r, n], where the left side is several matrices side by side and the right side one: every
gradient of a cell's weights, of the input's weights and of the biases (a column of ones). outer_products.cu explains
the arithmetic. Here the sums are cut into tiles of 128 x TN and the rows into parts, so that all processors have about
as much to do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import device_of
from deeprnn.backends.cuda.driver import Kernel, allocate, stream_of

ROWS, WIDTH = 64, 128  # rows of a block, columns of the left side a tile: as in outer_products.cu
MOST_TILES, MOST_MATRICES, MOST_OUTS = 400, 9, 24  # as in outer_products.cu
MOST_COLUMNS = 8 << 16  # of both sides: tiles are told by their first column in eights
TILES = range(64, 201, 8)  # columns of the right side a tile may have


class Left(NamedTuple):
    """A matrix of the left side: ([P,] T, B, width), or None for a column of ones."""

    x: Tensor | None
    first: Tensor | None = None  # where its rows are previous states, h0 ([P,] B, width)

    @property
    def width(self) -> int:
        """Columns."""
        return 1 if self.x is None else self.x.shape[-1]


class SumBlock(NamedTuple):
    """A block of sums: columns of the left side against columns of the right side."""

    left: int
    left_end: int
    right: int
    right_end: int


class Target(NamedTuple):
    """Where sums are to be written: those of a block, as rows of a matrix."""

    block: SumBlock
    at: Tensor
    start: int  # the first number's place in it
    row: int  # numbers from row to row


@dataclass(frozen=True)
class Tiling:
    """How the work is dealt out."""

    columns: int  # TN
    splits: int  # parts of the rows
    each: int  # blocks of rows in a part
    tiles: tuple[tuple[int, int], ...]  # first column of either side


@lru_cache(maxsize=256)
def tiling(
    wanted: tuple[SumBlock, ...], rows: int, members: int, sm_count: int, at_once: bool = False
) -> Tiling | None:
    """The cheapest way: the busiest processor's rows times the width of its tiles. None where nothing fits.

    `at_once`: in one wave of blocks.
    """
    best, best_cost, blocks = None, float("inf"), -(-rows // ROWS)
    for columns in TILES:
        for own_tiles in (False, True):
            tiles = _tiles(wanted, columns, own_tiles)
            if len(tiles) > MOST_TILES:
                continue
            for splits in range(1, max(1, min(64, blocks // 3)) + 1):
                each = -(-blocks // splits)
                waves = -(-len(tiles) * members * splits // sm_count)
                if at_once and waves > 1:
                    break
                # Measured on an H200, in blocks of rows times columns: a part begins and ends with some waiting.
                cost = waves * (each * (columns + 40) + 500)
                if cost < best_cost and each * (splits - 1) < blocks:
                    best, best_cost = Tiling(columns, splits, each, tuple(tiles)), cost
    return best


def _tiles(wanted: Sequence[SumBlock], columns: int, own_tiles: bool) -> list[tuple[int, int]]:
    """First columns of every tile that holds a wanted sum, in eights; `own_tiles`: new tiles begin with each matrix."""
    starts = sorted({w.left // 8 * 8 for w in wanted}) if own_tiles else [0]
    ends = [*starts[1:], max(w.left_end for w in wanted)]
    tiles = []
    for start, end in zip(starts, ends, strict=True):
        for m in range(start, end, WIDTH):
            stop = m + WIDTH if m + WIDTH < end else max(end, -(-end // 8) * 8)
            needed = sorted((w.right, w.right_end) for w in wanted if w.left < stop and w.left_end > m)
            done = 0
            for right, right_end in needed:
                n = max(right // 8 * 8, done)
                while n < right_end:
                    tiles.append((m, n))
                    n += columns
                done = max(done, n)
    return tiles


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("start", ctypes.c_int64),
    )


class _Out(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("left", "left_end", "right", "right_end", "row", "member")),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("matrices", _Matrix * MOST_MATRICES),
        *((n, ctypes.c_void_p) for n in ("reset", "parts", "scales", "partial")),
        *((n, ctypes.c_int64) for n in ("reset_member", "rows", "batch", "blocks")),
        *((n, ctypes.c_int64) for n in ("each", "tiles", "splits", "low", "matrix_count")),
        *((n, ctypes.c_int64) for n in ("columns", "left_columns", "offset", "first_group", "groups")),
        ("outs", _Out * MOST_OUTS),
        ("out_count", ctypes.c_int64),
        ("add", ctypes.c_int64),
        ("tile", ctypes.c_uint16 * 2 * MOST_TILES),
    )
    plain_words = MOST_TILES * 4 // 8  # of `tile`, where no address can be: see recording.py


def multiply_macro(columns: int) -> str:
    """The product of a warpgroup, 64 x columns sums of 16 terms: every register is an operand of its own."""
    n = columns // 2
    sums = ", ".join(f"%{i}" for i in range(n))
    outs = ", ".join(f'"+f"((d)[{i}])' for i in range(n))
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{n + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 "
        f'{{{sums}}}, %{n}, %{n + 1}, p, 1, 1, 0, 0;}}" : {outs} : "l"(a), "l"(b), "r"((int)(add)))'
    )


def macros(columns: int) -> dict[str, str]:
    """What outer_products.cu must be told."""
    return {"TN": str(columns), "MULTIPLY(d, a, b, add)": multiply_macro(columns)}


def shared(columns: int) -> int:
    """Bytes of shared memory of a block of `outer`."""
    stages = 2 if columns > 160 else 3
    return stages * ((WIDTH + columns) * (ROWS * 4 + 8) + 16) + 1024


@lru_cache(maxsize=64)
def kernels(columns: int, device: int) -> tuple[Kernel, Kernel, Kernel]:
    """`split_columns`, `outer` and `collect`."""
    code = nvrtc.cubin("gemm/outer_products.cu", macros(columns), "sm_90a")
    outer = Kernel(code, "outer", device, shared(columns))
    return Kernel(code, "split_columns", device), outer, Kernel(code, "collect", device)


@lru_cache(maxsize=256)
def _layout(
    wanted: tuple[SumBlock, ...],
    widths: tuple[int, ...],
    right_width: int,
    rows: int,
    batch: int,
    members: int,
    sm_count: int,
    free_processors: int,
) -> tuple[Tiling, _Job]:
    """The tiling, and a job complete but for addresses: to be copied, as filling in its tables takes long."""
    plan = tiling(wanted, rows, members, free_processors, at_once=True) if free_processors else None
    plan = plan or tiling(wanted, rows, members, sm_count)
    assert plan is not None
    width, job = sum(widths), _Job()
    job.left_columns, job.offset = -(-width // 8) * 8, -(-width // 128) * 128
    job.columns, job.blocks = job.offset + -(-right_width // 8) * 8, -(-rows // ROWS)
    job.low = members * job.blocks * job.columns * ROWS * 2
    job.rows, job.batch, job.each = rows, batch, plan.each
    job.tiles, job.splits, job.matrix_count = len(plan.tiles), plan.splits, len(widths)
    start = 0
    for i, columns in enumerate(widths):
        job.matrices[i] = _Matrix(None, None, columns, start)
        start += columns
    job.matrices[len(widths)] = _Matrix(None, None, right_width, job.offset)
    for i, (m, n) in enumerate(plan.tiles):
        job.tile[i][0], job.tile[i][1] = m // 8, (job.offset + n) // 8
    return plan, job


class OuterProducts:
    """Sums in two steps: the left side may be cut into parts while the right side is still being computed."""

    def __init__(
        self, left: Sequence[Left], right_width: int, reset: Tensor | None, wanted: Sequence[SumBlock],
        free_processors: int = 0, onto: OuterProducts | None = None, targets: Sequence[Target] = (),
    ):  # fmt: skip
        """The first matrix of the left side is none of ones; reset marks are those of previous states.

        `free_processors`: those that a kernel beside this one leaves, 0 for all. `onto`: sums, finished before, to
        which these are added.
        `targets`: where to write sums; without any, each block becomes a tensor of its own.
        """
        x = left[0].x
        assert x is not None
        *lead, steps, batch, _ = x.shape
        self.members = lead[0] if lead else 1
        self.device, self.left, self.reset, self.wanted = x.device, left, reset, wanted
        rows, widths = steps * batch, tuple(side.width for side in left)
        sm_count = device_of(x.device.index).sm_count
        shape = rows, batch, self.members, sm_count, free_processors
        self.plan, blank = _layout(tuple(wanted), widths, right_width, *shape)
        self.job = job = _Job.from_buffer_copy(blank)
        count = self.members * job.blocks * job.columns
        # The last tile may read beyond the last column: what it finds there goes nowhere.
        # All memory is taken here: the steps may run on another stream, beside what is launched after this.
        plan = self.plan
        if onto is not None:
            self.targets = onto.targets
        else:
            self.targets = targets or [_own_target(x, lead, w) for w in wanted]
        sums = self.members * len(plan.tiles) * plan.splits * plan.columns * WIDTH
        sizes = 2 * (2 * count + max(TILES)) * ROWS, 4 * (count + max(TILES)), 4 * sums
        self.workspace, (job.parts, job.scales, job.partial) = allocate(x, *sizes)
        job.add = int(onto is not None)
        job.out_count = len(self.targets)
        for i, (w, out, start, row) in enumerate(self.targets):
            at, member = out.data_ptr() + 4 * start, out.stride(0) if lead else 0
            right = job.offset + w.right, job.offset + w.right_end
            job.outs[i] = _Out(at, w.left, w.left_end, *right, row, member)
        for matrix, side in zip(job.matrices, left, strict=False):
            matrix.x, matrix.first = (None if t is None else t.data_ptr() for t in side)
        if reset is not None:
            job.reset, job.reset_member = reset.data_ptr(), rows if reset.dim() == 3 else 0

    def _split(self, first: int, end: int, stream: int | None) -> None:
        """Cut columns into parts, from a multiple of 128 on."""
        job = self.job
        job.first_group, job.groups = first // 128, -(-(end - first) // 128)
        split = kernels(self.plan.columns, self.device.index)[0]
        split.launch(job.blocks * job.groups, 128, [job], self.device, self.members, stream)

    def split_left(self, stream: int | None = None) -> None:
        """The first step: needs the left side alone. `stream`: the address of another than the current one."""
        self._split(0, self.job.left_columns, stream)

    def finish(self, right: Tensor, stream: int | None = None, with_left: bool = False) -> list[Tensor]:
        """The second: right is ([P,] T, B, width); for each wanted block its sums ([P,] right columns, left columns).

        `with_left`: and the first, in the same launch. On another stream than the current one, this object and right
        must outlive what is launched.
        """
        job, plan, members = self.job, self.plan, self.members
        job.matrices[len(self.left)].x = right.data_ptr()
        job.matrix_count = len(self.left) + 1
        stream = stream_of(self.device) if stream is None else stream
        self._split(0 if with_left else job.offset, job.columns, stream)
        _, outer, collect = kernels(plan.columns, self.device.index)
        outer.launch(len(plan.tiles) * plan.splits, 384, [job], self.device, members, stream)
        numbers = len(plan.tiles) * plan.columns * WIDTH
        collect.launch(-(-numbers // 1024), 256, [job], self.device, members, stream)
        return [target.at for target in self.targets]


def _own_target(x: Tensor, lead: Sequence[int], block: SumBlock) -> Target:
    """A tensor for the sums of a block."""
    rows, width = block.right_end - block.right, block.left_end - block.left
    return Target(block, x.new_empty((*lead, rows, width)), 0, width)
