"""Every backend over one grid, and the grid over backends broken on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deeprnn.backends import cpu, load, reference
from deeprnn.backends.cpu import plain as cpu_plain
from deeprnn.backends.gradients import weight_gradients
from tests.backends import grid
from tests.backends.grid import Case, Rejected, examine

GPU = pytest.mark.gpu


def serve(backend: str, case: Case, device: str) -> None:
    """Examine a backend on a case, or skip with the backend's own reason."""
    module = load(backend)
    precision = "bf16" if case.precision == "bf16" else "fp32"
    reason = module.why_not(
        case.spec,
        torch.device(device),
        case.dtype,
        case.T,
        case.B,
        P=max(1, case.population),
        precision=precision,
    )
    if reason is not None:
        pytest.skip(reason)
    examine(module.unroll, case, device)


@pytest.mark.parametrize("case", grid.cases(), ids=str)
def test_cpu_in_plain_calls(case, monkeypatch):
    monkeypatch.setattr(cpu, "PATH", "plain")
    serve("cpu", case, "cpu")


@pytest.mark.parametrize("case", grid.cases()[::8] + grid.cases()[3::24], ids=str)
def test_cpu_in_machine_code(case, monkeypatch):
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(cpu, "PATH", "fast")
    serve("cpu", case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", grid.cases(), ids=str)
def test_cpu_in_machine_code_everywhere(case, monkeypatch):
    test_cpu_in_machine_code(case, monkeypatch)


@pytest.mark.parametrize("case", grid.large_cases()[::2] + grid.large_cases("fp64")[1:2], ids=str)
def test_cpu_at_the_papers_sizes(case):
    serve("cpu", case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", grid.large_cases()[1::2] + grid.large_cases("fp64"), ids=str)
def test_cpu_at_more_of_the_papers_sizes(case):
    serve("cpu", case, "cpu")


@GPU
@pytest.mark.parametrize("case", grid.cases(("fp32", "fp64", "bf16")), ids=str)
def test_cuda(case):
    serve("cuda", case, "cuda")


@GPU
@pytest.mark.parametrize("case", grid.large_cases() + grid.large_cases("bf16"), ids=str)
def test_cuda_at_the_papers_sizes(case):
    serve("cuda", case, "cuda")


@pytest.mark.parametrize("case", grid.cases()[::5], ids=str)
def test_reference_agrees_with_itself_in_the_cases_precision(case):
    examine(reference.unroll, case)


# ---- the grid must catch what is wrong


class Sabotaged(torch.autograd.Function):
    """The plain hand-written path, with one fault."""

    fault = "none"

    @staticmethod
    def forward(A, h0, reset, units, shortcuts, layers, *matrices):
        fault = Sabotaged.fault
        W, S = list(matrices[:layers]), list(matrices[layers:])
        h, z = (
            A.new_empty(*A.shape[:-1], h0.shape[-1]),
            A.new_empty(*A.shape[:-1], A.shape[-1] - h0.shape[-1]),
        )
        marks = None if fault == "reset ignored" else reset
        if fault == "stale buffer":
            h = STALE.setdefault(tuple(h.shape), h)
        cpu_plain.forward(A.contiguous(), h0, W, S, marks, units, shortcuts, h, z)
        if fault == "row not written":
            h[-1, -1] = torch.empty_like(h[-1, -1])
        if fault == "input scaled in place":
            A.mul_(0.5)
        if fault == "wrong in the last place":
            h += 3e-5 * torch.randn_like(h)
        return (h.view_as(h), z) if fault == "stale buffer" else (h, z)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, h0, reset, ctx.units, ctx.shortcuts, ctx.layers, *matrices = inputs
        ctx.save_for_backward(*output, h0, reset, *matrices)

    @staticmethod
    def backward(ctx, dh, dz):
        fault = Sabotaged.fault
        h, z, h0, reset, *matrices = ctx.saved_tensors
        W, S = matrices[: ctx.layers], matrices[ctx.layers :]
        dA, dh0 = h.new_empty(*h.shape[:-1], h.shape[-1] + z.shape[-1]), torch.empty_like(h0)
        units = ["identity" if fault == "wrong derivative" else u for u in ctx.units]
        dz = None if fault == "gradient of z dropped" else dz
        carried = [s * 0 for s in S] if fault == "shortcut not carried back" else S
        marks = None if fault == "reset ignored in backward" else reset
        cpu_plain.backward(dh, dz, h, z, W, carried, marks, units, ctx.shortcuts, dA, dh0)
        marks = None if fault == "reset ignored in weight gradients" else reset
        sizes = [w.shape[0] for w in W]
        dW, dS = weight_gradients(dA, h, z, h0, marks, sizes, ctx.shortcuts)
        if fault == "shortcut gradient missing":
            dS = [torch.zeros_like(d) for d in dS]
        if fault == "first step left out":
            dW[0] = dW[0] - dA[0, :, : sizes[0]].T @ (h0 if reset is None else h0 * ~reset[0][:, None])
        return dA, dh0, None, None, None, None, *dW, *dS


STALE: dict[tuple[int, ...], Tensor] = {}
FAULTS = [
    "wrong derivative",
    "shortcut gradient missing",
    "shortcut not carried back",
    "reset ignored",
    "reset ignored in backward",
    "reset ignored in weight gradients",
    "gradient of z dropped",
    "first step left out",
    "stale buffer",
    "row not written",
    "input scaled in place",
    "wrong in the last place",
]
BAIT = Case((63, 100), ("tanh", "sigmoid"), (False, True), T=7, B=3, reset=True)


def sabotaged(A, h0, W, S, spec, reset, precision):
    return Sabotaged.apply(A, h0, reset, spec.units, spec.shortcuts, len(W), *W, *S)


def test_the_sabotaged_backend_passes_without_a_fault(monkeypatch):
    monkeypatch.setattr(Sabotaged, "fault", "none")
    errors = examine(sabotaged, BAIT)
    assert {"h", "z", "last", "dA", "dh0", "dW1", "dW2", "dS2"} == set(errors)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_grid_rejects(fault, monkeypatch):
    monkeypatch.setattr(Sabotaged, "fault", fault)
    with pytest.raises(Rejected):
        examine(sabotaged, BAIT)


DELICATE = Case(
    (63, 1, 100), ("tanh", "relu", "sigmoid"), (False,) * 3, T=1, B=3, reset=True, z_gradient=False
)


def test_what_float32_cannot_know_is_not_held_against_a_backend(monkeypatch):
    """At this seed a hundred terms cancel to a thousandth: the plain loop itself is as far off."""
    monkeypatch.setattr(Sabotaged, "fault", "none")
    examine(sabotaged, DELICATE, seed=1132417)
    assert grid.rounding(DELICATE, grid.draw(DELICATE, 1132417), "dW1") > 1e-5
    for fault in ("wrong derivative", "reset ignored", "wrong in the last place"):
        monkeypatch.setattr(Sabotaged, "fault", fault)
        with pytest.raises(Rejected):
            examine(sabotaged, DELICATE, seed=1132417)


def test_the_grid_rejects_members_that_share_weights():
    def mixing(A, h0, W, S, spec, reset, precision):
        return reference.unroll(A, h0, [first(w) for w in W], S, spec, reset)

    def first(w: Tensor) -> Tensor:
        return FirstMember.apply(w)

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

    with pytest.raises(Rejected):
        examine(mixing, Case((63,), ("tanh",), (False,), T=7, B=3, population=3))


def test_the_error_is_relative_to_the_reference():
    truth = torch.full((4, 4), 1e-6, dtype=torch.float64)
    assert math.isclose(grid._error(truth * 1.5, truth, "here"), 0.5, rel_tol=1e-6)
    with pytest.raises(Rejected, match="never written"):
        grid._error(truth * float("nan"), truth, "here")
