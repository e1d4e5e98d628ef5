"""Autograd, vmap, torch.compile and fake tensors around any backend: here one of plain loops that counts its calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deeprnn import DeepRNN
from deeprnn.backends import autograd, choose, plain, registry, torch_operators, unroll
from deeprnn.backends.call import Case, Gradients, Inputs
from deeprnn.cells.description import CellDescription
from tests.backends import cells_by_hand, grid

CELLS = cells_by_hand.by_name(4)
DTS = CELLS["dts"]
MARKS = torch.tensor([[0, 0], [1, 0], [0, 1], [0, 0]], dtype=torch.bool)


class Counted:
    """A backend that notes what it is given."""

    name = "counted"

    def __init__(self) -> None:
        self.forward_calls: list[Inputs] = []
        self.backward_calls: list[Sequence[Tensor | None]] = []

    def why_not(self, case: Case) -> str | None:
        return None

    @torch.no_grad()
    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        self.forward_calls.append(inputs)
        return plain.forward(case.cell, inputs, keep)

    @torch.no_grad()
    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        assert inputs.A is None
        self.backward_calls.append(gradients)
        return plain.backward(case.cell, gradients, stored, inputs)

    @property
    def calls(self) -> tuple[int, int]:
        return len(self.forward_calls), len(self.backward_calls)


BACKEND = Counted()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """The backend, registered and with nothing counted yet."""
    monkeypatch.setitem(registry.MODULES, "counted", __name__)
    monkeypatch.setitem(registry.PREFERENCE, "cpu", ("counted",))
    registry.load_backend.cache_clear()
    choose._fastest_backend.cache_clear()
    BACKEND.__init__()
    yield BACKEND
    registry.load_backend.cache_clear()
    choose._fastest_backend.cache_clear()


def leaves(cell: CellDescription = DTS, T=4, B=2, P=(), dtype=torch.float32) -> list[Tensor]:
    """A, states, matrices and vectors."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(T, B, cell.entry_width), *((B, n) for n in cell.states), *cell.matrices]
    drawn = [0.5 * torch.randn(*P, *shape, generator=generator, dtype=dtype) for shape in shapes]
    drawn += [1.2 + torch.rand(*P, n, generator=generator, dtype=dtype) for n in cell.vectors]
    return [x.requires_grad_() for x in drawn]


def inputs_of(x: Sequence[Tensor], cell: CellDescription = DTS, reset: Tensor | None = None) -> Inputs:
    masks = [torch.linspace(0.5, 2, n, dtype=x[0].dtype).expand(x[1].shape[-2], n) for n in cell.masks]
    return Inputs.of(cell, [*x, *masks, *([] if reset is None else [reset])])


def run(x: Sequence[Tensor], cell: CellDescription = DTS, reset: Tensor | None = None) -> list[Tensor]:
    return unroll(cell, inputs_of(x, cell, reset), backend="counted")


def by_reference(
    x: Sequence[Tensor], cell: CellDescription = DTS, reset: Tensor | None = None
) -> list[Tensor]:
    return plain.forward(cell, inputs_of(x, cell, reset))


def loss(outputs: Sequence[Tensor]) -> Tensor:
    return sum((y.sin() * (1 + k)).sum() for k, y in enumerate(outputs))  # type: ignore[return-value]


def assert_close(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


# ---- derivatives


@pytest.mark.parametrize("case", grid.cases_of(CELLS, ("fp64",))[::3], ids=str)
def test_outputs_and_gradients_of_any_cell(case, counted):
    grid.examine(lambda cell, inputs, precision: unroll(cell, inputs, "counted", precision), case)
    assert min(counted.calls) > 0


def nth_gradients(order: int, outputs: list[Tensor], x: list[Tensor]) -> Sequence[Tensor]:
    """The gradients of the squared norm of the gradients ... of a loss."""
    total = loss(outputs)
    for _ in range(order - 1):
        gradients = torch.autograd.grad(total, x, create_graph=True)
        total = sum((g**2).sum() for g in gradients)  # type: ignore[assignment]
    return torch.autograd.grad(total, x)


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("name", ["dts", "lstm", "gru-published", "pooled"])
def test_derivatives_of_every_order_follow_the_reference(name, order, counted):
    cell, reset = CELLS[name], torch.tensor([[False, False], [False, True]])
    x = leaves(cell, T=2, dtype=torch.float64)
    found = nth_gradients(order, run(x, cell, reset), x)
    assert counted.calls[0] == 1
    assert_close(found, nth_gradients(order, by_reference(x, cell, reset), x))


def test_a_gradient_of_what_was_saved_alone_is_right_to_second_order():
    """An LSTM saves gates: their own gradients arise where a gradient is differentiated."""
    cell = CELLS["lstm"]
    x = leaves(cell, dtype=torch.float64)
    found = []
    for function in (run, by_reference):
        (g,) = torch.autograd.grad(function(x, cell)[0].sum(), x[:1], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), x, allow_unused=True))
    assert_close(*found)


