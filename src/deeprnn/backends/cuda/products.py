"""Weight gradients dᵀx over many rows on the tensor cores, as accurate as fp32 products.

Each operand's columns are scaled by powers of two, exactly, so that the largest number of each lies in
[2¹⁴, 2¹⁵), and a number is then written as two fp16 parts of 11 bits: high + low, off by at most 2⁻²² of itself
(or 2⁻⁴⁰ of its column's largest, where that is more). The product is high·high + high·low + low·high, each exact
in fp32; low·low, below 2⁻²² of a term, is left out. What remains is how the sums are taken. Tensor cores
add in fp32 but cut off instead of rounding, an error that grows with the number of rows: 1.2e-5 of the result over
51,200 rows, measured. So high·high is summed in chunks of at most CHUNK rows, whose sums are added up in fp32
by rounding: 7e-7, between half and once the error of torch's fp32 product of the same size. The mixed products
are 2¹¹ times smaller and need no chunks. Columns that hold an infinity or NaN give NaN or infinity, as in fp32.

Nothing here waits for the device or depends on TF32; sums in less than fp32, which torch can be told to use for
fp16 products (`allow_fp16_accumulation`), switch this path off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc, tall
from deeprnn.backends.cuda.driver import Kernel, index_of
from deeprnn.backends.cuda.launch import device_of

CHUNK = 512  # rows whose products are summed on the tensor cores alone
FEWEST_ROWS = 768  # below, the launches cost more than the arithmetic saved
FEWEST_COLUMNS = 64  # of a layer
MOST_PARTIAL = 2**30  # numbers in the chunks' sums, 4 GiB: beyond, torch's product, which needs no room
DEVICE = "cuda"  # tests without a GPU name another
STRIP, BLOCK_ROWS = 128, 64  # as in products.cu


def serves(dA: Tensor, h: Tensor, z: Tensor, h0: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the products of these tensors should be taken this way: large, fp32, on a GPU, no gradient wanted."""
    if dA.device.type != DEVICE or any(x.dtype != torch.float32 for x in (dA, h, z, h0)):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (dA, h, z, h0)):
        return False  # a second backward goes through plain products
    rows, members = dA.shape[-3] * dA.shape[-2], dA.shape[0] if dA.dim() == 4 else 1
    if rows * members < FEWEST_ROWS or rows < 128 or any(n < FEWEST_COLUMNS for n in sizes):
        return False
    if hopper(dA.device) and tall_fits(rows, sizes):
        return True
    if any(n % 8 for n in sizes) or members * chunks(rows)[0] * sum(sizes) * max(sizes) > MOST_PARTIAL:
        return False
    return able(dA.device)


def able(device: torch.device) -> bool:
    """Whether the GPU and torch's settings allow it: fp16 products must be summed in fp32."""
    if torch.version.cuda is None or getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def hopper(device: torch.device) -> bool:
    """Whether the kernel that splits as it loads can run: it is written for Hopper's products of warpgroups."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return device_of(index_of(device)).capability == (9, 0)


def tall_fits(rows: int, sizes: Sequence[int]) -> bool:
    """Whether that kernel can take these products: as many tiles and sums as its tables hold, rows it can count."""
    tiles = -(-sum(sizes) // 64) * (-(-sum(sizes) // 128) + 2)
    return len(sizes) <= tall.MOST_OUTS // 4 and tiles <= tall.MOST_TILES and rows < 2**31 - 2**16


@lru_cache(maxsize=256)
def _sums_of(
    sizes: tuple[int, ...], runs: tuple[Sequence[int], ...], entering: int, with_bias: bool
) -> tuple[tuple[tall.Wanted, ...], int]:
    """What `AllSums` asks for, those for the transition's matrices first, and how many these are."""
    ends, total, at = [0, *accumulate(sizes)], sum(sizes), sizes[-1]
    wanted = [tall.Wanted(0, at, ends[run[0]], ends[run[-1] + 1]) for run in runs]
    entered = []  # before the layers below: those are wanted for few columns of dA, these for all
    for width in (entering, int(with_bias)):
        if width:
            entered.append(tall.Wanted(at, at + width, 0, total))
            at += width
    for l in range(1, len(sizes)):
        wanted.append(tall.Wanted(at + ends[l - 1], at + ends[l], ends[l], ends[l + 1]))
    return (*wanted, *entered), len(wanted)


