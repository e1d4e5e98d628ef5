"""A layer's whole call as recorded launches: what a call from Python costs the host.

For shapes whose products our own kernels take (`input_projection.on_tensor_cores`) nothing but kernels lies between a
layer's input and its output, and between the gradient of its output and those of its parameters: so both ways are
recorded once for a shape (`recording.py`) and replayed at every call. Weight gradients are written where they belong,
so that nothing has to be joined, split or added up afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deeprnn.backends.call import Inputs, ProjectionCase, SavedTensors
from deeprnn.backends.cuda import input_projection
from deeprnn.backends.cuda.driver import recorded, stream_of
from deeprnn.backends.cuda.gemm import row_products, weight_sums
from deeprnn.backends.cuda.gemm.outer_products import MOST_OUTS, SumBlock, Target
from deeprnn.backends.cuda.recording import LaunchRecording, NotRecordable, Recorder, StandIn
from deeprnn.backends.cuda.recurrence import run
from deeprnn.backends.cuda.recurrence.schedule import inline_stages
from deeprnn.backends.gradients import gradients_of_outputs, merged_products, tiles_matrices_exactly
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import adjoint_of

unflatten = torch._C._nn.unflatten_dense_tensors  # type: ignore[attr-defined]


def direct_call(projection_case: ProjectionCase, wiring: Wiring) -> DirectCall | None:
    """Both directions, recorded at the first call; None where operations of torch lie between the launches."""
    if not wiring.uses_all_once or inline_stages(wiring.cell).inlined:
        return None
    if not input_projection.on_tensor_cores(projection_case) or not _separable(wiring):
        return None
    if len(wiring.U) > row_products.MOST_MATRICES or len(wiring.biases) > row_products.MOST_BIASES:
        return None
    if len(input_projection.time_chunks_of(projection_case, captured=False).chunks) > 1:
        return None
    call = DirectCall(projection_case, wiring)
    try:
        call.record_forward(True)
    except NotRecordable:
        return None
    return call


def _separable(wiring: Wiring) -> bool:
    """Whether every number of every matrix has its gradient in one sum, and the kernel's table holds all of them."""
    adjoint = adjoint_of(wiring.cell)
    if not tiles_matrices_exactly(adjoint):
        return False
    places = list(adjoint.vector_columns.values())
    if len(places) != len(wiring.vectors) or any(rows.step != 1 for rows in places):
        return False
    parts = sum(len(product.segments) for product in merged_products(adjoint))
    return parts + len(wiring.U) + len(wiring.biases) + len(wiring.vectors) <= MOST_OUTS


