"""The one grid every backend passes: outputs, final state and every gradient against `reference` in float64.

`examine` runs an unroll function on one case and raises `Rejected` with the reason when it is wrong. It
knows nothing of the backend, so the same grid serves CPU and CUDA, and broken ones made to be caught.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deeprnn.backends import TransitionSpec, reference

Unroll = Callable[..., tuple[Tensor, Tensor]]
Tensors = dict[str, Tensor]
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12, "bf16": 1e-2}
KINK = 2e-5  # a relu this close to zero may fall on either side of it in fp32


class Rejected(AssertionError):
    """The backend is wrong on a case; the message says where."""


@dataclass(frozen=True)
class Case:
    """One point of the grid. `population` 0 means no population dimension."""

    sizes: tuple[int, ...]
    units: tuple[str, ...]
    shortcuts: tuple[bool, ...]
    T: int
    B: int
    precision: str = "fp32"
    reset: bool = False
    population: int = 0
    z_gradient: bool = True
    strided: bool = False

    @property
    def spec(self) -> TransitionSpec:
        return TransitionSpec(self.sizes, self.units, self.shortcuts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.sizes)), "+".join(self.units)]
        parts += [
            "S" + "".join(str(int(s)) for s in self.shortcuts),
            f"T{self.T}",
            f"B{self.B}",
            self.precision,
        ]
        parts += [name for name in ("reset", "strided") if getattr(self, name)]
        parts += [f"P{self.population}"] if self.population else []
        return "-".join(parts + ([] if self.z_gradient else ["h-only"]))


STRUCTURES = [
    (1, "none"),
    (2, "none"),
    (2, "last"),
    (3, "none"),
    (3, "last"),
    (3, "all"),
]
UNITS = ["sigmoid", "tanh", "relu", "identity", "mixed"]
MIXED = ("tanh", "relu", "sigmoid")
WIDTHS = [(63, 100, 63), (1, 63, 1), (385, 63, 100), (100, 385, 385), (16, 48, 64), (63, 1, 100)]
SHAPES = [(7, 3), (1, 1), (7, 1), (1, 3), (7, 9)]


def shortcut_flags(depth: int, shortcut: str) -> tuple[bool, ...]:
    """Which layers see h(t-1) directly, by the name used in model specs."""
    return tuple(
        l > 0 and (shortcut == "all" or (shortcut == "last" and l == depth - 1)) for l in range(depth)
    )


def cases(precisions: tuple[str, ...] = ("fp32", "fp64")) -> list[Case]:
    """Structure x unit x precision x reset x population; sizes and shapes rotate through all of it."""
    widths, shapes = itertools.cycle(WIDTHS), itertools.cycle(SHAPES)
    marks = [(False, 0), (True, 0), (False, 3), (True, 3)]
    grid = []
    for (depth, shortcut), unit, precision, (reset, population) in itertools.product(
        STRUCTURES, UNITS, precisions, marks
    ):
        units = MIXED[:depth] if unit == "mixed" else (unit,) * depth
        T, B = next(shapes)
        count = len(grid)
        grid.append(
            Case(
                next(widths)[:depth],
                units,
                shortcut_flags(depth, shortcut),
                T,
                B,
                precision,
                reset,
                population,
                z_gradient=count % 3 != 0,
                strided=count % 7 == 3,
            )
        )
        if count % len(WIDTHS) == 0:
            next(widths)  # so that widths do not march in step with the other axes
    return grid


def large_cases(precision: str = "fp32") -> list[Case]:
    """The paper's sizes, and batches that are split over rows, columns and threads."""
    sigmoid, shortcut = ("sigmoid", "sigmoid"), (False, True)
    return [
        Case((400, 400), sigmoid, shortcut, T, B, precision, reset=B == 16)
        for T, B in [(40, 1), (25, 2), (20, 16), (9, 64), (5, 33)]
    ] + [
        Case((600,), ("sigmoid",), (False,), 30, 1, precision),
        Case((200,), ("tanh",), (False,), 12, 5, precision, population=4),
        Case((400, 385, 63), ("tanh", "relu", "sigmoid"), (False, True, True), 11, 17, precision, reset=True),
    ]


def fresh_seed() -> int:
    """New inputs every run; a failure names its seed."""
    return secrets.randbits(31)


def draw(case: Case, seed: int) -> Tensors:
    """Random inputs in float64 (the population first where there is one) and the gradients fed back."""
    for attempt in range(50):
        tensors = _draw(case, seed + attempt)
        if not any(u == "relu" for u in case.units) or _clear_of_kinks(case, tensors):
            return tensors
    raise RuntimeError(f"no inputs clear of relu's kink for {case}, seed {seed}")


