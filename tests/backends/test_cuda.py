"""The CUDA backend's own properties: what needs no GPU anywhere, everything else by `make test-gpu`."""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deeprnn.backends import plain, torch_operators, unroll
from deeprnn.backends.call import Inputs
from deeprnn.backends.choose import why_not
from deeprnn.backends.cuda import describe_plan, driver, nvrtc, why_not_planned
from deeprnn.backends.cuda.device import Device, device_of
from deeprnn.backends.cuda.epilogue import EpilogueOptions, epilogue_of
from deeprnn.backends.cuda.recurrence import cluster_plans, launch, tensor_core_plans
from deeprnn.backends.cuda.recurrence.cluster_plans import cluster_plan
from deeprnn.backends.cuda.recurrence.planning import make_plan
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import tensor_core_plan
from deeprnn.backends.cuda.recurrence.whole_card_plans import whole_card_plans
from tests.backends import cells_by_hand, grid
from tests.backends.grid import Case, transition

GPU = pytest.mark.gpu
H200 = Device()
SIGMOIDS = ("sigmoid", "sigmoid")
DTS = transition((400, 400), SIGMOIDS)


def by_cuda(cell, inputs, precision="fp32") -> list[Tensor]:
    return unroll(cell, inputs, "cuda", precision)


# ---- anywhere


@pytest.mark.parametrize("sizes", [(200,), (600,), (800,), (200, 200), (400, 400), (600, 600)], ids=str)
@pytest.mark.parametrize("batch", [1, 64])
def test_every_model_of_table_1_stays_on_chip(sizes, batch):
    cell = transition(sizes, ("sigmoid",) * len(sizes))
    assert why_not_planned(cell, False, H200) is None
    assert not any("stepwise" in text for text in describe_plan(cell, batch).values())


def test_a_reason_names_the_remedy():
    reason = why_not("cuda", DTS.text, "cpu", torch.float32)
    assert reason is not None
    assert ".cuda()" in reason
    reason = why_not_planned(transition((12000, 12000), SIGMOIDS), False, H200)
    assert reason is not None
    assert "stepwise" in reason


def test_sources_are_shipped_and_include_no_host_header():
    written = {"cell.cuh", "params.cuh"}  # made for each cell, or included by what is
    known = {f'"{name}"' for name in {*nvrtc.headers(), *written}}
    sources = sorted(nvrtc.FOLDER.rglob("*.cu"))
    assert {
        "cluster",
        "tensor_core",
        "whole_card",
        "max_abs_scan",
        "stepwise",
        "outer_products",
        "update",
    } <= {path.stem for path in sources}
    for path in (*sources, *nvrtc.FOLDER.rglob("*.cuh")):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert {line.split()[1] for line in lines if line.startswith("#include")} <= known


