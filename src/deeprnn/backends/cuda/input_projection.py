"""The input's product in one with the loop, and all sums over its rows after it, for plain fp32 tensors on a GPU.

A = x Uᵀ + b before the loop and, after it, the gradients of U, b and every matrix of the cell are sums over the same
rows of delta. With many rows on Hopper's tensor cores delta is split into parts once for all of them
(gemm/outer_products.cu), and the product before the loop is bound by writing A (gemm/short_rows.cu), as accurate as
fp32 products; else torch's own products serve. Either way autograd sees one operation instead of seven, which is time
of the host's. What a call's shapes decide is found once, by its `ProjectionCase`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.call import Case, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.cuda.device import device_of, hopper, index_of
from deeprnn.backends.cuda.driver import driver_version
from deeprnn.backends.cuda.epilogue import EpilogueOptions
from deeprnn.backends.cuda.gemm import row_products, weight_sums
from deeprnn.backends.cuda.gemm.weight_sums import for_vector_loads
from deeprnn.backends.cuda.recurrence import run
from deeprnn.backends.cuda.recurrence.max_abs_scan import MaxAbsScan, scanned_stages
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan
from deeprnn.backends.cuda.side_stream import SideStream
from deeprnn.backends.cuda.time_chunks import Chunks, time_chunks
from deeprnn.backends.gradients import matrix_gradients, scatter_to_matrices, vector_gradients_of_sums
from deeprnn.cells.adjoint import adjoint_of

FEWEST_ROWS = 128  # below, torch's product of the input is as fast
FEWEST_LONG_ROWS = 6144  # the same for the gradient of the input
LOADS_IN_CAPTURE = 12030  # CUDA 12.3: its drivers load kernels while a graph is captured


def serves(case: Case, projection: InputProjection, inputs: Inputs) -> bool:
    """Whether this should serve: fp32 matrices that fit the input and fill A, no masks."""
    x = projection.x
    if x.dim() != 3 or inputs.masks or case.dtype != torch.float32:
        return False
    tensors = (*projection.tensors, *inputs.states, *inputs.matrices, *inputs.vectors)
    if any(t.dtype != torch.float32 for t in tensors):
        return False
    if any(u.dim() != 2 or u.shape[1] != x.shape[-1] for u in projection.U):
        return False
    heights = [u.shape[0] for u in projection.U]
    wanted = [*heights, heights[0]]
    if sum(heights) != case.cell.entry_width or len(projection.b) not in (0, len(heights), len(heights) + 1):
        return False
    return all(v.shape == (n,) for v, n in zip(projection.b, wanted, strict=False))


@lru_cache(maxsize=4096)
def on_tensor_cores(projection_case: ProjectionCase) -> bool:
    """Whether products are taken on Hopper's tensor cores: many rows, and shapes that the kernels can read."""
    cell, (steps, batch, inner) = projection_case.case.cell, projection_case.shape
    if steps * batch < FEWEST_ROWS or inner % 4 or not 8 <= inner <= row_products.MAX_RESIDENT_INNER:
        return False
    if cell.entry_width % 4 or not weight_sums.fits(adjoint_of(cell), steps * batch):
        return False
    return hopper(projection_case.case.device)


def forward(
    projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs, keep: bool
) -> list[Tensor]:
    """A, then the loop."""
    case = projection_case.case
    if not on_tensor_cores(projection_case):
        return run.forward(case, inputs._replace(A=_torch_product(projection)), keep)
    x = for_vector_loads(projection.x)
    scan = _scan_ahead(case, x, inputs, keep) if _is_captured(x) else None
    A = _product(x, projection.matrix, projection.bias, scan)
    return run.forward(case, inputs._replace(A=A), keep, scan=scan)


def _torch_product(projection: InputProjection) -> Tensor:
    """`projection.A`, of plain tensors: one call where `functional.linear` makes several of them."""
    x, bias = projection.x, projection.bias
    if bias is None:
        return projection.A
    return torch.addmm(bias, x.flatten(0, 1), projection.matrix.t()).view(x.shape[0], x.shape[1], -1)


