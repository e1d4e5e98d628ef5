"""Run the kernels' own sources on tensors that end where memory does: a read beyond is a signal.

`python -m tests.backends.guarded_memory` ends with 0 where nothing beyond them was read.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deeprnn.backends.call import Case
from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence import launch, max_abs_scan, run, whole_card_plans
from deeprnn.backends.cuda.recurrence.cluster_plans import cluster_plan
from deeprnn.backends.cuda.recurrence.plans import KernelPlan
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import tensor_core_plan
from deeprnn.backends.cuda.recurrence.whole_card_plans import whole_card_shape
from deeprnn.backends.cuda.recurrence.whole_card_tensor_core_plans import whole_card_tensor_core_shape
from deeprnn.cells.description import CellDescription
from tests.backends import grid
from tests.backends.cells_by_hand import by_name
from tests.backends.emulated import emulated_kernel

ROWS = 4  # of the batch
KEPT: list[mmap.mmap] = []


def guarded(x: Tensor) -> Tensor:
    """A copy that ends where a page begins that nobody may touch."""
    page, size = mmap.PAGESIZE, x.numel() * x.element_size()
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    KEPT.append(memory)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(first + room), page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=room - size).view(x.shape)
    return copy.copy_(x)


class NoScan:
    """Stands in for the scan of magnitudes, which is not what is examined."""

    def launch(self, blocks, threads, arguments, device, members=1, stream=None) -> None:
        """Results are whatever lies there."""


def plans(backward: bool) -> Iterator[tuple[CellDescription, KernelPlan | None]]:
    """A shape of each kernel. 80 units are five tiles of 16: of four warps that share them, one has a second tile."""
    cells, rnn, device = by_name(18), grid.transition((80,), ("sigmoid",)), Device()
    common = ROWS, 1, False, device
    yield rnn, tensor_core_plan(schedule(rnn, backward), *common, 2, 1, 4, 4)
    yield cells["lstm"], cluster_plan(schedule(cells["lstm"], backward), *common, 3, 128, 8, 2, 3)
    yield cells["gru"], whole_card_shape(schedule(cells["gru"], backward), *common, 2, 1, 2, 64, (2, 1, 1))
    lstm = by_name(33)["lstm"]
    yield lstm, whole_card_tensor_core_shape(schedule(lstm, backward), ROWS, 1, device, 16, 1)


def examine(cell: CellDescription, both: Sequence[KernelPlan | None]) -> None:
    """Forward and backward."""
    tensors = grid.draw(grid.Case("guarded", cell, 2, ROWS), 0)
    inputs = grid.inputs_of(cell, {n: guarded(x.float()) for n, x in tensors.items()})
    case = Case(cell, torch.device("cpu"), torch.float32)
    assert all(both)
    stored = [guarded(x) for x in run.forward(case, inputs, True, both[0])]
    gradients = [guarded(tensors[f"gradient{k}"].float()) for k in range(len(cell.outputs))]
    run.backward(case, gradients, stored, inputs._replace(A=None), both[1])


def main() -> None:
    """Every kernel."""
    launch.load_kernel = emulated_kernel
    max_abs_scan.load_kernel = lambda *_: NoScan()
    launch.device_of = run.device_of = lambda index: Device()
    whole_card_plans.TILES = dict.fromkeys((64, 128), (256, 512))
    for forward, backward in zip(plans(False), plans(True), strict=True):
        examine(forward[0], (forward[1], backward[1]))


if __name__ == "__main__":
    main()
