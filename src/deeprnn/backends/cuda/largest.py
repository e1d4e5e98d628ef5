"""How large the numbers are that mma.cu will meet: numbers in fp16 parts need a scale.

One launch of largest.cu before the loop looks at every matrix and at what is added to sums. What it finds lies in one
buffer: (members, matrices, pieces), the largest sum of magnitudes of eight rows each; and (members, T, B, layers), the
largest magnitude of a row. The loop itself looks at the vectors before its first step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.planning import unbounded

if TYPE_CHECKING:
    from deeprnn.backends.cuda.planning import Ring

WARPS = 8  # of a block, each with a row
GIVEN, MID = range(2)  # what is added to sums, the same of the layers below the top
FIELDS = 10  # of a job: `Rows` in largest.cu


class Sought(NamedTuple):
    """Everything about a launch that does not depend on where the tensors lie."""

    fields: tuple[int, ...]  # of all jobs, the matrices first; addresses are zero
    data: tuple[tuple[int, int, int], ...]  # place of an address, which tensor's, bytes from its first
    outs: tuple[tuple[int, int], ...]  # place of an address, bytes from the buffer's first
    size: int  # of the buffer, in numbers
    blocks: int
    inputs: int  # where the buffer's second part begins, in bytes


class Case(NamedTuple):
    """The shapes of a launch; the stride is that from one member to the next."""

    members: int
    steps: int
    batch: int
    given_stride: int
    has_mid: bool


@lru_cache(maxsize=1024)
def sought(ring: Ring, case: Case) -> Sought:
    """The jobs of a launch, layouts as in params.cuh."""
    depth, matrices, pieces = len(ring.sizes), len(ring.stages), -(-max(ring.sizes) // WARPS)
    sizes = ring.sizes[::-1] if ring.backward else ring.sizes  # by layer
    total, top = sum(sizes), sizes[-1]
    starts = [sum(sizes[:l]) for l in range(depth)]
    rows = case.steps * case.batch
    inputs = case.members * matrices * pieces
    fields: list[int] = []
    data: list[tuple[int, int, int]] = []
    outs: list[tuple[int, int]] = []
    blocks = 0

    def add(
        strides: Sequence[int], shape: Sequence[int], out: int, out_strides: Sequence[int], count: int
    ) -> None:
        nonlocal blocks
        outs.append((len(fields) + 6, 4 * out))
        fields.extend((0, *strides, *shape, 0, *out_strides, blocks))
        blocks += count

    def look(
        which: int, wide: int, member: int, rows: int, at: int, layers: Sequence[tuple[int, int]]
    ) -> None:
        """At rows of `wide` numbers: of each layer those from a place on."""
        for l, start in layers:
            data.append((len(fields), which, 4 * start))
            add((member, wide, 1), (rows, sizes[l]), at + l, (rows * depth, depth), -(-rows // WARPS))

    for j, (stage, source) in enumerate(zip(ring.stages, ring.sources, strict=True)):
        shape = ring.sizes[stage], ring.sizes[source]
        add((0, 0, 0), shape, j * pieces, (matrices * pieces, 0), pieces)
    every, only = list(enumerate(starts)), [(depth - 1, 0)]
    if ring.backward:
        look(GIVEN, top, rows * top, rows, inputs, only)
        if case.has_mid:
            look(MID, total - top, rows * (total - top), rows, inputs, every[:-1])
    elif unbounded(ring):
        look(GIVEN, total, case.given_stride, rows, inputs, every)
    size = inputs + case.members * rows * depth
    return Sought(tuple(fields), tuple(data), tuple(outs), size, blocks, 4 * inputs)


@lru_cache(maxsize=64)
def kernel_of(jobs: int, device: int, arch: str) -> Kernel:
    """The compiled kernel for so many jobs."""
    return Kernel(nvrtc.cubin("largest.cu", {"JOBS": str(jobs)}, arch), "largest", device)


class Look:
    """A launch in two steps: all memory is taken here, `begin` may use another stream.

    Memory taken later may be some that a loop gave back while it still runs. This object must outlive what is launched.
    """

    def __init__(
        self, ring: Ring, case: Case, matrices: Sequence[tuple[Tensor, int, int, int]],
        tensors: Sequence[Tensor | None], device: torch.device, arch: str,
    ):  # fmt: skip
        """At these matrices and at what stands beside the loop: GIVEN and MID."""
        self.wanted = wanted = sought(ring, case)
        self.device, self.members, self.tensors = device, case.members, (matrices, tensors)
        self.buffer = torch.empty(wanted.size, device=device)
        fields, base = list(wanted.fields), self.buffer.data_ptr()
        for j, (matrix, *strides) in enumerate(matrices):
            fields[FIELDS * j : FIELDS * j + 4] = [matrix.data_ptr(), *strides]
        for place, which, offset in wanted.data:
            tensor = tensors[which]
            assert tensor is not None
            fields[place] = tensor.data_ptr() + offset
        for place, offset in wanted.outs:
            fields[place] = base + offset
        self.block = (ctypes.c_int64 * len(fields))(*fields)
        self.kernel = kernel_of(len(wanted.outs), device.index or 0, arch)
        self.addresses = [base, base + wanted.inputs]  # of both parts

    def begin(self, stream: int | None = None) -> Look:
        """Look, on the current stream or that at another address."""
        self.kernel.launch(self.wanted.blocks, 32 * WARPS, [self.block], self.device, self.members, stream)
        return self
