"""Every backend on the grid, and the grid on backends that are wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deeprnn.backends import autograd, plain, registry, torch_operators
from deeprnn.backends.choose import why_not
from deeprnn.backends.gradients import matrix_gradients, vector_gradients
from deeprnn.backends.unrolling import unroll
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.functions import FUNCTIONS
from tests.backends import grid
from tests.backends.cells_by_hand import by_name
from tests.backends.grid import Case, Rejected, examine

GPU = pytest.mark.gpu


def through(backend: str):
    """What `examine` takes, by a backend's name."""
    return lambda cell, inputs, precision: unroll(cell, inputs, backend, precision)


CELLS = grid.cases_of(by_name(), ("fp32", "fp64"))


@pytest.mark.parametrize("case", grid.cases()[::4] + CELLS[::3], ids=str)
def test_cpu(case):
    examine(through("cpu"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid.cases() + CELLS, ids=str)
def test_cpu_everywhere(case):
    examine(through("cpu"), case)


REGISTERED = [
    Case("63x100", grid.transition((63, 100), ("tanh", "sigmoid")), T=5, B=3, reset=True),
    Case("lstm", by_name()["lstm"], T=4, B=2, reset=True),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("name", registry.MODULES)
def test_every_registered_backend(name, device):
    """What is added to the registry is examined without a further word."""
    for case in REGISTERED:
        reason = why_not(name, case.cell.text, device, torch.float32)
        if reason is not None:
            pytest.skip(reason)
        examine(through(name), case, device)


@pytest.mark.parametrize("case", grid.large_cases()[::2] + grid.large_cases("fp64")[1:2], ids=str)
def test_cpu_at_the_papers_sizes(case):
    examine(through("cpu"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid.large_cases()[1::2] + grid.large_cases("fp64"), ids=str)
def test_cpu_at_more_of_the_papers_sizes(case):
    examine(through("cpu"), case)


@GPU
@pytest.mark.parametrize("backend", ["auto", "stepwise"])
@pytest.mark.parametrize("case", grid.cases(("fp32", "bf16"))[::2] + CELLS[::2], ids=str)
def test_cuda(case, backend):
    examine(through("auto" if case.precision == "fp64" else backend), case, "cuda")


@GPU
@pytest.mark.parametrize("case", grid.large_cases() + grid.large_cases("bf16"), ids=str)
def test_cuda_at_the_papers_sizes(case):
    examine(through("cuda"), case, "cuda")


@pytest.mark.parametrize("case", grid.cases()[::7] + CELLS[1::5], ids=str)
def test_the_reference_in_the_cases_precision(case):
    examine(through("reference"), case)


def test_the_grid_has_every_unit_and_knows_which_functions_jump():
    assert set(grid.KINKED) <= set(FUNCTIONS)
    assert {row.name for row in FUNCTIONS.values() if row.unit} < set(grid.UNITS)


# ---- the grid must catch what is wrong


class Faulty:
    """The derived backward pass by plain operations, with one fault."""

    name = "faulty"

    def __init__(self, fault: str) -> None:
        self.fault, self.stale = fault, {}

    def why_not(self, case) -> None:
        return None

    def forward(self, case, inputs, keep):
        marks = None if self.fault == "reset ignored" else inputs.reset
        found = plain.forward(case.cell, inputs._replace(reset=marks), keep)
        if self.fault == "stale buffer":
            found[0] = self.stale.setdefault(found[0].shape, found[0]).copy_(found[0])
        if self.fault == "row not written":
            found[0][-1, -1] = torch.empty_like(found[0][-1, -1])
        if self.fault == "input scaled in place":
            inputs.A.mul_(0.5)
        if self.fault == "wrong in the last place":
            found[0] += 3e-5 * torch.randn_like(found[0])
        return found

    def backward(self, case, gradients, stored, inputs):
        cell, fault = case.cell, self.fault
        if fault == "a gradient dropped":
            gradients = [None, *gradients[1:]]
        if fault == "reset ignored in backward":
            inputs = inputs._replace(reset=None)
        if fault == "wrong matrix carried back":
            inputs = inputs._replace(matrices=[*inputs.matrices[:-1], inputs.matrices[-1] * 0])
        if fault == "wrong derivative":
            stored = [x * 0.9 for x in stored]
        return plain.backward(cell, gradients, stored, inputs)

    def matrix_gradients(self, adjoint, delta, stored, inputs):
        if self.fault == "reset ignored in weight gradients":
            inputs = inputs._replace(reset=None)
        found = matrix_gradients(adjoint, delta, stored, inputs)
        if self.fault == "weight gradient missing":
            found[-1] = torch.zeros_like(found[-1])
        if self.fault == "first step left out":
            found = matrix_gradients(adjoint, torch.cat([delta[:1] * 0, delta[1:]]), stored, inputs)
        return found


FAULTS = [
    "wrong derivative",
    "weight gradient missing",
    "wrong matrix carried back",
    "reset ignored",
    "reset ignored in backward",
    "reset ignored in weight gradients",
    "a gradient dropped",
    "first step left out",
    "stale buffer",
    "row not written",
    "input scaled in place",
    "wrong in the last place",
]
BAIT = Case("63x100", grid.transition((63, 100), ("tanh", "sigmoid")), T=7, B=3, reset=True)


def faulty(fault: str, monkeypatch):
    """Unroll by a backend with this fault."""
    backend = Faulty(fault)
    for module in (autograd, torch_operators):
        monkeypatch.setattr(module, "load_backend", lambda name: backend)
    return lambda cell, inputs, precision: autograd.unroll("faulty", cell.text, precision, inputs)


def test_the_faulty_backend_passes_without_a_fault(monkeypatch):
    errors = examine(faulty("none", monkeypatch), BAIT)
    gradients = {f"d {name}" for name in ("A", "state0", "matrix0", "matrix1", "matrix2")}
    assert set(errors) == {"output 0", "output 1", *gradients}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_grid_rejects(fault, monkeypatch):
    with pytest.raises(Rejected):
        examine(faulty(fault, monkeypatch), BAIT)


def test_the_grid_rejects_members_that_share_weights():
    class FirstMember(torch.autograd.Function):
        """Every member takes member 0's matrix, as a kernel with a wrong stride would."""

        generate_vmap_rule = False

        @staticmethod
        def forward(w):
            return w.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g

        @staticmethod
        def vmap(info, in_dims, w):
            return w.movedim(in_dims[0], 0)[:1].expand_as(w), 0

    def mixing(cell, inputs, precision) -> list[Tensor]:
        return plain.forward(cell, inputs._replace(matrices=[FirstMember.apply(w) for w in inputs.matrices]))

    with pytest.raises(Rejected):
        examine(mixing, Case("63", grid.transition((63,), ("tanh",)), T=7, B=3, population=3))


def test_the_error_is_relative_to_the_reference():
    truth = torch.full((4, 4), 1e-6, dtype=torch.float64)
    assert math.isclose(grid._error(truth * 1.5, truth, "here"), 0.5, rel_tol=1e-6)
    with pytest.raises(Rejected, match="never written"):
        grid._error(truth * float("nan"), truth, "here")


@pytest.mark.parametrize("name", by_name())
def test_the_derived_backward_pass_is_that_of_autograd(name):
    """Vectors' gradients too, which are sums over columns of delta."""
    cell = by_name()[name]
    case = Case(name, cell, T=5, B=2, precision="fp64", reset=True)
    tensors = grid.draw(case, grid.fresh_seed())
    truth, adjoint = grid.expected(case, tensors), adjoint_of(cell)
    inputs = grid.inputs_of(cell, tensors)
    stored = plain.forward(cell, inputs, keep=True)
    gradients = [tensors[f"gradient{k}"] for k in range(len(cell.outputs))]
    delta, states = plain.backward(cell, gradients, stored, inputs)
    found = {f"d state{i}": x for i, x in enumerate(states)}
    found |= {f"d matrix{i}": x for i, x in enumerate(matrix_gradients(adjoint, delta, stored, inputs))}
    found |= {f"d vector{i}": x for i, x in enumerate(vector_gradients(adjoint, delta))}
    for key, value in found.items():
        torch.testing.assert_close(value, truth[key])
