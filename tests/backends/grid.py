"""The one grid every backend passes: outputs and every gradient of any cell against plain code in float64.

`examine` runs an unroll function on one case and raises `Rejected` with the reason when it is wrong. It knows nothing
of the backend, so the same grid serves CPU and CUDA, and broken ones made to be caught.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Inputs
from deeprnn.cells import functions
from deeprnn.cells.deep_transition import DeepTransition
from deeprnn.cells.description import CellDescription
from deeprnn.cells.expressions import in_order, leaves_of

Unroll = Callable[[CellDescription, Inputs, str], Sequence[Tensor]]
Tensors = dict[str, Tensor]
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12, "bf16": 1e-2}
KINKED = (
    *("relu", "maximum", "minimum", "absolute", "sign", "step", "equal", "greater", "select", "lp"),
    *("floor", "round", "fmod", "remainder"),
)
"""functions whose value or slope jumps: near the jump rounding decides on which side a number falls"""


class Rejected(AssertionError):
    """The backend is wrong on a case; the message says where."""


@dataclass(frozen=True)
class Case:
    """One point of the grid. `population` 0 means no population dimension."""

    name: str
    cell: CellDescription
    T: int
    B: int
    precision: str = "fp32"
    reset: bool = False
    population: int = 0
    state_gradient_only: bool = False
    """whether a gradient comes from the first state's sequence alone"""
    strided: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def __str__(self) -> str:
        parts = [self.name, f"T{self.T}", f"B{self.B}", self.precision]
        parts += [name for name in ("reset", "strided") if getattr(self, name)]
        parts += [f"P{self.population}"] if self.population else []
        return "-".join(parts + (["state-only"] if self.state_gradient_only else []))


STRUCTURES = [(1, "none"), (2, "none"), (2, "last"), (3, "none"), (3, "last"), (3, "all")]
UNITS = [*functions.UNITS, "mixed"]
MIXED = ("tanh", "relu", "sigmoid")
WIDTHS = [(63, 100, 63), (1, 63, 1), (385, 63, 100), (100, 385, 385), (16, 48, 64), (63, 1, 100)]
SHAPES = [(7, 3), (1, 1), (7, 1), (1, 3), (7, 9)]
MARKS = [(False, 0), (True, 0), (False, 3), (True, 3)]


def shortcut_flags(depth: int, shortcut: str) -> tuple[bool, ...]:
    """Which layers see h(t-1) directly, by the name used in model specs."""
    return tuple(
        l > 0 and (shortcut == "all" or (shortcut == "last" and l == depth - 1)) for l in range(depth)
    )


def transition(sizes: Sequence[int], units: Sequence[str], shortcut: str = "all") -> CellDescription:
    """The paper's ⊕."""
    return DeepTransition(tuple(sizes), tuple(units), shortcut_flags(len(sizes), shortcut)).cell


def cases(precisions: tuple[str, ...] = ("fp32", "fp64")) -> list[Case]:
    """⊕ in structure x unit x precision x reset x population; sizes and shapes rotate through all of it."""
    widths, shapes = itertools.cycle(WIDTHS), itertools.cycle(SHAPES)
    grid: list[Case] = []
    for (depth, shortcut), unit, precision, marks in itertools.product(STRUCTURES, UNITS, precisions, MARKS):
        units = MIXED[:depth] if unit == "mixed" else (unit,) * depth
        sizes, count = next(widths)[:depth], len(grid)
        name = f"{'x'.join(map(str, sizes))}-{unit}-{shortcut}"
        rest = {"state_gradient_only": count % 3 == 0, "strided": count % 7 == 3}
        cell = transition(sizes, units, shortcut)
        grid.append(Case(name, cell, *next(shapes), precision, *marks, **rest))
        if count % len(WIDTHS) == 0:
            next(widths)  # so that widths do not march in step with the other axes
    return grid


def cases_of(cells: dict[str, CellDescription], precisions: tuple[str, ...] = ("fp32",)) -> list[Case]:
    """Every cell with and without marks and population; shapes rotate."""
    shapes, grid = itertools.cycle(SHAPES), []
    for (name, cell), precision, marks in itertools.product(cells.items(), precisions, MARKS):
        count = len(grid)
        rest = {"state_gradient_only": count % 3 == 1, "strided": count % 5 == 3}
        grid.append(Case(name, cell, *next(shapes), precision, *marks, **rest))
    return grid


def large_cases(precision: str = "fp32") -> list[Case]:
    """The paper's sizes, and batches that are split over rows, columns and threads."""
    dts = transition((400, 400), ("sigmoid", "sigmoid"), "last")
    shapes = [(40, 1), (25, 2), (20, 16), (9, 64), (5, 33)]
    return [Case("400x400", dts, T, B, precision, reset=B == 16) for T, B in shapes] + [
        Case("600", transition((600,), ("sigmoid",)), 30, 1, precision),
        Case("200", transition((200,), ("tanh",)), 12, 5, precision, population=4),
        Case("400x385x63", transition((400, 385, 63), ("tanh", "relu", "sigmoid")), 11, 17, precision, reset=True),
    ]  # fmt: skip


