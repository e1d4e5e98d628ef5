"""The input's product in one with the loop, and all sums over its rows after it, for plain fp32 tensors on a GPU.

A = x Uᵀ + b before the loop and, after it, the gradients of U, b and every matrix of the cell are sums over the same
rows of delta. With many rows on Hopper's tensor cores delta is split into parts once for all of them
(gemm/outer_products.cu), and the product before the loop is bound by writing A (gemm/short_rows.cu), as accurate as
fp32 products; else torch's own products serve. Either way autograd sees one operation instead of seven, which is time
of the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cuda.device import device_of, hopper, index_of
from deeprnn.backends.cuda.driver import driver_version
from deeprnn.backends.cuda.epilogue import Options
from deeprnn.backends.cuda.gemm import row_products, weight_sums
from deeprnn.backends.cuda.recurrence import run
from deeprnn.backends.cuda.recurrence.max_abs_scan import MaxAbsScan
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan
from deeprnn.backends.cuda.side_stream import SideStream
from deeprnn.backends.cuda.time_chunks import Chunks, time_chunks
from deeprnn.backends.gradients import assembled, matrix_gradients
from deeprnn.backends.protocol import Case, Inputs, Linear, LinearGradients
from deeprnn.cells.adjoint import adjoint
from deeprnn.cells.description import CellDescription

FEWEST_ROWS = 2048  # below, torch's product of the input is as fast
FEWEST_LONG_ROWS = 6144  # the same for the gradient of the input
LOADS_IN_CAPTURE = 12030  # CUDA 12.3: its drivers load kernels while a graph is captured


def serves(case: Case, entering: Linear, inputs: Inputs) -> bool:
    """Whether this should serve: fp32 matrices that fit the input and fill A, no parameters of other kinds."""
    x = entering.x
    if x.dim() != 3 or inputs.vectors or inputs.streams or case.dtype != torch.float32:
        return False
    if any(t.dtype != torch.float32 for t in (*entering.tensors, *inputs.states, *inputs.matrices)):
        return False
    if any(u.dim() != 2 or u.shape[1] != x.shape[-1] for u in entering.U):
        return False
    heights = [u.shape[0] for u in entering.U]
    wanted = [*heights, heights[0]]
    if sum(heights) != case.cell.entry_width or len(entering.b) not in (0, len(heights), len(heights) + 1):
        return False
    return all(v.shape == (n,) for v, n in zip(entering.b, wanted, strict=False))


def on_tensor_cores(x: Tensor, cell: CellDescription) -> bool:
    """Whether products are taken on Hopper's tensor cores: many rows, and shapes that the kernels can read."""
    steps, batch, inner = x.shape
    if (
        steps * batch < FEWEST_ROWS
        or inner % 4
        or not 8 <= inner <= row_products.SHORT
        or cell.entry_width % 4
    ):
        return False
    if not weight_sums.fits(adjoint(cell), steps * batch):
        return False
    return x.is_contiguous() and x.data_ptr() % 16 == 0 and hopper(x.device)


def forward(case: Case, entering: Linear, inputs: Inputs, keep: bool) -> list[Tensor]:
    """A, then the loop."""
    x, matrix, bias = entering.x, entering.matrix, entering.bias
    if not on_tensor_cores(x, case.cell):
        return run.forward(case, inputs._replace(A=entering.A), keep)
    scan = _scan_ahead(case, x, inputs, keep) if _is_captured(x) else None
    A = _product(x, matrix, bias, scan)
    return run.forward(case, inputs._replace(A=A), keep, scan=scan)


def _scan_ahead(case: Case, x: Tensor, inputs: Inputs, keep: bool) -> MaxAbsScan | None:
    """The scan that the loop needs, where it goes through matrices alone: to be started beside the input's product."""
    inputs = run.dense(inputs)
    ready = run.prepared(case, inputs, x, Options(inputs.reset is not None, keep), False)
    plan = ready.plan
    if not isinstance(plan, TensorCorePlan) or plan.ranges is None or not all(plan.ranges.bounded):
        return None
    return run.forward_scan(ready, run.rounded(inputs, case, ready), x)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, scan: MaxAbsScan | None) -> Tensor:
    """A, with a scan beside it."""
    side = None
    if scan is not None:
        side = SideStream(x.device)
        scan.start(side.fork())
    try:
        return row_products.rows_times(x.flatten(0, 1), matrix, bias).view(*x.shape[:-1], -1)
    finally:  # what began in a capture must end in it
        if side is not None:
            side.join()


