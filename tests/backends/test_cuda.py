"""The CUDA backend's own properties: plans anywhere, everything else on a GPU (`make test-gpu`)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from deeprnn.backends import TransitionSpec, reference
from deeprnn.backends import cuda as backend
from deeprnn.backends.cuda import launch, nvrtc, planning
from tests.backends import grid
from tests.backends.grid import Case

GPU = pytest.mark.gpu
H200 = planning.Device()


def rnn(h: int) -> TransitionSpec:
    return TransitionSpec((h,), ("sigmoid",), (False,))


def dts(h: int, m: int | None = None) -> TransitionSpec:
    return TransitionSpec((m or h, h), ("sigmoid", "sigmoid"), (False, True))


# ---- plans: no GPU needed


@pytest.mark.parametrize(
    "spec", [rnn(200), rnn(400), rnn(600), rnn(800), dts(200), dts(400), dts(600)], ids=str
)
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_every_model_of_table_1_stays_on_chip(spec, batch, backward):
    plan = planning.make_plan(spec, batch, 1, False, backward, H200)
    assert plan.path != "generic"
    assert plan.shared <= H200.shared_limit


def test_rnn_1100_stays_on_chip_in_bf16():
    assert planning.make_plan(rnn(1100), 1, 1, True, False, H200).path != "generic"


def test_what_fits_no_card_takes_the_generic_kernel():
    assert planning.make_plan(dts(2000), 1, 1, False, False, H200).path == "generic"


def test_a_population_of_15_runs_at_once():
    for backward in (False, True):
        plan = planning.make_plan(dts(400), 1, 15, False, backward, H200)
        assert H200.resident(plan.cluster) * plan.rows >= 15


def test_ring_lists_each_matrix_once_in_both_directions():
    spec = TransitionSpec((3, 4, 5), ("tanh",) * 3, (False, True, True))
    names = {("W", 0), ("W", 1), ("W", 2), ("S", 1), ("S", 2)}
    for backward in (False, True):
        ring = planning.ring(spec, backward)
        assert len(ring.names) == 5
        assert set(ring.names) == names
        for stage, source, (kind, l) in zip(ring.stages, ring.sources, ring.names, strict=True):
            wide, narrow = spec.sizes[l], spec.sizes[-1] if kind == "S" or l == 0 else spec.sizes[l - 1]
            shape = (ring.sizes[stage], ring.sizes[source])
            assert shape == ((narrow, wide) if backward else (wide, narrow))


def test_why_not_names_the_remedy():
    reason = backend.why_not(dts(400), "cpu", torch.float32, 1, 1)
    assert reason is not None
    assert "GPU" in reason


def test_sources_are_shipped_and_include_no_host_header():
    for name in (*launch.SOURCES.values(), "update.cu", *nvrtc.HEADERS):
        text = (nvrtc.FOLDER / name).read_text()
        included = {line.split()[1] for line in text.splitlines() if line.startswith("#include")}
        assert included <= {f'"{header}"' for header in nvrtc.HEADERS}


# ---- on a GPU


def draw(case: Case, seed: int = 0) -> tuple:
    """Inputs on the GPU in float32, leaves that want gradients."""
    tensors = {n: x.cuda() for n, x in grid.draw(case, seed).items()}
    leaves = {n: x.float().requires_grad_() for n, x in tensors.items() if n[0] in "AhWS"}
    W = [x for n, x in leaves.items() if n[0] == "W"]
    S = [x for n, x in leaves.items() if n[0] == "S"]
    return leaves["A"], leaves["h0"], W, S, tensors


ODD = Case((100, 63), ("tanh", "sigmoid"), (False, True), 9, 5, reset=True)
SHAPES = [(c, t, k, v, r) for c, t, (k, v), r in (
    (16, 256, (8, 2), 1), (16, 128, (8, 4), 2), (8, 256, (16, 2), 3), (8, 384, (32, 1), 4), (4, 512, (32, 2), 5),
    (2, 256, (8, 2), 2), (4, 128, (16, 2), 8), (16, 512, (32, 1), 6),
)]  # fmt: skip


@GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kept", ["registers", "shared memory"])
def test_every_shape_of_the_cluster_kernel(shape, kept, monkeypatch):
    def forced(spec, batch, members, bf16, backward, device):
        ring = planning.ring(spec, backward)
        plan = planning.cluster_plan(ring, batch, members, bf16, device, *shape)
        assert plan is not None
        assert any(plan.kept) == (kept == "registers")
        return plan

    if kept == "shared memory":
        monkeypatch.setattr(planning, "REGISTERS", dict.fromkeys(planning.REGISTERS, 0))
    monkeypatch.setattr(launch, "make_plan", forced)
    grid.examine(backend.unroll, ODD, "cuda")


WIDE = Case((200, 137), ("tanh", "sigmoid"), (False, True), 6, 21, reset=True)
DEEP = Case((137, 200, 150), ("sigmoid", "tanh", "sigmoid"), (False, True, True), 5, 19, population=2)
PLAIN = Case((200, 137), ("tanh", "identity"), (False, False), 7, 9)
SHALLOW = Case((200,), ("sigmoid",), (False,), 9, 30)
MMA = [
    *((8, 2, 4, 8), (8, 1, 8, 5), (4, 4, 2, 21), (8, 2, 2, 16), (4, 2, 4, 12), (4, 4, 1, 30), (8, 1, 4, 40)),
    *((4, 3, 2, 5), (4, 3, 4, 18), (9, 1, 4, 3), (7, 2, 2, 13), (5, 3, 2, 9)),
]
LEVEL = Case((200, 193), ("tanh", "sigmoid"), (False, True), 6, 21, reset=True)  # layers of as many tiles
MMA_TESTS = [
    *((shape, WIDE, "registers") for shape in MMA),
    ((8, 2, 4, 8), DEEP, "shared memory"),
    ((8, 1, 8, 5), PLAIN, "shared memory"),
    ((4, 4, 2, 21), SHALLOW, "shared memory"),
    ((8, 2, 2, 16), DEEP, "registers"),
    ((2, 4, 1, 30), PLAIN, "registers"),
    ((4, 2, 4, 12), SHALLOW, "registers"),
    *((shape, dataclasses.replace(WIDE, precision="bf16"), "registers") for shape in MMA[::3]),
    *((shape, LEVEL, "registers") for shape in ((7, 2, 4, 21, 3), (13, 1, 4, 12, 2), (9, 2, 3, 20, 5))),
    ((7, 2, 4, 16, 2), dataclasses.replace(LEVEL, population=2, reset=False), "shared memory"),
    ((13, 1, 4, 9, 3), SHALLOW, "registers"),
    ((7, 2, 4, 21, 3), WIDE, "registers"),  # streams of layers of unequal width
    # Tiles stored by the lanes instead of through L2; eight finishers.
    *(
        (shape, WIDE, "registers")
        for shape in ((8, 2, 4, 8, 1, False), (9, 1, 4, 21, 3, False), (8, 1, 8, 5, 1, False))
    ),
    *((shape, WIDE, "registers") for shape in ((8, 2, 4, 8, 1, True, 8), (5, 1, 8, 21, 3, True, 8))),
    ((4, 2, 4, 12, 1, False), SHALLOW, "registers"),
]


@GPU
@pytest.mark.parametrize(("shape", "case", "kept"), MMA_TESTS, ids=str)
def test_every_shape_of_the_tensor_core_kernel(shape, case, kept, monkeypatch):
    def forced(spec, batch, members, bf16, backward, device):
        plan = planning.mma_plan(planning.ring(spec, backward), batch, members, bf16, device, *shape)
        assert plan is not None
        assert any(plan.kept) == (kept == "registers")
        return plan

    if kept == "shared memory":
        monkeypatch.setattr(planning, "REGISTERS", dict.fromkeys(planning.REGISTERS, 0))
    monkeypatch.setattr(launch, "make_plan", forced)
    grid.examine(backend.unroll, case, "cuda")


def test_the_tensor_core_shapes_under_test_fit(monkeypatch):
    for shape, case, kept in MMA_TESTS:
        with monkeypatch.context() as patch:
            if kept == "shared memory":
                patch.setattr(planning, "REGISTERS", dict.fromkeys(planning.REGISTERS, 0))
            for backward in (False, True):
                ring = planning.ring(case.spec, backward)
                assert planning.mma_plan(ring, case.B, 1, case.precision == "bf16", H200, *shape) is not None


@GPU
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_the_generic_kernel(rows, monkeypatch):
    def forced(spec, batch, members, bf16, backward, device):
        ring = planning.ring(spec, backward)
        shared = planning._generic_shared(ring, 1024, rows)
        return planning.Plan("generic", 1, 1024, rows, shared=shared, bf16=bf16)

    monkeypatch.setattr(launch, "make_plan", forced)
    grid.examine(backend.unroll, ODD, "cuda")
    grid.examine(backend.unroll, Case((63, 1), ("relu", "tanh"), (False, True), 6, 3, population=2), "cuda")


@GPU
def test_a_captured_graph_replays_forward_and_backward():
    A, h0, W, S, tensors = draw(ODD)
    inputs = [A, h0, *W, *S]

    def run():
        h, _ = backend.unroll(A, h0, W, S, ODD.spec, tensors["reset"])
        return (h, *torch.autograd.grad((h * tensors["dh"].float()).sum(), inputs))

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
def test_repeated_runs_give_the_same_bits():
    case = Case((400, 400), ("sigmoid", "sigmoid"), (False, True), 50, 7)
    A, h0, W, S, _ = draw(case)
    first = backend.unroll(A, h0, W, S, case.spec)[0]
    for _ in range(5):
        assert torch.equal(backend.unroll(A, h0, W, S, case.spec)[0], first)


@GPU
def test_a_population_member_equals_the_model_alone():
    case = Case((63, 100), ("sigmoid", "tanh"), (False, True), 8, 3, population=5)
    A, h0, W, S, _ = draw(case)
    together = torch.func.vmap(lambda a, h, w, s: backend.unroll(a, h, w, s, case.spec)[0])(A, h0, W, S)
    alone = backend.unroll(A[2], h0[2], [w[2] for w in W], [s[2] for s in S], case.spec)[0]
    torch.testing.assert_close(together[2], alone, rtol=1e-5, atol=1e-6)


@GPU
def test_shared_inputs_of_a_population_are_not_copied():
    case = Case((64,), ("tanh",), (False,), 5, 2, population=3)
    A, h0, W, _, _ = draw(case)
    mapped = torch.func.vmap(lambda w: backend.unroll(A[0], h0[0], w, [], case.spec)[0])(W)
    for p in range(3):
        alone = backend.unroll(A[0], h0[0], [W[0][p]], [], case.spec)[0]
        torch.testing.assert_close(mapped[p], alone, rtol=1e-5, atol=1e-6)


@GPU
def test_second_derivatives_follow_the_reference():
    case = Case((7, 5), ("tanh", "sigmoid"), (False, True), 4, 2)
    A, h0, W, S, _ = draw(case)
    found = []
    for unroll, dtype in ((backend.unroll, torch.float32), (reference.unroll, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (A, h0, *W, *S)]
        h, z = unroll(leaves[0], leaves[1], leaves[2:4], leaves[4:], case.spec, None)
        first = torch.autograd.grad((h**2).sum() + z.sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), leaves))
    for x, y in zip(*found, strict=True):
        assert (x.double() - y).norm() <= 1e-4 * y.norm()


@GPU
def test_torch_compile_keeps_one_graph():
    A, h0, W, S, tensors = draw(ODD)

    def loss(A, h0, W, S):
        return (backend.unroll(A * 1.5, h0, W, S, ODD.spec, tensors["reset"])[0] ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x = torch.autograd.grad(compiled(A, h0, W, S), [A, *W, *S])
    y = torch.autograd.grad(loss(A, h0, W, S), [A, *W, *S])
    for a, b in zip(x, y, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@GPU
@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0)])
def test_nothing_to_do_gives_empty_results_and_zero_gradients(T, B):
    A = torch.randn(T, B, 20, device="cuda", requires_grad=True)
    h0 = torch.randn(B, 12, device="cuda", requires_grad=True)
    W = [torch.randn(8, 12, device="cuda", requires_grad=True), torch.randn(12, 8, device="cuda")]
    spec = TransitionSpec((8, 12), ("tanh", "tanh"), (False, False))
    h, z = backend.unroll(A, h0, W, [], spec)
    assert h.shape == (T, B, 12)
    assert z.shape == (T, B, 8)
    dh0, dW = torch.autograd.grad(h.sum() + z.sum(), [h0, W[0]])
    assert not dh0.any()
    assert not dW.any()


@GPU
def test_operators_pass_torch_librarys_own_checks():
    A, h0, W, S, tensors = draw(Case((10, 6), ("tanh", "sigmoid"), (False, True), 3, 2, reset=True))
    args = (A, h0, W, S, tensors["reset"], "tanh,sigmoid", "01", "fp32")
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(backend.unroll_cuda, args, test_utils=utilities)


@GPU
def test_kernels_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    ring = planning.ring(rnn(17), False)
    plan = planning.make_plan(rnn(17), 1, 1, False, False, launch.device_of(0))
    defines = planning.macros(plan, ring, False, False)
    arch = launch.device_of(0).arch
    first = nvrtc.cubin(launch.SOURCES[plan.path], defines, arch)
    (kept,) = Path(tmp_path, "kernels").iterdir()
    assert kept.read_bytes() == first
    kept.write_bytes(b"other")
    assert nvrtc.cubin(launch.SOURCES[plan.path], defines, arch) == b"other"
    assert not [name for name in os.listdir(tmp_path / "kernels") if name.endswith(".tmp")]


@GPU
def test_a_broken_source_shows_the_compilers_words():
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc.compile_source("__global__ void k() { nothing(); }", "k.cu", {}, launch.device_of(0).arch)