def fresh_seed() -> int:
    """New inputs every run; a failure names its seed."""
    return secrets.randbits(31)


def draw(case: Case, seed: int) -> Tensors:
    """Random inputs in float64 (the population first where there is one) and the gradients fed back."""
    for attempt in range(50):
        tensors = _draw(case, seed + attempt)
        if _is_smooth(case, tensors):
            return tensors
    raise RuntimeError(f"no inputs clear of a jump in a slope for {case}, seed {seed}")


def _draw(case: Case, seed: int) -> Tensors:
    generator, cell = torch.Generator().manual_seed(seed), case.cell
    lead, T, B = (case.population,) if case.population else (), case.T, case.B

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        # Rounded to float32: every precision then sees the same numbers.
        x = torch.randn(*lead, *shape, generator=generator) * scale
        return (x.bfloat16() if case.precision == "bf16" else x).double()

    tensors = {"A": normal(T, B, cell.entry_width)}
    tensors |= {f"state{i}": normal(B, n) for i, n in enumerate(cell.states)}
    tensors |= {
        f"matrix{i}": normal(*shape, scale=0.7 / shape[1] ** 0.5) for i, shape in enumerate(cell.matrices)
    }
    for i in _matrices_below_roots(cell):
        tensors[f"matrix{i}"] = tensors[f"matrix{i}"].abs()
    # Between 0.2 and 1.2, or above 1 where they are exponents of Lp units.
    least = 1.2 if _uses(cell, "lp") else 0.2
    tensors |= {
        f"vector{i}": (least + torch.rand(*lead, n, generator=generator)).double()
        for i, n in enumerate(cell.vectors)
    }
    for i, n in enumerate(cell.masks):  # every other one of the whole sequence
        shape = (T, B, n) if i % 2 == 0 else (B, n)
        tensors[f"mask{i}"] = (torch.rand(*lead, *shape, generator=generator) < 0.7).double() * 1.5
    tensors |= {f"gradient{k}": normal(T, B, cell.stages[o.stage].size) for k, o in enumerate(cell.outputs)}
    if case.reset:
        tensors["reset"] = torch.rand(T, B, generator=generator) < 0.35
        if T * B > 1:  # a first state that counts and a mark that does: without them faults could hide
            tensors["reset"][0, 0], tensors["reset"][-1, -1] = False, True
    return tensors


def _matrices_below_roots(cell: CellDescription) -> set[int]:
    """Matrices with which sums are made that a root is taken of, such as variances: none may be negative."""
    below = set()
    for stage in cell.stages:
        roots = [node for node in in_order(stage.outputs) if node.op == "sqrt"]
        for node in leaves_of(roots, "preactivation"):
            below |= {p.matrix for p in stage.preactivations[node.value[0]].products}
    return below


def _uses(cell: CellDescription, *functions: str) -> bool:
    return any(node.op in functions for node in in_order([e for s in cell.stages for e in s.outputs]))


def _is_smooth(case: Case, tensors: Tensors) -> bool:
    """Whether gradients barely change with the inputs' last digits: no number lies at a jump of its slope."""
    if not _uses(case.cell, *KINKED):
        return True
    generator = torch.Generator().manual_seed(0)
    near = {
        name: x * (1 + 2e-6 * torch.randn(x.shape, generator=generator)) if x.is_floating_point() else x
        for name, x in tensors.items()
    }
    here, there = expected(case, tensors), expected(case, near)
    return all(_distance(here[name], there[name]) < 1e-4 for name in here)


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if a.numel() else 0.0


def _member(case: Case, tensors: Tensors, member: int) -> Tensors:
    if not case.population:
        return tensors
    return {name: x if name == "reset" else x[member] for name, x in tensors.items()}


def inputs_of(cell: CellDescription, tensors: Tensors) -> Inputs:
    """The tensors as a backend takes them."""

    def group(kind: str, count: int) -> list[Tensor]:
        return [tensors[f"{kind}{i}"] for i in range(count)]

    return Inputs(
        tensors["A"],
        group("state", len(cell.states)),
        group("matrix", len(cell.matrices)),
        group("vector", len(cell.vectors)),
        group("mask", len(cell.masks)),
        tensors.get("reset"),
    )


def _leaves(tensors: Tensors) -> Tensors:
    wanted = ("A", "state", "matrix", "vector")
    kept = {n: x for n, x in tensors.items() if not n.startswith("gradient")}
    return {n: x.clone().requires_grad_(n.startswith(wanted)) for n, x in kept.items()}


