"""The CPU backend beyond the grid: bits that do not depend on company, transforms, threads, empty cases."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.func import functional_call, vmap

from deeprnn.backends import TransitionSpec, cpu, gradients, reference, unroll
from tests.backends import grid

SPEC = TransitionSpec((20, 33), ("tanh", "sigmoid"), (False, True))
PATHS = ["plain", "fast"]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    if request.param == "fast":
        pytest.importorskip("llvmlite")
    monkeypatch.setattr(cpu, "PATH", request.param)
    return request.param


def inputs(spec=SPEC, T=6, B=3, P=(), dtype=torch.float32, seed=None):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31 if seed is None else seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*P, *shape, generator=generator, dtype=dtype) * scale

    H = spec.hidden_size
    below = (H, *spec.sizes[:-1])
    W = [normal(m, k, scale=0.5 / k**0.5) for m, k in zip(spec.sizes, below, strict=True)]
    S = [normal(m, H, scale=0.5 / H**0.5) for m, s in zip(spec.sizes, spec.shortcuts, strict=True) if s]
    return normal(T, B, spec.total), normal(B, H), W, S


def everything(A, h0, W, S, spec=SPEC, reset=None, dh=None):
    """Outputs and all gradients of one call, in a flat list."""
    leaves = [x.detach().clone().requires_grad_() for x in (A, h0, *W, *S)]
    n = 2 + len(W)
    h, z = cpu.unroll(leaves[0], leaves[1], leaves[2:n], leaves[n:], spec, reset)
    grads = torch.autograd.grad(
        (h, z), leaves, (torch.ones_like(h) if dh is None else dh, torch.ones_like(z))
    )
    return [h.detach(), z.detach(), *grads]


def test_a_member_has_the_bits_it_has_alone(path):
    A, h0, W, S = inputs(P=(4,))
    leaves = [x.requires_grad_() for x in (A, h0, *W, *S)]
    h, z = vmap(lambda A, h0, W, S: cpu.unroll(A, h0, W, S, SPEC))(A, h0, W, S)
    grads = torch.autograd.grad((h, z), leaves, (torch.ones_like(h), torch.ones_like(z)))
    for p in range(4):
        alone = everything(A[p], h0[p], [w[p] for w in W], [s[p] for s in S])
        for together, single in zip((h, z, *grads), alone, strict=True):
            assert torch.equal(together[p], single)


def test_a_population_may_share_what_is_not_mapped(path):
    A, h0, W, S = inputs()
    Ws = [torch.stack([w, w * 0.5]) for w in W]
    h, _ = vmap(lambda W: cpu.unroll(A, h0, W, S, SPEC), in_dims=(0,))(Ws)
    assert torch.equal(h[1], cpu.unroll(A, h0, [w * 0.5 for w in W], S, SPEC)[0])
    h, _ = vmap(lambda A: cpu.unroll(A, h0, W, S, SPEC), in_dims=2, out_dims=1)(
        torch.stack([A, A + 1], dim=2)
    )
    assert torch.equal(h[:, 1], cpu.unroll(A + 1, h0, W, S, SPEC)[0])


def test_a_population_may_have_its_own_reset_marks(path):
    A, h0, W, S = inputs(P=(2,))
    reset = torch.tensor([[[False] * 3] * 6, [[False] * 3] * 2 + [[True, False, True]] + [[False] * 3] * 3])
    h, _ = vmap(lambda A, h0, W, S, r: cpu.unroll(A, h0, W, S, SPEC, r))(A, h0, W, S, reset)
    for p in range(2):
        alone, _ = cpu.unroll(A[p], h0[p], [w[p] for w in W], [s[p] for s in S], SPEC, reset[p])
        assert torch.equal(h[p], alone)


def test_gradients_inside_vmap_equal_gradients_outside(path):
    A, h0, W, S = inputs(P=(2,), dtype=torch.float64)

    def loss(W, A, h0, S):
        return cpu.unroll(A, h0, W, S, SPEC)[0].square().sum()

    inside = vmap(torch.func.grad(loss))(W, A, h0, S)
    for p in range(2):
        leaves = [w[p].clone().requires_grad_() for w in W]
        outside = torch.autograd.grad(loss(leaves, A[p], h0[p], [s[p] for s in S]), leaves)
        for a, b in zip(inside, outside, strict=True):
            torch.testing.assert_close(a[p], b)


@pytest.mark.parametrize("B", [1, 12])
def test_threads_and_the_way_they_share_change_no_bit(B, monkeypatch):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import run as cpu_fast

    monkeypatch.setattr(cpu, "PATH", "fast")
    monkeypatch.setattr(cpu_fast, "WORK_PER_THREAD", 1)
    spec = TransitionSpec((40, 63), ("sigmoid", "tanh"), (False, True))
    values = inputs(spec, T=5, B=B)
    reset = torch.rand(5, B) < 0.3
    before = torch.get_num_threads()
    results = []
    try:
        for threads, rows_from in ((1, 0), (2, 0), (2, 10**9), (3, 10**9)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(cpu_fast, "ROWS_PER_THREAD", rows_from)
            monkeypatch.setattr(cpu_fast.Race, "pick", lambda race, ways: "columns")
            h, z = cpu.unroll(*values, spec, reset)
            plain = [h, z]
            dA, dh0 = cpu.unroll_cpu_backward(h, z, h, z, values[1], values[2], values[3], reset, *spec.text)
            results.append([*plain, dA, dh0])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("vector_bytes", "registers"), [(32, 16), (16, 32)])
def test_processors_with_narrower_vectors(vector_bytes, registers, monkeypatch):
    """AVX2 and NEON shapes of the same programs; this processor may be wider, the code runs all the same."""
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import compile as cpu_jit

    target, engine, widest, _ = cpu_jit.machine()
    if vector_bytes > widest:
        pytest.skip("this processor has no vectors so wide")
    monkeypatch.setattr(cpu, "PATH", "fast")
    monkeypatch.setattr(cpu_jit, "machine", lambda: (target, engine, vector_bytes, registers))
    for case in grid.cases()[7::67]:
        grid.examine(cpu.unroll, case)


def test_a_row_has_the_bits_it_has_in_another_batch(monkeypatch):
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(cpu, "PATH", "fast")
    A, h0, W, S = inputs(B=11)
    h, _ = cpu.unroll(A, h0, W, S, SPEC)
    part, _ = cpu.unroll(A[:, 4:6], h0[4:6], W, S, SPEC)
    assert torch.equal(h[:, 4:6], part)


def test_two_halves_equal_the_whole(path):
    A, h0, W, S = inputs(T=8)
    whole, _ = cpu.unroll(A, h0, W, S, SPEC)
    first, _ = cpu.unroll(A[:3], h0, W, S, SPEC)
    second, _ = cpu.unroll(A[3:], first[-1], W, S, SPEC)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_a_reset_row_forgets_everything_before(path):
    A, h0, W, S = inputs()
    reset = torch.zeros(6, 3, dtype=torch.bool)
    reset[4, 1] = True
    marked, _ = cpu.unroll(A, h0, W, S, SPEC, reset)
    anew, _ = cpu.unroll(A[4:, 1:2], torch.zeros(1, 33), W, S, SPEC)
    torch.testing.assert_close(marked[4:, 1:2], anew)
    plain, _ = cpu.unroll(A, h0, W, S, SPEC)
    torch.testing.assert_close(marked[:, [0, 2]], plain[:, [0, 2]])


@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0), (0, 0)])
def test_empty_sequences_and_batches(path, T, B):
    A, h0, W, S = inputs(T=T, B=B)
    h, z, dA, dh0, *weights = everything(A, h0, W, S)
    assert h.shape == (T, B, 33)
    assert z.shape == (T, B, 20)
    assert dA.shape == A.shape
    assert dh0.shape == h0.shape
    assert all(w.abs().sum() == 0 for w in (dh0, *weights))


def test_nan_is_not_hidden(path):
    spec = TransitionSpec((8, 8, 8, 8), ("relu", "tanh", "sigmoid", "identity"), (False,) * 4)
    for offset in spec.offsets:
        A, h0, W, S = inputs(spec, T=2, B=1)
        A[0, 0, offset] = float("nan")
        h, _ = cpu.unroll(A, h0, W, S, spec)
        assert h[1].isnan().any(), f"a NaN entering at column {offset} was lost"


def test_units_saturate_without_overflow(path):
    for unit, low, high in (("sigmoid", 0.0, 1.0), ("tanh", -1.0, 1.0)):
        spec = TransitionSpec((8,), (unit,), (False,))
        for dtype in (torch.float32, torch.float64):
            A = torch.tensor([-1e30, -800.0, -50.0, 0.0, 1e-7, 50.0, 800.0, 1e30], dtype=dtype).view(1, 1, 8)
            h, _ = cpu.unroll(A, torch.zeros(1, 8, dtype=dtype), [torch.zeros(8, 8, dtype=dtype)], [], spec)
            torch.testing.assert_close(h, getattr(torch, unit)(A), rtol=1e-6, atol=1e-30)
            assert h.min() >= low
            assert h.max() <= high


@pytest.mark.parametrize("reset", [False, True])
def test_second_derivatives(path, reset):
    spec = TransitionSpec((3, 4), ("tanh", "sigmoid"), (False, True))
    A, h0, W, S = inputs(spec, T=3, B=2, dtype=torch.float64)
    marks = torch.tensor([[False, False], [True, False], [False, False]]) if reset else None
    leaves = [x.requires_grad_() for x in (A, h0, *W, *S)]

    def f(A, h0, W1, W2, S2):
        return cpu.unroll(A, h0, [W1, W2], [S2], spec, marks)

    assert torch.autograd.gradcheck(f, leaves)
    assert torch.autograd.gradgradcheck(f, leaves)


def test_the_operators_keep_torchs_rules(monkeypatch):
    A, h0, W, S = inputs(T=3)
    leaves = [x.requires_grad_() for x in (A, h0, *W, *S)]
    arguments = (leaves[0], leaves[1], leaves[2:4], leaves[4:], None, *SPEC.text)
    results = torch.library.opcheck(cpu.unroll_cpu, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_it_works_inside_torch_compile(path):
    A, h0, W, S = inputs(dtype=torch.float64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(A, h0, W, S):
        h, z = unroll(A * 2, h0, W, S, SPEC, backend="cpu")
        return h.sin() + z.sum()

    for leaf in (A, *W, *S):
        leaf.requires_grad_()
    step(A, h0, W, S).sum().backward()
    compiled = [leaf.grad.clone() for leaf in (A, *W, *S)]
    for leaf in (A, *W, *S):
        leaf.grad = None
    h, z = reference.unroll(A * 2, h0, W, S, SPEC)
    (h.sin() + z.sum()).sum().backward()
    for got, leaf in zip(compiled, (A, *W, *S), strict=True):
        torch.testing.assert_close(got, leaf.grad)


def test_several_threads_may_call_at_once(monkeypatch):
    pytest.importorskip("llvmlite")
    from deeprnn.backends.cpu.jit import run as cpu_fast

    monkeypatch.setattr(cpu, "PATH", "fast")
    monkeypatch.setattr(cpu_fast, "WORK_PER_THREAD", 1)
    before = torch.get_num_threads()
    values = inputs(T=30, B=2)
    truth = everything(*values)
    wrong: list[int] = []

    def work(number: int) -> None:
        torch.set_num_threads(2)
        for _ in range(5):
            got = everything(*values)
            if not all(torch.equal(a, b) for a, b in zip(got, truth, strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    assert not wrong


def test_the_size_of_the_call_alone_decides_the_path(monkeypatch):
    monkeypatch.setattr(cpu, "PATH", "auto")
    monkeypatch.setattr(cpu, "llvmlite_found", lambda: True)
    W = [torch.empty(400, 400)]
    assert cpu._compiled(torch.empty(200, 1, 400), W, [])
    assert not cpu._compiled(torch.empty(1, 1, 400), W, [])
    assert not cpu._compiled(
        torch.empty(50, 1, 1, 400), [torch.empty(50, 400, 400)], []
    )  # fifty small members
    monkeypatch.setattr(cpu, "llvmlite_found", lambda: False)
    assert not cpu._compiled(torch.empty(200, 1, 400), W, [])
    assert "fastcpu" in cpu.describe_choice()


def test_reasons_for_refusing_name_the_remedy():
    def ask(device="cpu", dtype=torch.float32, spec=SPEC, **more):
        return cpu.why_not(spec, torch.device(device), dtype, 1, 1, **more)

    assert ask() is None
    assert ask(dtype=torch.float64) is None
    assert "move them" in ask(device="cuda")
    assert ".float()" in ask(dtype=torch.bfloat16)
    assert "fp32" in ask(precision="bf16")
    assert "reference" in ask(spec=TransitionSpec((4,), ("maxout:2",), (False,)))


@pytest.mark.parametrize("marked", [False, True])
def test_weight_gradients_with_and_without_a_population_dimension(marked):
    spec = TransitionSpec((3, 5, 4), ("tanh",) * 3, (False, False, True))
    T, B, P = 4, 2, 3
    dA, h, z, h0 = (
        torch.randn(P, *s, dtype=torch.float64) for s in ((T, B, 12), (T, B, 4), (T, B, 8), (B, 4))
    )
    reset = torch.rand(T, B) < 0.4 if marked else None
    dW, dS = gradients.weight_gradients(dA, h, z, h0, reset, spec.sizes, spec.shortcuts)
    previous = torch.cat([h0[:, None], h[:, :-1]], dim=1)
    previous = previous if reset is None else previous * ~reset[..., None]
    torch.testing.assert_close(dW[0], torch.einsum("ptbi,ptbj->pij", dA[..., :3], previous))
    torch.testing.assert_close(dW[1], torch.einsum("ptbi,ptbj->pij", dA[..., 3:8], z[..., :3]))
    torch.testing.assert_close(dW[2], torch.einsum("ptbi,ptbj->pij", dA[..., 8:], z[..., 3:]))
    torch.testing.assert_close(dS[0], torch.einsum("ptbi,ptbj->pij", dA[..., 8:], previous))


def test_a_module_in_a_population(path):
    """The way training uses it: vmap over functional_call, autograd outside."""

    class Cell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(5, 5) * 0.3)

        def forward(self, a):
            spec = TransitionSpec((5,), ("tanh",), (False,))
            return unroll(a, a.new_zeros(a.shape[1], 5), [self.w], [], spec, backend="cpu")[0]

    cells = [Cell() for _ in range(3)]
    stacked = {"w": torch.stack([c.w.detach() for c in cells]).requires_grad_()}
    a = torch.randn(4, 2, 5)
    out = vmap(lambda p: functional_call(cells[0], p, (a,)).square().sum())(stacked)
    out.sum().backward()
    for p, cell in enumerate(cells):
        cell(a).square().sum().backward()
        assert torch.equal(stacked["w"].grad[p], cell.w.grad)
