"""The input's product, the loop and all gradients as one operation, and the chunks of time in which it goes backward.

On the CPU the kernels' places are taken by plain operations, so that what is tested is which is called with what.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deeprnn.backends import cuda, layer_autograd, plain, unrolling
from deeprnn.backends.call import Case, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.cuda import input_projection, side_stream, time_chunks
from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.gemm import row_products, weight_sums
from deeprnn.backends.cuda.gemm.outer_products import MOST_TILES, SumBlock, tiling
from deeprnn.backends.cuda.recurrence import run
from deeprnn.backends.cuda.recurrence.cluster_plans import cluster_plans
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.backends.gradients import merged_products
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription
from deeprnn.cells.step_graph import block_of, columns, product_blocks
from tests.backends import cells_by_hand

GPU = pytest.mark.gpu
CPU = torch.device("cpu")
DTS = DeepTransition((12, 8), ("sigmoid", "tanh"), (False, True)).cell
PAPER = DeepTransition((400, 400), ("sigmoid", "sigmoid"), (False, True)).cell
LSTM = cells_by_hand.lstm(8)
GRU = cells_by_hand.gru(8)  # with a vector
HEIGHTS = {DTS: (12, 8), LSTM: (32,), GRU: (24,)}
H200 = Device()
T, B, I = 7, 3, 5
WHOLE, CUT = (0, T), (0, 2, 3, T)


# ---- plain operations in the kernels' places


def carried(cell: CellDescription, after: Tensor, inputs: Inputs, marks: Tensor | None) -> Tensor:
    """What of the step after a chunk comes back to the state, from its row of delta."""
    blocks = zip(cell.products, product_blocks(cell), strict=True)
    total = sum(
        columns(after, adjoint_of(cell).columns[s, i], cell.stages[s].size)
        @ block_of(inputs.matrices, *block)
        for (s, i, product), block in blocks
        if product.vector.kind == "state"
    )
    assert isinstance(total, Tensor)
    return total if marks is None else total.masked_fill(marks.unsqueeze(-1), 0)


class PlainLaunch:
    """In the place of `run.BackwardLaunch`."""

    log: list[tuple[str, int, str]]

    @classmethod
    def of(cls, case, gradients, stored, inputs, delta, after=None, first=True):
        launch = cls()
        launch.given = case.cell, list(gradients), stored, inputs
        launch.delta, launch.after, launch.first, launch.steps = delta, after, first, len(delta)
        launch.scan = PlainScan(len(delta))
        cls.log.append(("memory", len(delta), "main"))
        return launch

    def launch(self) -> None:
        self.log.append(("loop", self.steps, "main"))
        cell, gradients, stored, inputs = self.given
        if self.after is not None:
            marks = inputs.reset
            if marks is not None:  # that of the step after the chunk lies behind the chunk's own
                marks = marks.as_strided((self.steps + 1, marks.shape[1]), marks.stride())[-1]
            place = cell.outputs.index(cell.new_states[0])
            known = torch.zeros_like(stored[place]) if gradients[place] is None else gradients[place].clone()
            known[-1] += carried(cell, self.after, inputs, marks)
            gradients[place] = known
        delta, self.states = plain.backward(cell, gradients, stored, inputs)
        self.delta.copy_(delta)

    def state_gradients(self) -> list[Tensor]:
        assert self.first, "the first chunk knows the gradient of the first state"
        return self.states


class PlainScan:
    """In the place of `MaxAbsScan`."""

    def __init__(self, steps):
        self.steps = steps

    def start(self, stream=None):
        PlainLaunch.log.append(("scan", self.steps, "side" if stream else "main"))


class PlainSums:
    """In the place of `WeightSums`."""

    def __init__(self, adjoint, stored, inputs, x=None, with_bias=False, free_processors=0, onto=None):
        self.given, self.x, self.with_bias, self.onto = (adjoint, stored, inputs), x, with_bias, onto
        self.started = False
        PlainLaunch.log.append(("memory", len(stored[0]), "main"))

    def start(self, stream=None):
        self.started = True
        PlainLaunch.log.append(("split", len(self.given[1][0]), "side" if stream else "main"))

    def all_at_once(self, delta):
        self.start()
        return self.finish(delta)

    def finish(self, delta, stream=None):
        assert self.started
        PlainLaunch.log.append(("sums", len(delta), "side" if stream else "main"))
        adjoint, stored, inputs = self.given
        cell, rows = adjoint.cell, delta.flatten(0, 1)
        sums = []
        for p in merged_products(adjoint):
            if p.vector.kind == "output":
                v = stored[cell.outputs.index((p.vector.stage, p.vector.index))]
            else:
                v = plain.previous(cell, stored, inputs, p.vector.index)
            sums.append(rows[:, p.start : p.start + p.width].mT @ v.flatten(0, 1))
        entry = rows[:, : cell.entry_width]
        sums += [] if self.x is None else [entry.mT @ self.x.flatten(0, 1)]
        sums += [(rows if cell.vectors else entry).sum(0)] if self.with_bias else []
        self.sums = sums
        if self.onto is not None:
            self.sums = [a.add_(b) for a, b in zip(self.onto.sums, sums, strict=True)]
        count = len(merged_products(adjoint))
        return self.sums[:count], self.sums[count:]


@pytest.fixture
def plainly(monkeypatch):
    """Take the kernels' places; call with whether products go to the tensor cores, and with the chunks' bounds."""
    PlainLaunch.log = []
    monkeypatch.setattr(
        run, "forward", lambda case, inputs, keep, **_: plain.forward(case.cell, inputs, keep)
    )
    monkeypatch.setattr(run, "backward", lambda case, *given, **_: plain.backward(case.cell, *given))
    monkeypatch.setattr(run, "BackwardLaunch", PlainLaunch)
    monkeypatch.setattr(weight_sums, "WeightSums", PlainSums)
    monkeypatch.setattr(row_products, "rows_times", torch.nn.functional.linear)

    def take(fast: bool = True, bounds: tuple[int, ...] = WHOLE) -> list[tuple[str, int, str]]:
        monkeypatch.setattr(input_projection, "on_tensor_cores", lambda projection_case: fast)
        chunks = time_chunks.Chunks(tuple(pairwise(bounds)), 41)
        monkeypatch.setattr(input_projection, "_time_chunks", lambda *given: chunks)
        return PlainLaunch.log

    return take


# ---- the same function, in one and by the reference


def drawn(cell: CellDescription = DTS, biases: int = 0, dtype=torch.float64) -> list[Tensor]:
    """x, U.., b.., the first states, the matrices and the vectors."""
    heights = HEIGHTS[cell]
    shapes: list[Any] = [
        (T, B, I),
        *((n, I) for n in heights),
        *((n,) for n in (*heights, heights[0])[:biases]),
    ]
    shapes += [*((B, n) for n in cell.states), *cell.matrices, *((n,) for n in cell.vectors)]
    return [(0.3 * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]


def split(tensors, cell: CellDescription, reset=None) -> tuple[InputProjection, Inputs]:
    rest, heights = list(tensors), HEIGHTS[cell]
    vectors = [rest.pop() for _ in cell.vectors][::-1]
    matrices = [rest.pop() for _ in cell.matrices][::-1]
    states = [rest.pop() for _ in cell.states][::-1]
    x, U, b = rest[0], rest[1 : 1 + len(heights)], rest[1 + len(heights) :]
    return InputProjection(x, U, b), Inputs(None, states, matrices, vectors, [], reset)


def in_one(*tensors, cell=DTS, reset=None):
    projection, inputs = split(tensors, cell, reset)
    projection_case = ProjectionCase.of(Case(cell, CPU, torch.float64), projection, inputs)
    return layer_autograd.project_and_unroll(cuda.BACKEND, projection_case, projection, inputs)


def by_reference(*tensors, cell=DTS, reset=None):
    projection, inputs = split(tensors, cell, reset)
    return plain.forward(cell, inputs._replace(A=projection.A))


PATHS = ((False, WHOLE), (True, WHOLE), (True, CUT))
SETTINGS = [
    *((fast, bounds, 2, "all", marked) for fast, bounds in PATHS for marked in (False, True)),
    *((fast, CUT, biases, "all", True) for fast in (False, True) for biases in (0, 3)),
    *((fast, CUT, 2, only, True) for fast in (False, True) for only in ("x", "U", "b", "state", "matrix", "vector")),
    (True, CUT, 2, "last output", False),
]  # fmt: skip


@pytest.mark.parametrize(("fast", "bounds", "biases", "only", "marked"), SETTINGS)
@pytest.mark.parametrize("cell", [DTS, LSTM, GRU], ids=["dts", "lstm", "gru"])
def test_all_gradients_of_the_input_and_the_loop(cell, fast, bounds, biases, only, marked, plainly):
    plainly(fast, bounds if cell is DTS else WHOLE)
    biases = min(biases, len(HEIGHTS[cell]) + 1)
    tensors = drawn(cell, biases)
    first = 1 + len(HEIGHTS[cell])
    places = {
        "x": [0],
        "U": [1],
        "b": range(first, first + biases),
        "state": [first + biases],
        "matrix": [first + biases + len(cell.states)],
        "vector": [-1] if cell.vectors else range(len(tensors)),
    }
    wanted = [tensors[i] for i in places.get(only, range(len(tensors)))]
    for t in tensors:
        t.requires_grad_(any(t is w for w in wanted))
    reset = torch.rand(T, B) < 0.3 if marked else None
    results = []
    for function in (in_one, by_reference):
        outputs = function(*tensors, cell=cell, reset=reset)
        outputs = outputs[-1:] if only == "last output" else outputs
        upstream = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_torchs_products_are_taken_only_where_they_are_wanted(plainly, monkeypatch):
    plainly(fast=False)
    monkeypatch.setattr(input_projection, "matrix_gradients", lambda *a: pytest.fail("not wanted"))
    tensors = drawn(biases=2)
    for t in tensors[-3:]:
        t.requires_grad_(False)
    assert all(g.any() for g in torch.autograd.grad(in_one(*tensors)[-1].sum(), tensors[:-3]))


def test_a_second_derivative_of_the_input_and_the_loop(plainly):
    plainly()
    small = [t.detach()[:2].clone().requires_grad_() if i == 0 else t for i, t in enumerate(drawn(biases=3))]
    assert torch.autograd.gradgradcheck(in_one, small, fast_mode=True)


def test_gradients_to_be_differentiated_again_count_no_path_twice(plainly):
    """The first state depends on the weights where it is carried on, and a matrix may serve in two places."""
    plainly()
    x, U1, U2, h0, _, *others = drawn()
    U1 = (0.3 * torch.randn(12, 8, dtype=torch.float64)).requires_grad_()
    x, U2 = (0.3 * torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((T, B, 8), (8, 8)))
    leaves, gradients = [x, U1, U2, h0, *others], []
    for function in (in_one, by_reference):
        h = function(x, U1, U2, h0, U1, *others)[-1]
        h = function(x, U1, U2, h[-1], U1, *others)[-1]
        gradients.append(torch.autograd.grad(h.square().sum(), leaves, create_graph=True))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_mapped_over_the_outputs_of_the_input_and_the_loop(plainly):
    plainly()
    tensors = drawn(biases=3)
    h = in_one(*tensors)[-1]
    vectors = torch.randn(3, *h.shape, dtype=h.dtype)
    mapped = torch.func.vmap(lambda g: torch.autograd.grad(h, tensors, g, retain_graph=True))(vectors)
    for p in range(3):
        for a, b in zip(mapped, torch.autograd.grad(h, tensors, vectors[p], retain_graph=True), strict=True):
            torch.testing.assert_close(a[p], b)


# ---- who is served


def test_only_plain_fp32_that_fits_is_taken_over():
    x, U, b = torch.zeros(100, 64, 88), [torch.zeros(400, 88)] * 2, [torch.zeros(400)] * 3
    rest = Inputs(None, [torch.zeros(64, 400)], [torch.zeros(400, 400)] * 3, [], [])

    def serves(x=x, U=U, b=b, inputs=rest, dtype=torch.float32):
        return input_projection.serves(Case(PAPER, CPU, dtype), InputProjection(x, U, b), inputs)

    assert serves()
    assert serves(x[:1], b=[])
    assert not serves(x.double())
    assert not serves(dtype=torch.float64)
    assert not serves(U=[U[0], U[1].double()])
    assert not serves(inputs=rest._replace(states=[rest.states[0].double()]))
    assert not serves(inputs=rest._replace(masks=[torch.zeros(64, 400)]))
    assert not serves(x[0])
    assert not serves(U=[U[0], torch.zeros(400, 92)])
    assert not serves(U=[U[0], torch.zeros(396, 88)])
    assert not serves(b=[b[0], torch.zeros(399)])
    assert not serves(b=[*b[:2], torch.zeros(399)])


def test_autocast_and_vmap_leave_the_product_and_the_loop_apart(plainly, monkeypatch):
    plainly()
    monkeypatch.setattr(cuda.BACKEND, "why_not", lambda case: None)
    served = []
    right = cuda.BACKEND.forward_with_projection
    monkeypatch.setattr(cuda.BACKEND, "forward_with_projection", lambda *a: served.append(1) or right(*a))
    tensors = [t.detach() for t in drawn(biases=2, dtype=torch.float32)]

    def layer(x):
        return unrolling.project_and_unroll(DTS, *split([x, *tensors[1:]], DTS), backend="cuda")[-1]

    whole = layer(tensors[0])
    assert len(served) == 1
    mapped = torch.func.vmap(layer)(torch.stack([tensors[0]] * 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(tensors[0])
    assert len(served) == 1
    torch.testing.assert_close(mapped[1], whole)
    torch.testing.assert_close(rounded, whole, rtol=0.1, atol=0.05)


def test_without_a_gpu_the_product_and_the_loop_are_apart():
    tensors = drawn(biases=3)
    outputs = unrolling.project_and_unroll(DTS, *split(tensors, DTS))
    for a, b in zip(outputs, by_reference(*tensors), strict=True):
        torch.testing.assert_close(a, b)


def shaped(cell: CellDescription, shape: tuple[int, int, int], device: torch.device = CPU) -> ProjectionCase:
    return ProjectionCase(Case(cell, device, torch.float32), shape, (cell.entry_width,), 0, False)


def test_only_many_rows_go_to_the_tensor_cores(monkeypatch):
    def taken(shape=(100, 64, 88), cell=PAPER):
        return input_projection.on_tensor_cores(shaped(cell, shape))

    assert not taken()
    monkeypatch.setattr(input_projection, "hopper", lambda device: True)
    assert taken()
    assert taken((2, 64, 88))
    assert not taken((1, 64, 88))
    assert not taken((100, 64, 87))
    assert not taken(cell=DeepTransition((400, 20), ("sigmoid", "sigmoid"), (False, True)).cell)


# ---- chunks of time


@pytest.mark.parametrize("steps", [1, 2, 5, 50, 200, 1601])
@pytest.mark.parametrize("batch", [2, 128, 256, 273, 600])
def test_chunks_follow_one_another_and_cover_every_step(steps, batch):
    chunks = time_chunks.time_chunks(PAPER, steps, batch, 88, False, H200, False).chunks
    bounds = [0, *(end for _, end in chunks)]
    assert list(chunks) == list(pairwise(bounds))
    assert bounds[-1] == steps
    assert all(a < b for a, b in pairwise(bounds))


def test_only_large_batches_that_leave_processors_idle_are_cut():
    def count(cell, batch, device=H200, captured=False):
        return len(time_chunks.time_chunks(cell, 200, batch, 88, False, device, captured).chunks)

    assert count(PAPER, 256) > 1
    assert count(PAPER, 64) == 1, "a further launch costs the host too much"
    assert count(PAPER, 64, captured=True) > 1, "which a graph does not pay"
    assert count(PAPER, 16, captured=True) == 1
    assert count(PAPER, 512) == 1, "a second wave of clusters takes every processor that becomes idle"
    wide = DeepTransition((512, 512), ("sigmoid", "sigmoid"), (False, True)).cell
    assert count(wide, 256) == 1, "7 clusters of 16 blocks leave too few"
    assert count(PAPER, 256, Device((8, 0))) == 1, "another kernel's loop"


def test_a_cell_whose_units_carry_more_than_delta_holds_is_not_cut():
    lstm = shaped(cells_by_hand.lstm(400), (200, 256, 88), torch.device("cuda", 0))
    assert input_projection.time_chunks_of(lstm, captured=True).chunks == ((0, 200),)


def test_a_chunk_goes_to_no_kernel_that_would_take_it_for_a_whole(monkeypatch):
    plan = next(iter(cluster_plans(schedule(PAPER, True), 2, 1, False, H200)))
    monkeypatch.setattr(run, "prepare_plan", lambda plan, *given: SimpleNamespace(plan=plan))
    stored = [torch.zeros(1, 2, 400)] * 2
    inputs = Inputs(None, [torch.zeros(2, 400)], [torch.zeros(400, 400)] * 3, [], [])
    given = Case(PAPER, CPU, torch.float32), [None, stored[0]], stored, inputs, torch.zeros(1, 2, 800)
    with pytest.raises(ValueError, match="chunk"):
        run.BackwardLaunch.of(*given, first=False, plan=plan)


def test_what_goes_beside_the_loop_follows_it_and_all_memory_is_there_before(plainly, monkeypatch):
    """Memory taken later may be some that the loop still writes to; what begins sooner takes its processors."""
    log = plainly(bounds=CUT)

    class Side:
        def __init__(self, device):
            pass

        def fork(self):
            return 7

        mark, wait_for_mark, join = (
            lambda self, what=what: log.append((what, 0, "main")) for what in ("mark", "wait", "join")
        )

    monkeypatch.setattr(input_projection, "SideStream", Side)
    tensors = drawn(biases=2)
    torch.autograd.grad(in_one(*tensors)[-1].sum(), tensors)
    lengths = [b - a for a, b in pairwise(CUT)][::-1]

    def when(what, steps=0, stream="main"):
        return log.index((what, steps, stream))

    loops = [when("loop", n) for n in lengths]
    assert loops == sorted(loops), "from the last chunk to the first"
    launches = [i for i, (what, _, _) in enumerate(log) if what != "memory"]
    assert not any(log[i][0] == "memory" for i in range(min(launches), len(log)))
    beside = [i for i, (_, _, stream) in enumerate(log) if stream == "side"]
    assert min(beside) > loops[0]
    assert max(beside) < when("join")
    assert when("scan", lengths[0]) < loops[0]
    for n, loop in zip(lengths[1:], loops[1:], strict=True):
        assert when("scan", n, "side") < when("mark") < when("wait") < loop
    for n, following in zip(lengths[:-1], loops[1:], strict=True):
        assert following < when("sums", n, "side"), "beside the loop over the next chunk"
    assert when("join") < when("sums", lengths[-1])


def test_sums_beside_the_loop_wait_for_no_processor():
    whole = (
        SumBlock(0, 400, 0, 800),
        SumBlock(489, 889, 400, 800),
        SumBlock(400, 488, 0, 800),
        SumBlock(488, 489, 0, 800),
    )
    for count in (3000, 17000, 51200):
        plan = tiling(whole, count, 1, 41, at_once=True)
        assert plan is not None
        assert 30 <= len(plan.tiles) * plan.splits <= 41


# ---- the side stream


class FakeStream:
    """Knows what has happened before whatever is launched on it next."""

    device_index = 0

    def __init__(self, device=0):
        self.past: set[str] = set()
        self.cuda_stream = id(self)

    def launch(self, what: str) -> set[str]:
        before = set(self.past)
        self.past.add(what)
        return before

    def wait_event(self, event):
        self.past |= event.past


class FakeEvent:
    def record(self, stream):
        self.past = set(stream.past)


def test_the_side_stream_begins_after_what_was_before_and_ends_before_what_follows(monkeypatch):
    main = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    side_stream._stream.cache_clear()
    for turn in "12":  # streams and events serve again
        main.launch(f"before {turn}")
        side = side_stream.SideStream(torch.device("cuda", 0))
        assert side.side is not None
        main.launch(f"loop {turn}")
        assert side.fork() == side.side.stream.cuda_stream
        seen = side.side.stream.launch(f"scan {turn}")
        assert f"before {turn}" in seen
        assert f"loop {turn}" not in seen, "it runs beside the loop"
        side.mark()
        side.side.stream.launch(f"sums {turn}")
        side.wait_for_mark()
        seen = main.launch(f"next loop {turn}")
        assert f"scan {turn}" in seen
        assert f"sums {turn}" not in seen
        side.join()
        assert f"sums {turn}" in main.launch(f"after {turn}")
    side_stream._stream.cache_clear()
    assert side_stream.SideStream(torch.device("cpu")).fork() is None


# ---- on a GPU


def on_a_gpu(cell: CellDescription, heights: tuple[int, ...], steps: int, batch: int) -> list[Tensor]:
    """x, U.., b.. with one more for the first layer, the first states and the matrices."""
    shapes: list[Any] = [
        (steps, batch, 88),
        *((n, 88) for n in heights),
        *((n,) for n in (*heights, heights[0])),
    ]
    shapes += [*((batch, n) for n in cell.states), *cell.matrices]
    scales = [
        1.0 if len(s) == 3 or s[0] == batch else 0.1 if 88 in s or len(s) == 1 else 0.05 for s in shapes
    ]
    return [(torch.randn(s, device="cuda") * c).requires_grad_() for s, c in zip(shapes, scales, strict=True)]


@GPU
@pytest.mark.parametrize("marked", [False, True])
def test_a_layer_in_chunks_is_the_whole_but_for_rounding(marked, monkeypatch):
    monkeypatch.setitem(HEIGHTS, PAPER, (400, 400))
    leaves = on_a_gpu(PAPER, (400, 400), 30, 250)
    reset = torch.rand(30, 250, device="cuda") < 0.05 if marked else None
    upstream = [torch.randn(30, 250, 400, device="cuda") for _ in range(2)]
    case = ProjectionCase.of(Case(PAPER, leaves[0].device, torch.float32), *split(leaves, PAPER, reset))

    def layer():
        projection, inputs = split(leaves, PAPER, reset)
        outputs = layer_autograd.project_and_unroll(cuda.BACKEND, case, projection, inputs)
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        outputs = [y.detach() for y in outputs]  # a tape kept alive would tie a capture to this stream
        return [*outputs, *gradients]

    assert input_projection.on_tensor_cores(case)
    whole = layer()
    chunks = time_chunks.Chunks(((0, 7), (7, 12), (12, 30)), 41)
    monkeypatch.setattr(input_projection, "_time_chunks", lambda *given: chunks)
    called = layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    graph.replay()
    for results in (called, captured):
        for i, (a, b) in enumerate(zip(results, whole, strict=True)):
            if i < 2:  # outputs: forward is not cut
                assert torch.equal(a, b)
            assert float((a - b).norm() / b.norm()) < 1e-6


@GPU
@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("batch", [64, 1])
@pytest.mark.parametrize("kind", ["dts", "lstm"])
def test_a_layer_with_the_product_of_its_input(kind, backend, marked, batch, monkeypatch):
    dts = DeepTransition((400, 200), ("sigmoid", "tanh"), (False, True)).cell
    cell, heights = (dts, (400, 200)) if kind == "dts" else (cells_by_hand.lstm(128), (512,))
    monkeypatch.setitem(HEIGHTS, cell, heights)
    leaves = on_a_gpu(cell, heights, 40, batch)
    reset = torch.rand(40, batch, device="cuda") < 0.05 if marked else None
    if reset is not None:
        reset[0] = False  # or the gradient of a lone first state would be zero, which has no relative error
    projection, inputs = split(leaves, cell, reset)
    case = Case(cell, leaves[0].device, torch.float32)
    assert input_projection.serves(case, projection, inputs)
    assert input_projection.on_tensor_cores(ProjectionCase.of(case, projection, inputs)) == (batch > 1)
    outputs = unrolling.project_and_unroll(cell, projection, inputs, backend)
    upstream = [torch.randn_like(y) for y in outputs]
    results = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = by_reference(*wide, cell=cell, reset=reset)
    truth = [*truth, *torch.autograd.grad(truth, wide, [u.double() for u in upstream])]
    for a, b in zip(results, truth, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("gates", [cells_by_hand.gru, cells_by_hand.lstm])
@pytest.mark.parametrize("hidden", [400, 512, 1024])
def test_sums_of_wide_gates_fit_the_kernels_table(gates, hidden):
    adjoint = adjoint_of(gates(hidden))
    assert weight_sums.fits(adjoint, 128)
    blocks = weight_sums.blocks(adjoint, 128, True)
    for rows in (128, 32768):
        found = tiling(blocks, rows, 1, 132)
        assert found is not None
        assert len(found.tiles) <= MOST_TILES
