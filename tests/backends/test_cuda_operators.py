"""How the CUDA operators are registered, tested without a GPU: the kernels' place is taken by plain loops.

The operators also get a CPU kernel here, which is the CUDA one with `launch` replaced, so that autograd, vmap,
fake tensors, torch.compile and second derivatives run through the same code as on a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deeprnn import DeepRNN, backends
from deeprnn.backends import TransitionSpec, reference
from deeprnn.backends import cuda as backend
from deeprnn.backends.cpu import plain as cpu_plain
from deeprnn.backends.cuda import driver, nvrtc
from tests.backends import grid
from tests.backends.grid import Case

SPEC = TransitionSpec((7, 5), ("tanh", "sigmoid"), (False, True))


def plain_forward(A, h0, W, S, reset, spec, bf16, h, z, looked=None):
    """`launch.forward` by the plain loop, member by member."""
    for own, (a, h0_, w, s, h_, z_) in members(A.dim() == 4, reset, (A, h0, W, S, h, z)):
        cpu_plain.forward(a, h0_, w, s, own, spec.units, spec.shortcuts, h_, z_)


def plain_backward(dh, dz, h, z, W, S, reset, spec, bf16, dA, dh0):
    """`launch.backward`, likewise."""
    given = dh, dz, h, z, W, S, dA, dh0
    for own, (dh_, dz_, h_, z_, w, s, dA_, dh0_) in members(h.dim() == 4, reset, given):
        cpu_plain.backward(dh_, dz_, h_, z_, w, s, own, spec.units, spec.shortcuts, dA_, dh0_)


def members(
    population: bool, reset: Tensor | None, values: tuple[Any, ...]
) -> Iterator[tuple[Any, list[Any]]]:
    """Each member's reset marks, and its tensors and lists of tensors."""
    if not population:
        yield reset, list(values)
        return
    for p in range(values[-1].shape[0]):
        own = reset if reset is None or reset.dim() == 2 else reset[p]
        yield own, [x[p] if isinstance(x, Tensor) else x and [y[p] for y in x] for x in values]


@pytest.fixture
def calls(monkeypatch):
    """The operators serve CPU tensors while a test runs; how often each direction was launched."""
    counts = {"forward": 0, "backward": 0}

    def forward(*args, **more):
        counts["forward"] += 1
        plain_forward(*args, **more)

    def backward(*args):
        counts["backward"] += 1
        plain_backward(*args)

    monkeypatch.setattr(backend.launch, "forward", forward)
    monkeypatch.setattr(backend.launch, "backward", backward)
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    with torch.library._scoped_library("deeprnn", "IMPL") as library:
        library.impl("unroll_cuda", backend._forward, "CPU")
        library.impl("unroll_cuda_backward", backend._backward, "CPU")
        yield counts