class DirectCall:
    """The calls of one wiring at one shape."""

    reads_output = True

    def __init__(self, projection_case: ProjectionCase, wiring: Wiring) -> None:
        self.projection_case, self.wiring, self.case = projection_case, wiring, projection_case.case
        self.steps, self.batch, _ = projection_case.shape
        self.device, cell = self.case.device, self.case.cell
        self.places = [cell.outputs.index(o) for o in cell.new_states]
        """of the states' sequences among the outputs; that of the first is the layer's output"""
        self.output = (self.steps, self.batch, cell.states[0])
        self.last = [(1, self.batch, n) for n in cell.states]
        self.delta = (self.steps, self.batch, adjoint_of(cell).width)
        self._numbers = _count(wiring.shapes)
        self._forward: dict[bool, LaunchRecording] = {}
        self._backward: dict[tuple, LaunchRecording] = {}
        self._zeros: dict[int | None, list[Tensor]] = {}

    # ---- forward

    def forward(
        self, x: Tensor, states: Sequence[Tensor] | None, parameters: Sequence[Tensor], keep: bool
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """See `protocol.DirectCall`."""
        recording = self._forward.get(keep) or self.record_forward(keep)
        stream = stream_of(self.device)
        x, first = self._read(x, states, stream)
        y = torch.empty(self.output, device=self.device)
        last = [torch.empty(shape, device=self.device) for shape in self.last]
        workspace = None
        if recording.workspace_bytes:
            workspace = torch.empty(recording.workspace_bytes, dtype=torch.uint8, device=self.device)
        addresses = [t.data_ptr() for t in (x, *first, *parameters, y, *last)]
        addresses.append(0 if workspace is None else workspace.data_ptr())
        recording.replay(addresses, stream)
        return y, last, workspace

    def _read(
        self, x: Tensor, states: Sequence[Tensor] | None, stream: int | None
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Input and first states as kernels read them."""
        first = self.zeros(stream) if states is None else [weight_sums.for_vector_loads(h) for h in states]
        return weight_sums.for_vector_loads(x), first

    def zeros(self, stream: int | None) -> list[Tensor]:
        """First states where none are given: never written to, and one for each stream, which orders their making."""
        if stream not in self._zeros:
            self._zeros[stream] = [torch.zeros(shape, device=self.device) for shape in self.last]
        return self._zeros[stream]

    def record_forward(self, keep: bool) -> LaunchRecording:
        """The input's product, the loop, and copies of the last states."""
        recorder, wiring = Recorder(self.device), self.wiring
        x, inputs, parameters = self._stand_ins(recorder)
        matrices = [parameters[i] for i in wiring.U]
        pieces = [
            (parameters[p].narrow(0, start, count), column) for p, start, count, column in wiring.biases
        ]
        biases = [row_products.Added(bias, column) for bias, column in pieces]  # type: ignore[arg-type]
        with recorded(recorder):
            A = row_products.short_rows_times(x.flatten(0, 1), matrices, biases)  # type: ignore[arg-type]
            inputs = inputs._replace(A=A.view(self.steps, self.batch, -1))
            stored = run.forward(self.case, inputs, keep)
            last = [recorder.take(shape, 4) for shape in self.last]
            for place, to in zip(self.places, last, strict=True):
                recorder.copy(to, stored[place].narrow(0, self.steps - 1, 1))  # type: ignore[arg-type]
        y = stored[self.places[0]]
        others = [s for s in stored if s is not y] if keep else []
        self._forward[keep] = recorder.finish([y, *last], others)  # type: ignore[list-item]
        return self._forward[keep]

    def _stand_ins(self, recorder: Recorder) -> tuple[StandIn, Inputs, list[StandIn]]:
        """x, states, matrices and vectors, and the parameters."""
        x = recorder.stand_in(self.projection_case.shape)
        states = [recorder.stand_in((self.batch, n)) for n in self.case.cell.states]
        parameters = [recorder.stand_in(shape) for shape in self.wiring.shapes]
        matrices = [parameters[i] for i in self.wiring.matrices]
        vectors = self.wiring.vector_parameters(parameters)  # type: ignore[arg-type]
        return x, Inputs(None, states, matrices, vectors, []), parameters  # type: ignore[arg-type]

    # ---- backward

    def backward(
        self, gradients: Sequence[Tensor | None], saved: SavedTensors, wants_x: bool, wants_parameters: bool
    ) -> Sequence[Tensor | None]:
        """See `protocol.DirectCall`."""
        dense_gradients = [
            None if g is None else g.contiguous()
            for g in gradients_of_outputs(self.case.cell, self.steps, gradients)
        ]
        key = (*[g is not None for g in dense_gradients], wants_x, wants_parameters)
        recording = self._backward.get(key) or self._record_backward(key, dense_gradients)
        stream = stream_of(self.device)
        x, first = self._read(saved.x, saved.states, stream)
        results = [torch.empty(self._numbers, device=self.device)] if wants_parameters else []
        if wants_x:
            results.append(torch.empty(self.delta, device=self.device))
        assert saved.y is not None
        addresses = [t.data_ptr() for t in (x, *first, *saved.parameters, saved.y)]
        addresses.append(0 if saved.workspace is None else saved.workspace.data_ptr())
        addresses += [t.data_ptr() for t in (*dense_gradients, *results) if t is not None]
        addresses.append(0)
        recording.replay(addresses, stream)
        d_x = self._input_gradient(results[-1], saved.parameters) if wants_x else None
        if not wants_parameters:
            return [d_x, *[None] * len(saved.parameters)]
        return [d_x, *unflatten(results[0], saved.parameters)]

    def _input_gradient(self, delta: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        entry = delta[..., : self.case.cell.entry_width].flatten(0, 1)
        U = [parameters[i] for i in self.wiring.U]
        matrix = U[0] if len(U) == 1 else torch.cat(U)
        return input_projection.input_gradient(entry, matrix, True).view(self.projection_case.shape)

    def _record_backward(self, key: tuple, dense_gradients: Sequence[Tensor | None]) -> LaunchRecording:
        """The loop, and all sums over its rows."""
        recorder, adjoint = Recorder(self.device), adjoint_of(self.case.cell)
        *_, wants_x, wants_parameters = key
        x, inputs, _ = self._stand_ins(recorder)
        stored = self._stored(recorder)
        gradients = [None if g is None else recorder.stand_in(g.shape) for g in dense_gradients]
        with recorded(recorder):
            delta = x.new_empty(self.delta)
            loop = run.BackwardLaunch.of(self.case, gradients, stored, inputs, delta)  # type: ignore[arg-type]
            if loop.scan is not None:
                loop.scan.start()
            loop.launch()
            results = []
            if wants_parameters:
                flat = x.new_empty(self._numbers)
                targets = self._targets(flat)
                ones = bool(self.wiring.biases or self.wiring.vectors)
                sums = weight_sums.WeightSums(adjoint, stored, inputs, x, ones, targets=targets)  # type: ignore[arg-type]
                sums.all_at_once(delta)  # type: ignore[arg-type]
                results.append(flat)
            results += [delta] if wants_x else []
        self._backward[key] = recorder.finish(results)
        return self._backward[key]

    def _stored(self, recorder: Recorder) -> list[StandIn]:
        """What the forward pass stored: the output, and the rest in the workspace."""
        y = recorder.stand_in(self.output)
        workspace = recorder.stand_in((0,))
        sizes = run.stored_sizes(self.case.cell, True)
        offsets = iter(self._forward[True].workspace_offsets)
        return [
            y
            if i == self.places[0]
            else StandIn(recorder, workspace.address + next(offsets), (self.steps, self.batch, n))
            for i, n in enumerate(sizes)
        ]

    def _targets(self, flat: StandIn) -> list[Target]:
        """Where every sum belongs, the parameters' gradients lying one after the other."""
        wiring, adjoint, inner = self.wiring, adjoint_of(self.case.cell), self.projection_case.shape[2]
        starts = [_count(wiring.shapes[:i]) for i in range(len(wiring.shapes))]
        ones = bool(wiring.biases or wiring.vectors)
        blocks = weight_sums.blocks(adjoint, inner, ones)
        targets: list[Target] = []

        def add(block: SumBlock, column: int, count: int, parameter: int, start: int, row: int) -> None:
            rows = block._replace(right=column, right_end=column + count)
            targets.append(Target(rows, flat, starts[parameter] + start, row))  # type: ignore[arg-type]

        for product, block in zip(merged_products(adjoint), blocks, strict=False):
            at = product.start
            for segment in product.segments:
                width = self.case.cell.matrices[segment.matrix][1]
                start = segment.row * width + segment.column
                add(block, at, segment.rows, wiring.matrices[segment.matrix], start, width)
                at += segment.rows
        column = 0
        for parameter in wiring.U:
            height = wiring.shapes[parameter][0]
            add(blocks[-1 - ones], column, height, parameter, 0, inner)
            column += height
        for parameter, start, count, column in wiring.biases:
            add(blocks[-1], column, count, parameter, start, 1)
        for (_, number), rows in adjoint.vector_columns.items():
            parameter, start, count, _ = wiring.vectors[number]
            add(blocks[-1], rows.start, count, parameter, start, 1)
        return targets


@lru_cache(maxsize=1024)
def _count(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