def test_outputs_without_a_gradient_are_told_apart(counted):
    x = leaves(dtype=torch.float64)
    found = torch.autograd.grad(run(x)[0].sum(), x)
    (given,) = counted.backward_calls
    assert [g is None for g in given] == [False, True]
    assert_close(found, torch.autograd.grad(by_reference(x)[0].sum(), x))


def test_matrix_gradients_that_nobody_wants_are_not_computed(monkeypatch):
    monkeypatch.setattr(autograd, "matrix_gradients", lambda *a: pytest.fail("not wanted"))
    x = leaves()
    for w in x[2:]:
        w.requires_grad_(False)
    assert all(g.any() for g in torch.autograd.grad(run(x)[-1].sum(), x[:2]))


def test_the_input_is_not_kept_for_the_backward_pass():
    x, kept = leaves(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = run(x)
    numbers = [y.numel() for y in (*outputs, *x[1:])]
    assert sorted(t.numel() for t in kept) == sorted(numbers)
    assert x[0].data_ptr() not in {t.data_ptr() for t in kept}


def test_without_gradients_nothing_is_kept(counted):
    with torch.no_grad():
        outputs = run([v.detach() for v in leaves(CELLS["lstm"])], CELLS["lstm"])
    assert len(outputs) == 2
    assert not any(y.requires_grad for y in outputs)
    assert counted.calls == (1, 0)


def test_a_sequence_of_states_may_be_changed_in_place():
    x = leaves()
    torch.manual_seed(0)
    found = torch.autograd.grad(functional.dropout(run(x)[-1], inplace=True).sum(), x)
    torch.manual_seed(0)
    assert_close(found, torch.autograd.grad(functional.dropout(run(x)[-1]).sum(), x))


# ---- torch.func and its relatives


def test_a_population_is_its_members(counted):
    members, A = leaves(P=(3,)), leaves()[0]
    mapped = torch.func.vmap(lambda *m: run([A, *m], reset=MARKS)[-1])(*members[1:])
    assert counted.calls == (1, 0)
    (given,) = counted.forward_calls
    assert given.A.stride(0) == 0, "a shared input is not copied"
    assert given.reset is not None
    assert given.reset.dim() == 2, "nor are shared marks"
    found = torch.autograd.grad(mapped.sin().sum(), [A, *members[1:]])
    alone = [run([A, *(m[p] for m in members[1:])], reset=MARKS)[-1] for p in range(3)]
    assert_close(mapped.unbind(0), alone)
    assert_close(found, torch.autograd.grad(torch.stack(alone).sin().sum(), [A, *members[1:]]))


def test_gradients_of_each_sample():
    x = [v.detach() for v in leaves(B=3, dtype=torch.float64)]

    def of_one(A: Tensor, state: Tensor, *matrices: Tensor) -> Tensor:
        return loss(run([A.unsqueeze(1), state.unsqueeze(0), *matrices]))

    over = tuple(range(2, len(x)))
    dims = (1, 0, *(None for _ in over))
    each = torch.func.vmap(torch.func.grad(of_one, argnums=over), in_dims=dims)(*x)
    for b in range(3):
        alone = [x[0][:, b : b + 1], x[1][b : b + 1], *(w.clone().requires_grad_() for w in x[2:])]
        assert_close([g[b] for g in each], torch.autograd.grad(loss(by_reference(alone)), alone[2:]))


def test_gradients_mapped_over_the_outputs():
    x = leaves()
    h = run(x)[-1]
    vectors = torch.randn(3, *h.shape)
    mapped = torch.func.vmap(lambda g: torch.autograd.grad(h, x, g, retain_graph=True))(vectors)
    for p in range(3):
        assert_close([g[p] for g in mapped], torch.autograd.grad(h, x, vectors[p], retain_graph=True))


@pytest.mark.parametrize("name", ["dts", "lstm", "pooled"])
def test_gradients_batched_by_autograd(name):
    """The vmap of `is_grads_batched`, which a vectorized jacobian uses, is another than torch.func's."""
    x = leaves(CELLS[name])
    outputs = run(x, CELLS[name], MARKS)
    vectors = [torch.randn(3, *y.shape) for y in outputs]
    batched = torch.autograd.grad(outputs, x, vectors, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(outputs, x, [v[i] for v in vectors], retain_graph=True)
        assert_close([g[i] for g in batched], alone)


def test_forward_mode_takes_plain_operations(counted):
    x = [v.detach() for v in leaves(dtype=torch.float64)]
    _, slope = torch.func.jvp(
        lambda A: unroll(DTS, inputs_of([A, *x[1:]]))[-1], (x[0],), (torch.ones_like(x[0]),)
    )
    assert counted.calls == (0, 0)
    nearby = [by_reference([x[0] + e, *x[1:]])[-1] for e in (1e-6, -1e-6)]
    torch.testing.assert_close(slope, (nearby[0] - nearby[1]) / 2e-6, rtol=1e-6, atol=1e-8)


# ---- compilers


def test_torch_compile_keeps_one_graph(counted):
    x = leaves()

    def function(*x: Tensor) -> Tensor:
        return loss(unroll(DTS.text, inputs_of([x[0] * 1.5, *x[1:]], reset=MARKS), backend="counted"))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*x), x)
    assert counted.calls == (1, 1)
    assert_close(found, torch.autograd.grad(function(*x), x))