def test_a_launch_makes_the_tensors_gpu_the_current_one(monkeypatch):
    """Training on cuda:1 while cuda:0 is current: the kernel and its stream belong to the other context."""
    now, launched = [0], []

    @contextmanager
    def device(which):
        now.append(which.index)
        yield
        now.pop()

    library = SimpleNamespace(cuLaunchKernelEx=lambda *_: launched.append(now[-1]) or 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(driver, "stream_of", lambda index: 0)
    monkeypatch.setattr(driver, "ensure_context", lambda index: None)
    monkeypatch.setattr(driver, "library", lambda: library)
    kernel = object.__new__(driver.Kernel)
    kernel.function, kernel.shared, kernel.cluster, kernel.cooperative = ctypes.c_void_p(), 0, 1, False
    for name in ("cuda:1", "cuda:0", "cuda"):
        kernel.launch(1, 32, [ctypes.c_int(3)], torch.device(name))
    assert launched == [1, 0, 0]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """What would be compiled, by a compiler whose file may be changed, into an empty cache."""
    calls: list[tuple] = []
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"one")
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([str(library)]))
    monkeypatch.setattr(nvrtc, "library", lambda: pytest.fail("loaded"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: calls.append(a) or b"code")
    nvrtc.identity.cache_clear()
    yield calls
    nvrtc.identity.cache_clear()


def test_kernels_on_disk_are_found_without_loading_the_compiler(compiled, tmp_path):
    for _ in range(2):
        assert nvrtc.cubin("training/update.cu", {}, "sm_90") == b"code"
    assert len(compiled) == 1
    (tmp_path / "libnvrtc.so.13").write_bytes(b"another version")
    nvrtc.identity.cache_clear()
    nvrtc.cubin("training/update.cu", {}, "sm_90")
    assert len(compiled) == 2, "another compiler's kernels are not used"
    for kept in (tmp_path / "kernels").iterdir():
        kept.write_bytes(b"damaged")
    assert nvrtc.cubin("training/update.cu", {}, "sm_90") == b"code"
    assert len(compiled) == 3


def test_another_cells_kernel_is_another_kernel(compiled):
    for cell in (DTS, cells_by_hand.lstm(100), cells_by_hand.gru(100), DTS):
        plan = make_plan(schedule(cell, False), 1, 1, False, H200)
        assert plan is not None
        launch.compile_plan(plan, epilogue_of(schedule(cell, False), EpilogueOptions()), H200)
    assert len(compiled) == 3


def test_a_kernel_that_cannot_be_kept_is_used_and_leaves_nothing_behind(compiled, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert nvrtc.cubin("training/update.cu", {}, "sm_90") == b"code"
    assert list((tmp_path / "kernels").iterdir()) == []


# ---- every shape of the kernels

ODD = Case("100x63", transition((100, 63), ("tanh", "sigmoid")), 9, 5, reset=True)
GATES = Case("lstm", cells_by_hand.lstm(63), 9, 5, reset=True)
# cluster, threads, lanes that share a sum, numbers a lane takes at once, rows
CLUSTER = [
    (16, 256, 8, 2, 1), (16, 128, 8, 4, 2), (8, 256, 16, 2, 3), (8, 384, 32, 1, 4), (4, 512, 32, 2, 5),
    (2, 256, 8, 2, 2), (4, 128, 16, 2, 8), (16, 512, 32, 1, 6),
]  # fmt: skip
WIDE = Case("200x137", transition((200, 137), ("tanh", "sigmoid")), 6, 21, reset=True)
DEEP = Case("137x200x150", transition((137, 200, 150), ("sigmoid", "tanh", "sigmoid")), 5, 19, population=2)
BARE = Case("identity", transition((200, 137), ("tanh", "identity"), "none"), 7, 9)
SHALLOW = Case("200", transition((200,), ("sigmoid",)), 9, 30)
LEVEL = Case(
    "200x193", transition((200, 193), ("tanh", "sigmoid")), 6, 21, reset=True
)  # layers of as many tiles
WIDE_LSTM = Case("lstm", cells_by_hand.lstm(200), 6, 21, reset=True)
# cluster, warps over units, warps over the inner dimension, rows, row groups, through L2, finishers
TENSOR_CORES = [
    *((8, 2, 4, 8), (8, 1, 8, 5), (4, 4, 2, 21), (8, 2, 2, 16), (4, 2, 4, 12), (4, 4, 1, 30), (8, 1, 4, 40)),
    *((4, 3, 2, 5), (4, 3, 4, 18), (9, 1, 4, 3), (7, 2, 2, 13), (5, 3, 2, 9)),
]
TENSOR_CORE_TESTS = [
    *((shape, WIDE, "registers") for shape in TENSOR_CORES),
    ((8, 2, 4, 8), DEEP, "shared memory"),
    ((8, 1, 8, 5), BARE, "shared memory"),
    ((4, 4, 2, 21), SHALLOW, "shared memory"),
    ((8, 2, 2, 16), DEEP, "registers"),
    ((2, 4, 1, 30), BARE, "registers"),
    ((4, 2, 4, 12), SHALLOW, "registers"),
    *((shape, replace(WIDE, precision="bf16"), "registers") for shape in TENSOR_CORES[::3]),
    *((shape, LEVEL, "registers") for shape in ((7, 2, 4, 21, 3), (13, 1, 4, 12, 2), (9, 2, 3, 20, 5))),
    ((7, 2, 4, 16, 2), replace(LEVEL, population=2, reset=False), "shared memory"),
    ((13, 1, 4, 9, 3), SHALLOW, "registers"),
    ((7, 2, 4, 21, 3), WIDE, "registers"),  # row groups, layers of unequal width
    *((shape, WIDE, "registers") for shape in ((8, 2, 4, 8, 1, False), (9, 1, 4, 21, 3, False))),
    *((shape, WIDE, "registers") for shape in ((8, 2, 4, 8, 1, True, 8), (5, 1, 8, 21, 3, True, 8))),
    ((4, 2, 4, 12, 1, False), SHALLOW, "registers"),
    ((13, 1, 4, 8), WIDE_LSTM, "registers"),
    ((13, 1, 8, 16), WIDE_LSTM, "shared memory"),
]


@pytest.fixture
def force(monkeypatch):
    """Every plan is made by the function given; without room in registers where weights are to lie elsewhere."""

    def forced(make, kept="registers"):
        if kept == "shared memory":
            nothing = dict.fromkeys(cluster_plans.REGISTERS, 0)
            monkeypatch.setattr(cluster_plans, "REGISTERS", nothing)
            monkeypatch.setattr(tensor_core_plans, "REGISTERS", nothing)

        def chosen(*given):
            plan = make(*given)
            assert plan is not None
            assert any(getattr(plan, "in_registers", [1])) == (kept == "registers")
            return plan

        monkeypatch.setattr(launch, "make_plan", chosen)
        return chosen

    return forced


def fits(case: Case, chosen) -> None:
    for backward in (False, True):
        members = max(1, case.population)
        chosen(schedule(case.cell, backward), case.B, members, case.precision == "bf16", H200)


@pytest.mark.parametrize(("shape", "case", "kept"), TENSOR_CORE_TESTS, ids=str)
def test_the_tensor_core_shapes_under_test_fit(shape, case, kept, force):
    fits(case, force(lambda *given: tensor_core_plan(*given, *shape), kept))


@GPU
@pytest.mark.parametrize("shape", CLUSTER, ids=str)
@pytest.mark.parametrize("kept", ["registers", "shared memory"])
@pytest.mark.parametrize("case", [ODD, GATES], ids=str)
def test_every_shape_of_the_cluster_kernel(case, shape, kept, force):
    cluster, threads, klanes, vec, rows = shape
    rows = rows if case is ODD else min(rows, 2)  # four sums a unit
    force(lambda *given: cluster_plan(*given, cluster, threads, klanes, vec, rows), kept)
    grid.examine(by_cuda, case, "cuda")


@GPU
@pytest.mark.parametrize(("shape", "case", "kept"), TENSOR_CORE_TESTS, ids=str)
def test_every_shape_of_the_tensor_core_kernel(shape, case, kept, force):
    force(lambda *given: tensor_core_plan(*given, *shape), kept)
    grid.examine(by_cuda, case, "cuda")


CARD = [
    ODD,
    GATES,
    Case("63x1", transition((63, 1), ("relu", "tanh")), 6, 3, population=2),
    Case("three", transition((385, 63, 100), ("tanh", "relu", "sigmoid")), 11, 17, reset=True, population=3),
    Case("705x385", transition((705, 385), ("sigmoid", "tanh")), 12, 7, reset=True),
    Case("200", transition((200,), ("sigmoid",)), 1, 30),
    Case("400x400", DTS, 9, 64),
    Case("400x385", transition((400, 385), SIGMOIDS), 9, 33, precision="bf16"),
    Case("lstm600", cells_by_hand.lstm(600), 5, 9),
]
CARD_SHAPES = {
    "cheapest": lambda plan: True,
    "one team": lambda plan: plan.teams == 1,
    "many passes": lambda plan: plan.rows <= 2,
    "512 threads": lambda plan: plan.threads == 512,
}
CARD_TESTS = [(case, "cheapest") for case in CARD]
CARD_TESTS += [(CARD[i], name) for i, name in ((0, "one team"), (3, "many passes"), (4, "512 threads"))]


@GPU
@pytest.mark.parametrize(("case", "which"), CARD_TESTS, ids=str)
def test_the_whole_card_kernel(case, which, force):
    def cheapest(*given):
        plans = (plan for plan in whole_card_plans(*given) if CARD_SHAPES[which](plan))
        return min(plans, key=lambda plan: plan.cost)

    force(cheapest)
    grid.examine(by_cuda, case, "cuda")


# ---- on a GPU


def drawn(case: Case, seed: int = 0) -> tuple[Inputs, list[Tensor]]:
    """Inputs on the GPU in float32, and those of them that want gradients."""
    tensors = {name: x.cuda() for name, x in grid.draw(case, seed).items()}
    tensors = {name: x if x.dtype == torch.bool else x.float() for name, x in tensors.items()}
    inputs = grid.inputs_of(case.cell, tensors)
    leaves = [x.requires_grad_() for x in (inputs.A, *inputs.states, *inputs.matrices, *inputs.vectors)]  # type: ignore[union-attr]
    return inputs, leaves


@GPU
@pytest.mark.parametrize("case", [ODD, GATES], ids=str)
def test_a_captured_graph_replays_forward_and_backward(case):
    inputs, leaves = drawn(case)

    def run():
        h = by_cuda(case.cell, inputs)[0]
        return (h, *torch.autograd.grad(h.sin().sum(), leaves, materialize_grads=True))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in run()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in captured:
        x.detach().fill_(float("nan"))
    graph.replay()
    for x, y in zip(captured, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@GPU
@pytest.mark.parametrize("cell", [DTS, cells_by_hand.lstm(200)], ids=["dts", "lstm"])
def test_repeated_runs_give_the_same_bits(cell):
    inputs, _ = drawn(Case("again", cell, 50, 7))
    first = by_cuda(cell, inputs)[0]
    for _ in range(5):
        assert torch.equal(by_cuda(cell, inputs)[0], first)


@GPU
def test_kernels_on_several_streams_do_not_block_each_other():
    """Blocks wait for blocks, so kernels that each got half of the card would wait for ever."""
    cell = transition((800, 800), SIGMOIDS)
    inputs, _ = drawn(Case("800x800", cell, 30, 2))
    alone = by_cuda(cell, inputs)[-1]
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream() for _ in range(3)] * 4:
        with torch.cuda.stream(stream):
            results.append(by_cuda(cell, inputs)[-1])
    torch.cuda.synchronize()
    assert all(torch.equal(h, alone) for h in results)


@GPU
def test_shared_inputs_of_a_population_are_not_copied():
    case = Case("64", transition((64,), ("tanh",)), 5, 2, population=3)
    inputs, _ = drawn(case)
    A, state = inputs.A[0], inputs.states[0][0]  # type: ignore[index]

    def layer(w):
        return by_cuda(case.cell, Inputs(A, [state], [w], [], []))[0]

    mapped = torch.func.vmap(layer)(inputs.matrices[0])
    for p in range(3):
        torch.testing.assert_close(mapped[p], layer(inputs.matrices[0][p]), rtol=1e-5, atol=1e-6)


@GPU
@pytest.mark.parametrize(
    "cell", [transition((7, 5), ("tanh", "sigmoid")), cells_by_hand.lstm(6)], ids=["dts", "lstm"]
)
def test_second_derivatives_follow_the_reference(cell):
    _, leaves = drawn(Case("small", cell, 4, 2))
    found = []
    for dtype in (torch.float32, torch.float64):
        x = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        own = Inputs.of(cell, x)
        outputs = by_cuda(cell, own) if dtype == torch.float32 else plain.forward(cell, own)
        first = torch.autograd.grad(sum(y.sin().sum() for y in outputs), x, create_graph=True)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), x))  # type: ignore[arg-type]
    for x, y in zip(*found, strict=True):
        assert (x.double() - y).norm() <= 1e-4 * y.norm()