class AllSums:
    """Σ δᵀ h(t-1) for each run of layers and Σ δ_lᵀ z_{l-1} for l > 0; Σ δᵀ x and Σ δ where they are wanted.

    By the kernel that is written for Hopper; everything may have a leading member dimension. `begin` needs no
    gradient and may run beside the loop that computes them.
    """

    def __init__(
        self,
        h: Tensor,
        z: Tensor,
        h0: Tensor,
        reset: Tensor | None,
        sizes: Sequence[int],
        runs: Sequence[Sequence[int]],
        x: Tensor | None = None,
        with_bias: bool = False,
        free: int = 0,
        onto: AllSums | None = None,
    ):
        """`free` and `onto`: see `tall.Sums`."""
        self.with_bias = with_bias
        wanted, self.own = _sums_of(tuple(sizes), tuple(runs), 0 if x is None else x.shape[-1], with_bias)
        left = [tall.Left(_ready(h), _ready(h0))]
        if x is not None:
            left.append(tall.Left(_ready(x)))
        if with_bias:
            left.append(tall.Left(None))
        if len(sizes) > 1:
            left.append(tall.Left(_ready(z)))
        marks = None if reset is None else reset.contiguous()
        earlier = None if onto is None else onto.sums
        self.sums = tall.Sums(left, sum(sizes), marks, wanted, free, earlier)

    def begin(self, stream: int | None = None) -> None:
        """Cut states, layers and inputs into parts, perhaps on another stream than the current one."""
        self.sums.cut_left(stream)

    def finish(self, dA: Tensor, stream: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The sums for the transition's matrices; those for the input and the biases."""
        found = self.sums.finish(_ready(dA), stream)
        if self.with_bias:
            found[-1] = found[-1].squeeze(-1)
        return found[: self.own], found[self.own :]


def chunks(rows: int) -> tuple[int, int]:
    """How many chunks, and how many rows each has: at most CHUNK, a multiple of 16, the last one padded."""
    count = -(-rows // CHUNK)
    return count, -(-rows // (16 * count)) * 16


torch.library.define(
    "deeprnn::weight_products_cuda",
    "(Tensor dA, Tensor h, Tensor z, Tensor h0, Tensor? reset, int[] sizes, int[] runs) -> Tensor[]",
)
weight_products = torch.ops.deeprnn.weight_products_cuda.default


@torch.library.register_fake("deeprnn::weight_products_cuda")
def _(dA, h, z, h0, reset, sizes, runs):
    lead, ends = dA.shape[:-3], [0, *accumulate(sizes)]
    shapes = [(ends[b] - ends[a], sizes[-1]) for a, b in _pairs(runs)]
    shapes += [(sizes[l], sizes[l - 1]) for l in range(1, len(sizes))]
    return [dA.new_empty(*lead, *shape) for shape in shapes]


def _weight_products(
    dA: Tensor,
    h: Tensor,
    z: Tensor,
    h0: Tensor,
    reset: Tensor | None,
    sizes: Sequence[int],
    runs: Sequence[int],
) -> list[Tensor]:
    """Σ δᵀ h(t-1) for each run of layers (first and one past the last, flattened), then Σ δ_lᵀ z_{l-1} for l > 0."""
    if hopper(dA.device) and tall_fits(dA.shape[-3] * dA.shape[-2], sizes):
        sums = AllSums(h, z, h0, reset, sizes, [range(a, b) for a, b in _pairs(runs)])
        sums.begin()
        return sums.finish(dA)[0]
    population = dA.dim() == 4
    dA, h, z, h0 = (_ready(x) if population else _ready(x).unsqueeze(0) for x in (dA, h, z, h0))
    marks = None if reset is None else reset.contiguous()
    members, steps, batch, _ = dA.shape
    ends = [0, *accumulate(sizes)]
    count, each = chunks(steps * batch)
    matrices = [(dA, None, None, 1), (h, h0, marks, 0)] + ([(z, None, None, 0)] if len(sizes) > 1 else [])
    with torch.cuda.device(dA.device):
        parts, largest = _split(matrices, members, steps * batch, batch, count, each)
        jobs = [(slice(ends[a], ends[b]), 1, slice(0, sizes[-1])) for a, b in _pairs(runs)]
        for l in range(1, len(sizes)):
            jobs.append((slice(ends[l], ends[l + 1]), 2, slice(ends[l - 1], ends[l])))
        found = [_product(parts, largest, *job) for job in jobs]
    return found if population else [x.squeeze(0) for x in found]


torch.library.impl("deeprnn::weight_products_cuda", "cuda", _weight_products)


def _ready(x: Tensor) -> Tensor:
    """Contiguous, and where four numbers are read at once: a state may be a part of something longer."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _pairs(runs: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))


class _Source(ctypes.Structure):  # as in products.cu
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "first", "reset", "largest", "parts")),
        *((name, ctypes.c_int64) for name in ("reset_member", "width", "low_first")),
    )


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> Kernel:
    return Kernel(nvrtc.cubin("products.cu", {}, device_of(device).arch), name, device)


def _split(
    matrices: Sequence[tuple[Tensor, Tensor | None, Tensor | None, int]],
    members: int,
    rows: int,
    batch: int,
    count: int,
    each: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Per matrix its parts (P, count, 2, each, width) in fp16 and its columns' largest bits (P, width)."""
    device = matrices[0][0].device
    widths = [x.shape[-1] for x, *_ in matrices]
    zeros = torch.zeros(members * sum(widths), dtype=torch.int32, device=device)
    largest = [
        z.view(members, w) for z, w in zip(zeros.split([members * w for w in widths]), widths, strict=True)
    ]
    parts = [torch.empty(members, count, 2, each, w, dtype=torch.float16, device=device) for w in widths]
    sources = (_Source * 4)()
    for i, (x, first, marks, low_first) in enumerate(matrices):
        pointers = (x, first, marks, largest[i], parts[i])
        member = rows if marks is not None and marks.dim() == 3 else 0
        sources[i] = _Source(
            *(None if p is None else p.data_ptr() for p in pointers), member, widths[i], low_first
        )
    long, strips, over = ctypes.c_int64, -(-max(widths) // STRIP), len(matrices) * members
    common = [sources, long(members), long(rows), long(batch)]
    # Enough blocks to fill the card, each with at least 32 rows.
    blocks = max(1, min(-(-rows // 32), -(-8 * device_of(device.index).processors // (strips * over))))
    _kernel("column_largest", device.index).launch(strips * blocks, 256, common, device, rows=over)
    _kernel("two_halves", device.index).launch(
        strips * -(-count * each // BLOCK_ROWS), 256, [*common, long(count), long(each)], device, rows=over
    )
    return parts, largest


def _product(
    parts: Sequence[Tensor], largest: Sequence[Tensor], rows: slice, right: int, columns: slice
) -> Tensor:
    """Columns `rows` of the first matrix against columns `columns` of another, over all rows: (P, m, k)."""
    d, x = parts[0][..., rows], parts[right][..., columns]
    members, count, _, _, m = d.shape
    k = x.shape[-1]
    high = torch.bmm(
        d.flatten(0, 1)[:, 1].mT, x.flatten(0, 1)[:, 0], out_dtype=torch.float32
    )  # (P · count, m, k)
    if members == 1:  # mm may cut the inner dimension among the processors, bmm does not
        mixed = torch.mm(d.flatten(0, 3).mT, x.flatten(0, 3), out_dtype=torch.float32)
    else:
        mixed = torch.bmm(d.flatten(1, 3).mT, x.flatten(1, 3), out_dtype=torch.float32)
    out = torch.empty(members, m, k, dtype=torch.float32, device=d.device)
    tensors = (high, mixed, largest[0][:, rows], largest[right][:, columns], out)
    numbers = (count, m, k, largest[0].shape[1], largest[right].shape[1])
    arguments = [ctypes.c_void_p(t.data_ptr()) for t in tensors] + [ctypes.c_int64(n) for n in numbers]
    _kernel("gather", d.device.index).launch(-(-m * k // 1024), 256, arguments, d.device, rows=members)
    return out