def _scan_ahead(case: Case, x: Tensor, inputs: Inputs, keep: bool) -> MaxAbsScan | None:
    """The scan that the loop needs, where it goes through matrices alone: to be started beside the input's product."""
    inputs = run.dense(inputs)
    loaded = run.prepared(case, inputs, x, EpilogueOptions(inputs.reset is not None, keep), False)
    plan = loaded.plan
    if not isinstance(plan, TensorCorePlan) or any(scanned_stages(plan, loaded.schedule, ())):
        return None
    return run.forward_scan(loaded, run.rounded(inputs, case, plan), x)


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
    projection_case: ProjectionCase,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    projection: InputProjection,
    inputs: Inputs,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The loop, then all sums over its rows: the gradients of x, U, b, states, matrices and vectors."""
    case, cell = projection_case.case, projection_case.case.cell
    adjoint, groups = adjoint_of(cell), _by_group(projection_case, needed)
    fast = on_tensor_cores(projection_case)
    gradients, first = run.moved_to_states(cell, gradients, stored, inputs)
    weights = groups.U or groups.b or groups.matrices or groups.vectors
    if fast and weights and stored[0].numel():
        loop, delta, sums, input_sums = _with_sums(projection_case, gradients, stored, projection, inputs)
        d_matrices: Sequence[Tensor | None] = scatter_to_matrices(adjoint, sums)
        d_U, summed = input_sums[0], input_sums[1] if len(input_sums) > 1 else None
        states = loop.state_gradients() if groups.states else []
    else:
        delta, states = run.backward(case, gradients, stored, inputs, states=groups.states)
        rows = delta.flatten(0, 1)
        entry = rows if adjoint.width == cell.entry_width else rows[:, : cell.entry_width]
        d_matrices = matrix_gradients(adjoint, delta, stored, inputs) if groups.matrices else []
        d_U = entry.mT @ projection.x.flatten(0, 1) if groups.U else None
        summed = rows.sum(0) if groups.vectors else entry.sum(0) if groups.b else None
    d_x = None
    if groups.x:
        entry = delta if adjoint.width == cell.entry_width else delta[..., : cell.entry_width]
        d_x = input_gradient(entry.flatten(0, 1), projection.matrix, fast).view_as(projection.x)
    results = [d_x, *_split_input_gradients(projection_case, d_U, summed)]
    results += run.with_first(states, first) if groups.states else [None] * len(cell.states)
    results += d_matrices if groups.matrices else [None] * len(cell.matrices)
    if groups.vectors and summed is not None:
        results += vector_gradients_of_sums(adjoint, summed)
    return results


class _Needed(NamedTuple):
    """Which kinds of gradients are wanted."""

    x: bool
    U: bool
    b: bool
    states: bool
    matrices: bool
    vectors: bool


@lru_cache(maxsize=4096)
def _by_group(projection_case: ProjectionCase, needed: tuple[bool, ...]) -> _Needed:
    cell, flags = projection_case.case.cell, iter(needed)
    counts = (
        1,
        len(projection_case.heights),
        projection_case.biases,
        len(cell.states),
        len(cell.matrices),
        len(cell.vectors),
    )
    return _Needed(*(any(tuple(islice(flags, count))) for count in counts))


def _split_input_gradients(
    projection_case: ProjectionCase, d_U: Tensor | None, summed: Tensor | None
) -> list[Tensor | None]:
    """The gradients of every U and b, from those side by side."""
    heights, biases = projection_case.heights, projection_case.biases
    alone = len(heights) == 1
    U = [None] * len(heights) if d_U is None else [d_U] if alone else list(d_U.split(heights))
    if summed is None or not biases:
        return [*U, *[None] * biases]
    width = projection_case.case.cell.entry_width
    summed = summed if len(summed) == width else summed[:width]
    b = [summed] if alone else list(summed.split(heights))
    return [*U, *b, *b[:1]][: len(heights) + biases]


class _Chunk(NamedTuple):
    """A chunk of the sequence: its loop, and the sums over its rows."""

    loop: run.BackwardLaunch
    delta: Tensor
    sums: weight_sums.WeightSums


def _with_sums(
    projection_case: ProjectionCase,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    projection: InputProjection,
    inputs: Inputs,
) -> tuple[run.BackwardLaunch, Tensor, list[Tensor], list[Tensor]]:
    """The last loop, delta, the loop's sums and the input's."""
    like = stored[0]
    delta = like.new_empty(*like.shape[:-1], adjoint_of(projection_case.case.cell).width)
    chunks = _chunks(projection_case, gradients, stored, projection, inputs, delta)
    if len(chunks) > 1 or _is_captured(delta):
        _run_overlapped(chunks, delta.device)
        sums, input_sums = chunks[-1].sums.finish(chunks[-1].delta)
    else:  # Forking costs the host more than the card would gain: splitting what is there takes a few µs.
        (chunk,) = chunks
        if chunk.loop.scan is not None:
            chunk.loop.scan.start()
        chunk.loop.launch()
        sums, input_sums = chunk.sums.all_at_once(chunk.delta)
    return chunks[-1].loop, delta, sums, input_sums


def _run_overlapped(chunks: Sequence[_Chunk], device: torch.device) -> None:
    """Launch every loop, and the sums of each chunk but the last beside the loop over the next chunk."""
    side = None
    if chunks[0].loop.scan is not None:  # before anything goes beside the loop: it would take its processors
        chunks[0].loop.scan.start()
    try:
        for i, chunk in enumerate(chunks):
            if side is not None and i == 1:
                side.wait_for_mark()
            side = SideStream(device)
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


def _chunks(
    projection_case: ProjectionCase,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    projection: InputProjection,
    inputs: Inputs,
    delta: Tensor,
) -> list[_Chunk]:
    """The chunks, the last one first, as the loop goes. All memory is taken here."""
    case, cell = projection_case.case, projection_case.case.cell
    adjoint = adjoint_of(cell)
    plan, chunks = _time_chunks(projection_case), []
    gradients = [None if g is None else g.contiguous() for g in gradients]
    ones = bool(projection.b or inputs.vectors)

    def part(t: Any, a: int, b: int) -> Any:
        return t if t is None or len(plan.chunks) == 1 else t[a:b]

    for a, b in reversed(plan.chunks):
        states = [stored[cell.outputs.index(o)][a - 1] for o in cell.new_states] if a else inputs.states
        now = inputs._replace(states=states, reset=part(inputs.reset, a, b))
        chunk_stored = [part(x, a, b) for x in stored]
        chunk_delta = part(delta, a, b)
        next_delta = delta[b] if b < len(delta) else None
        chunk_gradients = [part(g, a, b) for g in gradients]
        loop = run.BackwardLaunch.of(
            case, chunk_gradients, chunk_stored, now, chunk_delta, next_delta, a == 0
        )
        onto = chunks[0].sums if chunks else None
        free = plan.free_processors if a else 0
        x = part(projection.x, a, b)
        chunks.append(
            _Chunk(loop, chunk_delta, weight_sums.WeightSums(adjoint, chunk_stored, now, x, ones, free, onto))
        )
    return chunks


def _time_chunks(projection_case: ProjectionCase) -> Chunks:
    """The chunks in which to go backward: one where units carry more from step to step than delta holds."""
    captured = projection_case.case.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return time_chunks_of(projection_case, captured)


@lru_cache(maxsize=4096)
def time_chunks_of(projection_case: ProjectionCase, captured: bool) -> Chunks:
    """The same, by whether a graph is captured."""
    case, (steps, batch, inner) = projection_case.case, projection_case.shape
    carries = any(node.op == "state" for stage in adjoint_of(case.cell).stages for node, _ in stage.leaves)
    if case.device.type != "cuda" or carries or case.cell.vectors:
        return Chunks(((0, steps),), 0)
    device = device_of(index_of(case.device))
    # A capture that follows a plain call needs kernels of its own then, and older drivers load none meanwhile.
    captured = captured and driver_version() >= LOADS_IN_CAPTURE
    return time_chunks(case.cell, steps, batch, inner, case.precision == "bf16", device, captured)


def _is_captured(x: Tensor) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def input_gradient(delta: Tensor, matrix: Tensor, fast: bool) -> Tensor:
    """delta (rows, width) times the matrix (width, I)."""
    if not fast or len(delta) < FEWEST_LONG_ROWS or not delta.is_contiguous():
        return delta @ matrix
    return row_products.rows_times(delta, matrix.mT)