def backward(
    case: Case,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    entering: Linear,
    inputs: Inputs,
    needed: LinearGradients,
) -> LinearGradients:
    """The loop, then all sums over its rows."""
    cell, x = case.cell, entering.x
    own, fast = adjoint(cell), on_tensor_cores(entering.x, case.cell)
    gradients, first = run.moved_to_states(cell, gradients[: len(cell.outputs)], stored, inputs)
    weights = any(t is not None for t in (*needed.U, *needed.b, *needed.matrices))
    if fast and weights and stored[0].numel():
        delta, states, sums, entered = _with_sums(case, gradients, stored, entering, inputs)
        d_matrices: Sequence[Tensor | None] = assembled(own, sums)
        d_U, d_b = entered[0], entered[1] if len(entered) > 1 else None
    else:
        found = run.backward(case, gradients, stored, inputs)
        delta, states = found
        entry = delta[..., : cell.entry_width].flatten(0, 1)
        wanted = [any(t is not None for t in group) for group in (needed.matrices, needed.U, needed.b)]
        d_matrices = (
            matrix_gradients(own, delta, stored, inputs) if wanted[0] else [None] * len(cell.matrices)
        )
        d_U = entry.mT @ x.flatten(0, 1) if wanted[1] else None
        d_b = entry.sum(0) if wanted[2] else None
    heights = [u.shape[0] for u in entering.U]
    U = [None] * len(heights) if d_U is None else list(d_U.split(heights))
    b: list[Tensor | None] = [None] * len(entering.b)
    if d_b is not None and entering.b:
        parts = d_b.split(heights)
        b = [*parts, *parts[:1]][: len(entering.b)]
    d_x = None
    if needed.x is not None:
        d_x = _input_gradient(delta[..., : cell.entry_width].flatten(0, 1), entering.matrix, fast).view_as(x)
    return LinearGradients(d_x, U, b, run.with_first(states, first), d_matrices)


class _Chunk(NamedTuple):
    """A chunk of the sequence: its loop, and the sums over its rows."""

    loop: run.BackwardLaunch
    delta: Tensor
    sums: weight_sums.WeightSums


def _with_sums(
    case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], entering: Linear, inputs: Inputs
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """delta, the states' gradients, the loop's sums and the input's; those of a chunk beside the loop over the next."""
    like = stored[0]
    delta = like.new_empty(*like.shape[:-1], adjoint(case.cell).width)
    chunks, side = _chunks(case, gradients, stored, entering, inputs, delta), None
    if chunks[0].loop.scan is not None:
        chunks[
            0
        ].loop.scan.start()  # before anything goes beside the loop: it would take the loop's processors
    try:
        for i, chunk in enumerate(chunks):
            if side is not None and i == 1:
                side.wait_for_mark()
            side = SideStream(delta.device)
            chunk.loop.launch()
            stream = side.fork()  # the loop leaves processors idle, and nothing here waits for it
            if i > 0:
                chunks[i - 1].sums.finish(chunks[i - 1].delta, stream)
                continue
            for later in chunks[1:]:
                if later.loop.scan is not None:
                    later.loop.scan.start(stream)
            side.mark()
            for each in chunks:
                each.sums.start(stream)
    finally:  # where a launch failed, too: the side stream may still read these tensors
        if side is not None:
            side.join()
    sums, entered = chunks[-1].sums.finish(chunks[-1].delta)
    return delta, chunks[-1].loop.state_gradients(), sums, entered


def _chunks(
    case: Case,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    entering: Linear,
    inputs: Inputs,
    delta: Tensor,
) -> list[_Chunk]:
    """The chunks, the last one first, as the loop goes. All memory is taken here."""
    own, cell = adjoint(case.cell), case.cell
    plan, found = _time_chunks(case, entering.x), []
    gradients = [None if g is None else g.contiguous() for g in gradients]
    outputs = [cell.outputs.index(o) for o in cell.new_states]

    def part(t: Any, a: int, b: int) -> Any:
        return t if t is None or len(plan.chunks) == 1 else t[a:b]

    for a, b in reversed(plan.chunks):
        states = [stored[k][a - 1] for k in outputs] if a else inputs.states
        now = inputs._replace(states=states, reset=part(inputs.reset, a, b))
        own_stored = [part(x, a, b) for x in stored]
        own_delta = part(delta, a, b)
        after = delta[b] if b < len(delta) else None
        loop = run.BackwardLaunch.of(
            case,
            [part(g, a, b) for g in gradients],
            own_stored,
            now,
            own_delta,
            after,
            a == 0,
        )
        onto = found[0].sums if found else None
        sums = weight_sums.WeightSums(
            own,
            own_stored,
            now,
            part(entering.x, a, b),
            bool(entering.b),
            plan.free_processors if a else 0,
            onto,
        )
        found.append(_Chunk(loop, own_delta, sums))
    return found


def _time_chunks(case: Case, x: Tensor) -> Chunks:
    """The chunks in which to go backward: one where units carry more from step to step than delta holds."""
    steps, batch, inner = x.shape
    carries = any(node.op == "state" for stage in adjoint(case.cell).stages for node, _ in stage.leaves)
    if x.device.type != "cuda" or carries:
        return Chunks(((0, steps),), 0)
    device = device_of(index_of(x.device))
    # A capture that follows a plain call needs kernels of its own then, and older drivers load none meanwhile.
    captured = _is_captured(x) and driver_version() >= LOADS_IN_CAPTURE
    return time_chunks(case.cell, steps, batch, inner, case.precision == "bf16", device, captured)


def _is_captured(x: Tensor) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _input_gradient(delta: Tensor, matrix: Tensor, fast: bool) -> Tensor:
    """delta (rows, width) times the matrix (width, I)."""
    if not fast or len(delta) < FEWEST_LONG_ROWS or not delta.is_contiguous():
        return delta @ matrix
    return row_products.rows_times(delta, matrix.mT)