@GPU
def test_torch_compile_keeps_one_graph():
    inputs, leaves = drawn(ODD)

    def loss(*x):
        return (unroll(ODD.cell.text, Inputs.of(ODD.cell, [*x, inputs.reset]), "cuda")[-1] ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x, y = (torch.autograd.grad(function(*leaves), leaves) for function in (compiled, loss))
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@GPU
@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0)])
@pytest.mark.parametrize("backend", ["cuda", "stepwise"])
def test_nothing_to_do_gives_empty_results_and_zero_gradients(T, B, backend):
    cell = transition((8, 12), ("tanh", "tanh"), "none")
    shapes = ((T, B, 20), (B, 12), *cell.matrices)
    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    outputs = unroll(cell, Inputs.of(cell, leaves), backend)
    assert [tuple(y.shape) for y in outputs] == [(T, B, 8), (T, B, 12)]
    assert not any(g.any() for g in torch.autograd.grad(sum(y.sum() for y in outputs), leaves))  # type: ignore[arg-type]


@GPU
def test_the_operator_passes_torch_librarys_own_checks():
    case = Case("10x6", transition((10, 6), ("tanh", "sigmoid")), 3, 2, reset=True)
    inputs, _ = drawn(case)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = ("cuda", case.cell.text, "fp32", inputs.tensors, True, True)
    torch.library.opcheck(torch_operators.unroll_op, arguments, test_utils=utilities)


@GPU
def test_kernels_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    own = schedule(transition((17,), ("sigmoid",)), False)
    plan = make_plan(own, 1, 1, False, device_of(0))
    assert plan is not None
    first = launch.compile_plan(plan, epilogue_of(own, EpilogueOptions()), device_of(0))
    (kept,) = Path(tmp_path, "kernels").iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *given: pytest.fail("compiled again"))
    assert launch.compile_plan(plan, epilogue_of(own, EpilogueOptions()), device_of(0)) == first
    assert kept.read_bytes().endswith(first)
    assert not [name for name in os.listdir(tmp_path / "kernels") if name.endswith(".tmp")]


@GPU
def test_a_broken_source_shows_the_compilers_words():
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc.compile_source("__global__ void k() { nothing(); }", "k.cu", {}, device_of(0).arch)