def expected(case: Case, tensors: Tensors) -> Tensors:
    """Outputs and gradients by plain code in float64, member by member."""
    results = []
    for member in range(max(1, case.population)):
        own = _member(case, tensors, member)
        leaves = _leaves(own)
        outputs = plain.forward(case.cell, inputs_of(case.cell, leaves))
        results.append(_collect(case, outputs, own, leaves))
    if not case.population:
        return results[0]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def _collect(case: Case, outputs: Sequence[Tensor], given: Tensors, leaves: Tensors) -> Tensors:
    state = case.cell.outputs.index(case.cell.new_states[0])
    places = [state] if case.state_gradient_only else range(len(outputs))
    loss = sum((outputs[k] * given[f"gradient{k}"]).sum() for k in places)
    names = [name for name, x in leaves.items() if x.requires_grad]
    found = torch.autograd.grad(loss, [leaves[name] for name in names], materialize_grads=True)  # type: ignore[arg-type]
    named = {f"d {name}": g for name, g in zip(names, found, strict=True)}
    return {**{f"output {k}": x.detach() for k, x in enumerate(outputs)}, **named}


def compute(unroll: Unroll, case: Case, tensors: Tensors, device: str) -> tuple[Tensors, Tensors]:
    """Outputs and gradients by the backend under test, and the inputs it was given."""
    given = {
        n: x.to(device=device, dtype=torch.bool if n == "reset" else case.dtype) for n, x in tensors.items()
    }
    if case.strided:
        plain_ones = ("reset", "vector")
        given = {n: x if n.startswith(plain_ones) else x.mT.contiguous().mT for n, x in given.items()}
    leaves = _leaves(given)
    precision = "bf16" if case.precision == "bf16" else "fp32"
    inputs = inputs_of(case.cell, leaves)
    marks = inputs.reset

    def one(A: Tensor, *groups: list[Tensor]) -> list[Tensor]:
        return list(unroll(case.cell, Inputs(A, *groups, reset=marks), precision))

    run = torch.func.vmap(one) if case.population else one
    assert inputs.A is not None
    outputs = run(inputs.A, inputs.states, inputs.matrices, inputs.vectors, inputs.masks)
    return _collect(case, outputs, given, leaves), leaves


@contextlib.contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Uninitialised memory holds NaN: from torch.empty by its debugging switch, and in freed blocks."""
    sizes = (64, 1024, 4096, 65536, 2**20)
    scrap = [torch.full((n,), float("nan"), device=device) for n in sizes for _ in range(4)]
    del scrap
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def examine(unroll: Unroll, case: Case, device: str = "cpu", seed: int | None = None) -> dict[str, float]:
    """Relative errors ‖out - ref‖ / ‖ref‖ by name; `Rejected` where one is too large or memory was misused."""
    seed = fresh_seed() if seed is None else seed
    where = f"{case} on {device}, seed {seed}"
    tensors, others = draw(case, seed), draw(case, seed + 1000)
    truth = expected(case, tensors)
    with poisoned(device):
        earlier, _ = compute(unroll, case, others, device)
        kept = {name: x.clone() for name, x in earlier.items()}
        result, given = compute(unroll, case, tensors, device)
    for name, x in kept.items():
        if not torch.equal(x, earlier[name]):
            raise Rejected(f"{name} of an earlier call was overwritten: {where}")
    for name, x in given.items():
        if not torch.equal(x.detach().double().cpu(), tensors[name].double()):
            raise Rejected(f"the input {name} was changed: {where}")
    errors = {name: _error(result[name], truth[name], f"{name}: {where}") for name in truth}
    worst = max(errors, key=lambda name: errors[name])
    allowed = TOLERANCE[case.precision]
    if errors[worst] > allowed and case.precision == "fp32":  # sums that cancel, units that are saturated
        allowed = max(allowed, 4 * rounding(case, tensors, worst))
    if errors[worst] > allowed:
        raise Rejected(f"{worst} is off by {errors[worst]:.1e}, allowed {allowed:.0e}: {where}")
    return errors


def rounding(case: Case, tensors: Tensors, name: str) -> float:
    """How far float32 itself is off, at inputs as good as these: the largest error of the plain loop of several."""
    worst = 0.0
    for _ in range(4):
        near = {
            n: (x * (1 + 3e-7 * torch.randn_like(x))).float().double() if x.is_floating_point() else x
            for n, x in tensors.items()
        }
        found, _ = compute(lambda cell, inputs, _: plain.forward(cell, inputs), case, near, "cpu")
        worst = max(worst, _error(found[name], expected(case, near)[name], f"{name}, the plain loop, {case}"))
    return worst


def _error(out: Tensor, truth: Tensor, where: str) -> float:
    if out.shape != truth.shape:
        raise Rejected(f"shape {tuple(out.shape)}, expected {tuple(truth.shape)}: {where}")
    if not torch.isfinite(out).all():
        raise Rejected(
            f"{int((~torch.isfinite(out)).sum())} elements were never written or are not finite: {where}"
        )
    difference = float((out.detach().double().cpu() - truth).norm())
    norm = float(truth.norm())
    if truth.numel() <= 4:  # a lone sum may cancel by chance: then measure against numbers of order one
        norm = max(norm, 0.3)
    return difference / norm if norm > 0 else difference