def test_torch_compile_follows_the_layer_to_the_operator(counted):
    layer = DeepRNN(5, 7, intermediate_sizes=(6,), shortcut="last", input_to="all")
    parameters, x = list(layer.parameters()), torch.randn(4, 2, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x)[0].square().sum(), parameters)
    assert counted.calls == (1, 1)
    layer.backend = "reference"
    assert_close(found, torch.autograd.grad(layer(x)[0].square().sum(), parameters))


def test_fake_tensors_have_the_shapes_and_run_nothing(counted):
    from torch._subclasses.fake_tensor import FakeTensorMode

    cell = CELLS["lstm"]
    with FakeTensorMode():
        x = [torch.empty(v.shape, requires_grad=True) for v in leaves(cell, P=(3,))]
        outputs = run(x, cell)
        assert [tuple(y.shape) for y in outputs] == [(3, 4, 2, 4)] * 2
        gradients = torch.autograd.grad(loss(outputs), x)
    assert [g.shape for g in gradients] == [v.shape for v in x]
    assert counted.calls == (0, 0)


@pytest.mark.parametrize("name", ["dts", "lstm"])
def test_the_operator_passes_torch_librarys_own_checks(name):
    cell = CELLS[name]
    tensors = inputs_of(leaves(cell), cell, MARKS).tensors
    torch.library.opcheck(torch_operators.unroll_op, ("counted", cell.text, "fp32", tensors, True, True))


@pytest.mark.parametrize("operator", ["unroll", "unroll_backward"])
@pytest.mark.parametrize("device", ["CPU", "CUDA", "XPU", "MPS", "PrivateUse1"])
def test_the_operator_serves_every_device(operator, device):
    """A compiler sees it wherever the plain backend can run."""
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"deeprnn::{operator}", device)


@pytest.mark.parametrize(("T", "B"), [(0, 3), (4, 0)])
@pytest.mark.parametrize("name", ["dts", "gru"])
def test_nothing_to_do_gives_empty_results_and_zero_gradients(name, T, B):
    x = leaves(CELLS[name], T, B)
    outputs = run(x, CELLS[name])
    assert all(y.shape[:2] == (T, B) for y in outputs)
    assert not any(g.any() for g in torch.autograd.grad(loss(outputs), x))


def test_the_first_call_imports_no_compiler():
    """torch._dynamo alone would take a second of the first call of a process."""
    code = """
import sys, torch
from deeprnn import DeepRNN
layer = DeepRNN(5, 7)
layer(torch.randn(4, 2, 5))[0].sum().backward()
print([name for name in ("torch._dynamo", "sympy", "triton", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
