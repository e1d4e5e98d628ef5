"""Random cells against float64 autograd of the plain loop: outputs, every gradient, reset marks, populations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from deeprnn.backends import plain
from deeprnn.backends.call import Inputs
from deeprnn.backends.unrolling import unroll
from deeprnn.cells.description import CellDescription, from_text
from deeprnn.cells.functions import FUNCTIONS
from tests.backends import cells_by_hand
from tests.backends.random_cells import Shape, cast, random_cell, random_inputs

COUNT = 208
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-12}
BY_NAME = cells_by_hand.by_name()


@pytest.fixture(autouse=True)
def one_thread():
    """Small calls are not shared, and torch's own threads only get in the way of each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def shape_of(seed: int) -> Shape:
    """Some batches are narrower than a tile, some wider; every other one has reset marks."""
    return Shape(T=5 if seed % 5 else 1, B=(1, 2, 3, 5, 9, 19)[seed % 6], reset=seed % 2 == 0)


def with_gradients(cell: CellDescription, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """Outputs, and the gradients of a sum of them with random weights, by name."""
    groups = {"A": [inputs.A], "state": inputs.states, "matrix": inputs.matrices, "vector": inputs.vectors}
    leaves = {
        f"{name} {i}": x.detach().clone().requires_grad_()
        for name, group in groups.items()
        for i, x in enumerate(group)
    }
    own = iter(leaves.values())
    A, states, matrices, vectors = ([next(own) for _ in group] for group in groups.values())
    given = inputs._replace(A=A[0], states=states, matrices=matrices, vectors=vectors)
    outputs = plain.forward(cell, given) if backend == "truth" else unroll(cell, given, backend)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True))
    loss = loss + 0.0 * A[0].sum()  # a random cell may use nothing that has a gradient
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)  # type: ignore[arg-type]
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    return found | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}


def check(cell: CellDescription, inputs: Inputs, dtype: torch.dtype, backend: str = "cpu") -> None:
    """Compare every tensor; what is small beside the largest gradient is held to that."""
    truth = with_gradients(cell, inputs, "truth")
    got = with_gradients(cell, cast(inputs, dtype), backend)
    assert truth.keys() == got.keys()
    assert {x.dtype for x in got.values()} == {dtype}
    errors = distances(got, truth)
    allowed = dict.fromkeys(errors, TOLERANCE[dtype])
    if any(
        error >= TOLERANCE[dtype] for error in errors.values()
    ):  # sums that cancel: the plain loop is no better
        for name, error in rounding(cell, inputs, dtype).items():
            allowed[name] = max(TOLERANCE[dtype], 4 * error)
    for name, error in errors.items():
        assert error < allowed[name], f"{name}: error {error:.1e}, allowed {allowed[name]:.1e}"


def rounding(cell: CellDescription, inputs: Inputs, dtype: torch.dtype) -> dict[str, float]:
    """How far the plain loop in this type is off, at the worst of several inputs as good as these."""
    worst: dict[str, float] = {}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            x * (1 + 3e-7 * torch.randn(x.shape, generator=generator)) if x.is_floating_point() else x
            for x in inputs.tensors
        ]
        near = cast(cast(Inputs.of(cell, tensors), dtype), torch.float64)
        got = with_gradients(cell, cast(near, dtype), "truth")
        for name, error in distances(got, with_gradients(cell, near, "truth")).items():
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def distances(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors by name."""
    largest = max(x.norm() for name, x in truth.items() if name.startswith("gradient"))
    sizes = {name: torch.maximum(x.norm(), 0.01 * largest).clamp_min(1e-9) for name, x in truth.items()}
    return {name: float((got[name] - x).norm() / sizes[name]) for name, x in truth.items()}


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_cell(seed):
    cell = random_cell(seed)
    check(cell, random_inputs(cell, shape_of(seed), seed), torch.float64 if seed % 10 == 7 else torch.float32)


def test_random_cells_use_every_function_and_every_size():
    """Else a row of the table could be wrong and the cells above would not tell. A function that is no unit may need
    arguments that suit it: a line in `random_cells.FORMS`."""
    cells = [random_cell(seed) for seed in range(COUNT)]
    text = "".join(cell.text for cell in cells)
    assert [name for name in FUNCTIONS if f'"{name}"' not in text] == []
    assert {1, 7, 63, 129} <= {stage.size for cell in cells for stage in cell.stages}


def test_a_random_cell_survives_its_text():
    for seed in range(20):
        cell = random_cell(seed)
        assert from_text(cell.text) == cell


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_known_cell(name, dtype):
    cell = BY_NAME[name]
    check(cell, random_inputs(cell, Shape(T=6, B=11, reset=True), 1), dtype)


@pytest.mark.parametrize("seed", range(300, 312))
def test_a_population_of_a_random_cell(seed):
    """Members of a population have the bits they have alone."""
    cell = random_cell(seed)
    inputs = cast(random_inputs(cell, Shape(B=2, P=3, reset=True), seed), torch.float32)
    assert inputs.reset is not None
    inputs = inputs._replace(reset=torch.stack([inputs.reset, ~inputs.reset, inputs.reset]))
    together = vmap(lambda *x: unroll(cell, Inputs.of(cell, x)))(*inputs.tensors)  # type: ignore[arg-type]
    for p in range(3):
        alone = unroll(cell, inputs.member(p))
        assert all(torch.equal(x[p], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("seed", range(320, 328))
def test_plain_calls_on_a_random_cell(seed, monkeypatch):
    """What serves where llvmlite is missing."""
    from deeprnn.backends import cpu

    monkeypatch.setattr(cpu, "PATH", "plain")
    cell = random_cell(seed)
    check(cell, random_inputs(cell, shape_of(seed), seed), torch.float32)