def leaves(T=4, B=2, spec=SPEC, P=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    below = (spec.hidden_size, *spec.sizes[:-1])
    shapes = [(T, B, spec.total), (B, spec.hidden_size), *zip(spec.sizes, below, strict=True)]
    shapes += [(m, spec.hidden_size) for m, s in zip(spec.sizes, spec.shortcuts, strict=True) if s]
    drawn = [torch.randn(*P, *shape, generator=generator, dtype=dtype) * 0.5 for shape in shapes]
    return [x.requires_grad_() for x in drawn]


def run(x, reset=None, spec=SPEC):
    n = 2 + spec.depth
    return backend.unroll(x[0], x[1], x[2:n], x[n:], spec, reset)


CASES = [
    Case((7, 5), ("tanh", "sigmoid"), (False, True), 6, 3, reset=True),
    Case((6,), ("sigmoid",), (False,), 5, 2),
    Case((4, 6, 5), ("relu", "tanh", "sigmoid"), (False, False, True), 4, 3, population=3, reset=True),
    Case((7, 5), ("tanh", "sigmoid"), (False, True), 5, 2, population=2, z_gradient=False),
    Case((7, 5), ("tanh", "sigmoid"), (False, True), 5, 2, strided=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_of_the_registered_operators(case, calls):
    grid.examine(backend.unroll, case, "cpu")
    assert calls["forward"] > 0
    assert calls["backward"] > 0


def test_the_direct_way_and_the_operators_give_the_same_bits(calls):
    x = leaves()
    h, z = run(x)
    direct = torch.autograd.grad((h.sum() + z.sum()), x)
    h2, z2 = backend.unroll_cuda(x[0], x[1], x[2:4], x[4:], None, *SPEC.text, "fp32")
    through = torch.autograd.grad((h2.sum() + z2.sum()), x)
    assert torch.equal(h, h2)
    for a, b in zip(direct, through, strict=True):
        assert torch.equal(a, b)


def test_weight_gradients_that_nobody_wants_are_not_computed(calls, monkeypatch):
    monkeypatch.setattr(backend, "weight_gradients", lambda *a: pytest.fail("not wanted"))
    x = leaves()
    for w in x[2:]:
        w.requires_grad_(False)
    h, _ = run(x)
    dA, dh0 = torch.autograd.grad(h.sum(), x[:2])
    assert dA.abs().sum() > 0
    assert dh0.abs().sum() > 0
    h, _ = backend.unroll_cuda(x[0], x[1], x[2:4], x[4:], None, *SPEC.text, "fp32")
    assert torch.equal(torch.autograd.grad(h.sum(), x[0])[0], dA)


def test_a_gradient_for_the_inner_layers_alone(calls):
    x = leaves()
    found = torch.autograd.grad(run(x)[1].sum(), x)
    y = [v.detach().double().requires_grad_() for v in x]
    truth = torch.autograd.grad(reference.unroll(y[0], y[1], y[2:4], y[4:], SPEC)[1].sum(), y)
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_second_derivatives_follow_the_reference(calls):
    found = []
    for unroll, dtype in ((backend.unroll, torch.float32), (reference.unroll, torch.float64)):
        x = [v.detach().to(dtype).requires_grad_() for v in leaves()]
        h, z = unroll(x[0], x[1], x[2:4], x[4:], SPEC, None)
        first = torch.autograd.grad((h**2).sum() + z.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([(g**2).sum() for g in first]).sum(), x))
    for a, b in zip(*found, strict=True):
        assert (a.double() - b).norm() <= 1e-4 * b.norm()


def test_gradients_mapped_over_the_outputs(calls):
    x = leaves()
    h, _ = run(x)
    grads = torch.randn(3, *h.shape)
    found = torch.func.vmap(lambda g: torch.autograd.grad(h, x, g, retain_graph=True))(grads)
    for p in range(3):
        alone = torch.autograd.grad(h, x, grads[p], retain_graph=True)
        for a, b in zip(found, alone, strict=True):
            torch.testing.assert_close(a[p], b)


def test_gradients_batched_by_autograd(calls):
    """The vmap of `is_grads_batched`, which a vectorized jacobian uses, is another than torch.func's."""
    x, reset = leaves(), torch.zeros(4, 2, dtype=torch.bool)
    reset[2, 1] = True
    outputs = run(x, reset)
    vectors = [torch.randn(3, *y.shape) for y in outputs]
    batched = torch.autograd.grad(outputs, x, vectors, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(outputs, x, [v[i] for v in vectors], retain_graph=True)
        for a, b in zip(batched, alone, strict=True):
            torch.testing.assert_close(a[i], b)


def test_functional_gradients_take_the_reference(calls):
    x = [v.detach() for v in leaves()]
    found = torch.func.grad(lambda a: run([a, *x[1:]])[0].square().sum())(x[0])
    assert calls["forward"] == 0
    y = leaves()
    torch.testing.assert_close(found, torch.autograd.grad(run(y)[0].square().sum(), y[0])[0])


def test_a_shared_input_is_not_copied_for_a_population(calls, monkeypatch):
    seen = []
    forward = backend.launch.forward

    def strided(A, *rest, **more):
        seen.append(A.stride(0))
        forward(A, *rest, **more)

    monkeypatch.setattr(backend.launch, "forward", strided)
    x, members = leaves(), leaves(P=(3,))
    h = torch.func.vmap(lambda w, v, s: run([x[0], x[1], w, v, s])[0])(*members[2:])
    assert h.shape == (3, 4, 2, 5)
    assert seen == [0]


def test_torch_compile_keeps_one_graph(calls):
    x, reset = leaves(), torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0]], dtype=torch.bool)

    def loss(*x):
        return (run([x[0] * 1.5, *x[1:]], reset)[0] ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*x), x)
    for a, b in zip(found, torch.autograd.grad(loss(*x), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_torch_compile_follows_the_layer_to_the_operator(calls, monkeypatch):
    monkeypatch.setitem(backends.PREFERENCE, "cpu", ("cuda",))
    monkeypatch.setattr(backend, "why_not", lambda *args, **kwargs: None)
    backends._choose_once.cache_clear()
    layer = DeepRNN(5, 7, intermediate_sizes=(6,), shortcut="last", input_to="all")
    parameters, x = list(layer.parameters()), torch.randn(4, 2, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x)[0].square().sum(), parameters)
    assert calls == {"forward": 1, "backward": 1}
    layer.backend = "reference"
    for a, b in zip(found, torch.autograd.grad(layer(x)[0].square().sum(), parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    backends._choose_once.cache_clear()


def test_fake_tensors_have_the_shapes_and_launch_nothing(calls):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = [torch.empty(v.shape, requires_grad=True) for v in leaves(P=(3,))]
        h, z = backend.unroll(x[0], x[1], x[2:4], x[4:], SPEC)
        assert (h.shape, z.shape) == ((3, 4, 2, 5), (3, 4, 2, 7))
        grads = torch.autograd.grad(h.sum() + z.sum(), x)
    assert [g.shape for g in grads] == [v.shape for v in x]
    assert calls == {"forward": 0, "backward": 0}


def test_operators_pass_torch_librarys_own_checks(calls):
    x = leaves()
    args = (x[0], x[1], x[2:4], x[4:], None, *SPEC.text, "fp32")
    torch.library.opcheck(backend.unroll_cuda, args)


@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0)])
def test_nothing_to_do_gives_empty_results_and_zero_gradients(T, B, calls):
    x = leaves(T, B)
    h, z = run(x)
    assert (h.shape, z.shape) == ((T, B, 5), (T, B, 7))
    for g in torch.autograd.grad(h.sum() + z.sum(), x):
        assert not g.any()
    assert calls["forward"] == 0