def _draw(case: Case, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    lead = (case.population,) if case.population else ()

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        # Rounded to float32: every precision then sees the same numbers.
        x = torch.randn(*lead, *shape, generator=generator) * scale
        return (x.bfloat16() if case.precision == "bf16" else x).double()

    T, B, H, total = case.T, case.B, case.sizes[-1], sum(case.sizes)
    tensors = {"A": normal(T, B, total), "h0": normal(B, H)}
    below = H
    for l, size in enumerate(case.sizes):
        tensors[f"W{l + 1}"] = normal(size, below, scale=0.7 / below**0.5)
        below = size
    for l, size in enumerate(case.sizes):
        if case.shortcuts[l]:
            tensors[f"S{l + 1}"] = normal(size, H, scale=0.7 / H**0.5)
    tensors["dh"], tensors["dz"] = normal(T, B, H), normal(T, B, total - H)
    if case.reset:
        tensors["reset"] = torch.rand(T, B, generator=generator) < 0.35
        if T * B > 1:  # a first state that counts and a mark that does: without them faults could hide
            tensors["reset"][0, 0], tensors["reset"][-1, -1] = False, True
    return tensors


def _clear_of_kinks(case: Case, tensors: Tensors) -> bool:
    """Whether no relu's input is so near zero that rounding decides its slope."""
    for member in range(max(1, case.population)):
        inputs = _member(case, tensors, member)
        h, z = reference.unroll(inputs["A"], inputs["h0"], *_weights(inputs), case.spec, inputs.get("reset"))
        previous = torch.cat([inputs["h0"][None], h[:-1]])
        if case.reset:
            previous = previous.masked_fill(inputs["reset"][..., None], 0)
        below = [previous, *z.split(list(case.sizes[:-1]), -1)]
        for l, a in enumerate(inputs["A"].split(list(case.sizes), -1)):
            if case.units[l] == "relu":
                a = a + below[l] @ inputs[f"W{l + 1}"].T
                a = a + previous @ inputs[f"S{l + 1}"].T if case.shortcuts[l] else a
                if a.abs().min() < KINK:
                    return False
    return True


def _member(case: Case, tensors: Tensors, member: int) -> Tensors:
    if not case.population:
        return tensors
    return {name: x if name == "reset" else x[member] for name, x in tensors.items()}


def _weights(tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    return [x for n, x in tensors.items() if n[0] == "W"], [x for n, x in tensors.items() if n[0] == "S"]


def expected(case: Case, tensors: Tensors) -> Tensors:
    """Outputs and gradients by the reference in float64, member by member."""
    results = []
    for member in range(max(1, case.population)):
        inputs = _member(case, tensors, member)
        leaves = {n: x.clone().requires_grad_(n[0] in "AhWS") for n, x in inputs.items() if n[0] in "AhWSr"}
        h, z = reference.unroll(leaves["A"], leaves["h0"], *_weights(leaves), case.spec, leaves.get("reset"))
        results.append(_collect(case, h, z, inputs, leaves))
    if not case.population:
        return results[0]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def _collect(case: Case, h: Tensor, z: Tensor, inputs: Tensors, leaves: Tensors) -> Tensors:
    loss = (h * inputs["dh"]).sum()
    if case.z_gradient:
        loss = loss + (z * inputs["dz"]).sum()
    names = [name for name, x in leaves.items() if x.requires_grad]
    gradients = torch.autograd.grad(loss, [leaves[name] for name in names])
    named = {f"d{name}": g for name, g in zip(names, gradients, strict=True)}
    return {"h": h.detach(), "z": z.detach(), "last": h.detach()[..., -1, :, :], **named}


def compute(unroll: Unroll, case: Case, tensors: Tensors, device: str) -> tuple[Tensors, Tensors]:
    """Outputs and gradients by the backend under test, and the inputs it was given."""
    given = {
        n: x.to(device=device, dtype=torch.bool if n == "reset" else case.dtype) for n, x in tensors.items()
    }
    if case.strided:
        given = {n: x if n == "reset" else x.mT.contiguous().mT for n, x in given.items()}
    leaves = {n: x.clone().requires_grad_(n[0] in "AhWS") for n, x in given.items() if n[0] in "AhWSr"}
    W, S = _weights(leaves)
    precision = "bf16" if case.precision == "bf16" else "fp32"

    def one(A: Tensor, h0: Tensor, W: list[Tensor], S: list[Tensor]) -> tuple[Tensor, Tensor]:
        return unroll(A, h0, W, S, case.spec, leaves.get("reset"), precision)

    run = torch.func.vmap(one) if case.population else one
    h, z = run(leaves["A"], leaves["h0"], W, S)
    return _collect(case, h, z, given, leaves), {n: leaves[n] for n in leaves}


@contextlib.contextmanager
def poisoned(device: str) -> Iterator[None]:
    """Uninitialised memory holds NaN: from torch.empty by its debugging switch, and in freed blocks."""
    scrap = [
        torch.full((n,), float("nan"), device=device)
        for n in (64, 1024, 4096, 65536, 2**20)
        for _ in range(4)
    ]
    del scrap
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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

    def plain(A: Tensor, h0: Tensor, W: list, S: list, spec: TransitionSpec, reset: Tensor | None, _: str):
        return reference.unroll(A, h0, W, S, spec, reset)

    worst = 0.0
    for _ in range(4):
        near = {
            n: x if n == "reset" else (x * (1 + 3e-7 * torch.randn_like(x))).float().double()
            for n, x in tensors.items()
        }
        found, _ = compute(plain, case, near, "cpu")
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


def with_precision(grid: list[Case], precision: str) -> list[Case]:
    """The same cases in another precision."""
    return [dataclasses.replace(case, precision=precision) for case in grid]