def test_the_first_call_imports_no_compiler():
    """torch._dynamo alone would take a second of the first call of a process."""
    code = """
import sys, torch
from tests.backends import test_cuda_operators as here
from deeprnn.backends import cuda as backend
backend.launch.forward, backend.launch.backward, backend.DEVICE = here.plain_forward, here.plain_backward, "cpu"
x = here.leaves()
h, z = here.run(x)
torch.autograd.grad(h.sum(), x)
heavy = [name for name in ("torch._dynamo", "sympy", "triton", "torch._inductor") if name in sys.modules]
print(heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


def test_kernels_on_disk_are_found_without_loading_the_compiler(tmp_path, monkeypatch):
    compiled = []
    library = tmp_path / "libnvrtc.so.13"
    library.write_bytes(b"one")
    monkeypatch.setenv("DEEPRNN_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([str(library)]))
    monkeypatch.setattr(nvrtc, "library", lambda: pytest.fail("loaded"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a: compiled.append(a) or b"code")
    nvrtc.identity.cache_clear()
    for _ in range(2):
        assert nvrtc.cubin("update.cu", {}, "sm_90") == b"code"
    assert len(compiled) == 1
    library.write_bytes(b"another version")
    nvrtc.identity.cache_clear()
    nvrtc.cubin("update.cu", {}, "sm_90")
    assert len(compiled) == 2, "another compiler's kernels are not used"
    nvrtc.identity.cache_clear()


def test_a_kernel_that_cannot_be_kept_is_used_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc.os, "replace", full)
    nvrtc._keep(tmp_path / "kernels" / "a.cubin", b"code")
    assert list((tmp_path / "kernels").iterdir()) == []
