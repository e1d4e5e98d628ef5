"""Cases of ⊕ with pooling units and masks, and how what an unroll finds is compared with the reference in float64."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from deeprnn.backends import reference
from deeprnn.backends import stepwise as steps
from deeprnn.model import units


@dataclass(frozen=True)
class Case:
    """One ⊕ and its input. Masks: "" none, "s" one for the sequence, "t" one for every step."""

    units: tuple[str, ...]
    sizes: tuple[int, ...]
    shortcuts: str
    T: int = 5
    B: int = 3
    reset: bool = False
    state_mask: str = ""
    masks: str = ""
    population: int = 0
    shared: bool = False  # masks and reset marks are the same for all members
    z_gradient: bool = True

    def __str__(self) -> str:
        parts = ["+".join(self.units), "S" + self.shortcuts, f"T{self.T}", f"B{self.B}"]
        parts += [f"P{self.population}{'shared' * self.shared}"] * bool(self.population)
        parts += ["reset"] * self.reset + [f"state-{self.state_mask}"] * bool(self.state_mask)
        return "-".join(parts + [f"masks-{self.masks}"] * bool(self.masks))


STAR = Case(("lp:2", "tanh"), (5, 4), "01", reset=True, masks="t")
CASES = [
    STAR,
    Case(("lp:3",), (4,), "0", reset=True, state_mask="s"),
    Case(("lp:1", "maxout:1"), (4, 3), "01"),
    Case(("maxout:2", "sigmoid"), (6, 3), "00", state_mask="t", masks="s"),
    Case(("maxout:3", "lp:2"), (3, 5), "01", reset=True, state_mask="t", masks="t"),
    Case(("tanh", "lp:2", "relu"), (4, 3, 5), "011", reset=True, masks="t"),
    Case(("lp:2", "identity", "maxout:2"), (4, 5, 3), "001", state_mask="s", masks="s"),
    Case(("sigmoid", "lp:3", "tanh"), (4, 3, 5), "010", z_gradient=False, masks="t"),
    Case(("sigmoid", "tanh"), (4, 6), "01", state_mask="s", reset=True),
    Case(("lp:2", "relu"), (5, 4), "01", T=1, B=1, masks="t", state_mask="t", reset=True),
    Case(("lp:2", "tanh"), (5, 4), "01", T=0, masks="t", reset=True),
    Case(("lp:2", "tanh"), (1, 1), "01", T=3, B=1, z_gradient=False),
    dataclasses.replace(STAR, population=3, state_mask="t"),
    dataclasses.replace(STAR, population=2, shared=True, state_mask="s", masks="s"),
    Case(
        ("maxout:2", "lp:3", "sigmoid"),
        (3, 4, 5),
        "001",
        reset=True,
        population=2,
        masks="t",
        z_gradient=False,
    ),
]


def draw(case: Case, seed: int) -> dict[str, Tensor]:
    """Fresh inputs in float64; masks hold zeros, reset marks some rows, also at the first step."""
    print(f"seed {seed}")  # shown where a test fails
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def own(shared: bool) -> tuple[int, ...]:
        return () if shared or not case.population else (case.population,)

    P, H = own(False), case.sizes[-1]
    specs = [units.UnitSpec.parse(u) for u in case.units]
    widths = [n * u.pool for n, u in zip(case.sizes, specs, strict=True)]
    given = {"A": normal(*P, case.T, case.B, sum(widths)), "h0": normal(*P, case.B, H)}
    for l, (width, unit, below) in enumerate(zip(widths, specs, (H, *case.sizes), strict=False)):
        given[f"W{l}"] = normal(*P, width, below) / below**0.5
        if case.shortcuts[l] == "1":
            given[f"S{l}"] = normal(*P, width, H) / H**0.5
        if unit.name == "lp":
            given[f"rho{l}"], given[f"c{l}"] = normal(*P, case.sizes[l]), 0.3 * normal(*P, width)
    shared = own(case.shared)

    def mask(kind: str, n: int) -> Tensor:
        steps = (case.T,) if kind == "t" else ()
        return (torch.rand(*shared, *steps, case.B, n, generator=g) < 0.7).double() / 0.7

    if case.state_mask:
        given["state_mask"] = mask(case.state_mask, H)
    for l, n in enumerate(case.sizes if case.masks else ()):
        if l != 1 or len(case.sizes) == 2:  # of three layers the middle one stays without
            given[f"mask{l}"] = mask(case.masks, n)
    if case.reset:
        given["reset"] = torch.rand(*shared, case.T, case.B, generator=g) < 0.3
    given["dh"] = normal(*P, case.T, case.B, H)
    given["dz"] = normal(*P, case.T, case.B, sum(case.sizes) - H)
    return given


LEARNED = ("A", "h0", "W", "S", "rho", "c")


def differs(name: str) -> bool:
    return name.rstrip("0123456789") in LEARNED


def call(function, case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One model's unroll by a function that takes the arguments of `backends.unroll_with`."""
    layers = range(len(case.units))
    W = [given[f"W{l}"] for l in layers]
    S, rho, c, masks = ([given.get(f"{n}{l}") for l in layers] for n in ("S", "rho", "c", "mask"))
    named = [(u, rho[l], c[l]) for l, u in enumerate(case.units)]
    phis = [units.resolve(units.UnitSpec.parse(u), r, k) for u, r, k in named]
    rest = (phis, [w.shape[-2] for w in W], given.get("reset"), given.get("state_mask"), masks)
    return function(given["A"], given["h0"], W, S, *rest, named=named)


def plain(*args, named):
    return reference.unroll_with(*args)


def fused(*args, named):
    A, h0, W, S, _, _, *rest = args
    return steps.unroll_with(A, h0, W, S, named, *rest)


def results(function, case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """h, z and the gradient of everything that learns; a population goes through vmap."""
    given = {n: x.clone().requires_grad_(differs(n)) for n, x in given.items()}
    if case.population:
        alike = ("reset", "state_mask", *(n for n in given if n.startswith("mask"))) if case.shared else ()
        dims = {n: None if n in alike else 0 for n in given}
        h, z = torch.func.vmap(lambda own: call(function, case, own), in_dims=(dims,))(given)
    else:
        h, z = call(function, case, given)
    loss = (h * given["dh"]).sum()
    if case.z_gradient and z.shape[-1]:
        loss = loss + (z * given["dz"]).sum()
    names = [n for n in given if differs(n)]
    grads = torch.autograd.grad(loss, [given[n] for n in names], allow_unused=True)
    filled = [torch.zeros_like(given[n]) if d is None else d for n, d in zip(names, grads, strict=True)]
    return {"h": h.detach(), "z": z.detach(), **dict(zip(names, filled, strict=True))}


def off(x: Tensor, known: Tensor) -> float:
    """Where terms cancel, errors are those of the terms, which are of the order of 1 here."""
    scale = max(float(known.norm()), 0.3 * known.numel() ** 0.5)
    return float((x.double().cpu() - known).norm()) / scale if known.numel() else 0.0


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == truth.keys()
    for name, known in truth.items():
        x = found[name]
        assert x.shape == known.shape, name
        assert torch.isfinite(x).all(), f"{name} is not finite"
        assert off(x, known) < tolerance, f"{name} is off by {off(x, known):.1e}"


def compare_floats(case: Case, given: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """To 2e-5, or to four times what the reference loses in float32: once in 600 draws a pool is that unlucky."""
    truth, alike = members(case, given), members(case, floats(given))
    worst = max(off(alike[name], known) for name, known in truth.items())
    compare(found, truth, max(2e-5, 4 * worst))


def members(case: Case, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The truth for a population: each member alone, by the reference."""
    if not case.population:
        return results(plain, case, given)
    alone = dataclasses.replace(case, population=0)
    shared = ("mask", "state_mask", "reset") if case.shared else ()
    each = [
        results(plain, alone, {n: x if n.startswith(shared or ("-",)) else x[p] for n, x in given.items()})
        for p in range(case.population)
    ]
    return {name: torch.stack([m[name] for m in each]) for name in each[0]}


def floats(given: dict[str, Tensor], device: str = "cpu") -> dict[str, Tensor]:
    return {n: x.to(device) if x.dtype == torch.bool else x.float().to(device) for n, x in given.items()}


def edge(function, a: Tensor, unit: str) -> tuple[Tensor, Tensor]:
    a = a.clone().requires_grad_()
    rho = torch.zeros(a.shape[-1] // 2, dtype=a.dtype, requires_grad=True)
    named = [
        (unit, *((rho, torch.zeros(a.shape[-1], dtype=a.dtype)) if unit.startswith("lp") else (None, None)))
    ]
    phis = [units.resolve(units.UnitSpec.parse(unit), *named[0][1:])]
    H = a.shape[-1] // 2
    W = [torch.zeros(a.shape[-1], H, dtype=a.dtype)]
    h, _ = function(a, torch.zeros(a.shape[1], H, dtype=a.dtype), W, [None], phis, [a.shape[-1]], named=named)
    h.nan_to_num().sum().backward()
    assert a.grad is not None
    return h.detach(), a.grad


def compare_edges(unit: str) -> None:
    """A pool at its centres, equal entries, powers that would overflow, zeros beside numbers, NaN."""
    pools = [
        [0.0, 0.0],
        [1.5, 1.5],
        [-2.0, 2.0],
        [1e30, 1e29],
        [1e-30, 3e-30],
        [0.0, 3.0],
        [float("nan"), 0.0],
    ]
    a = torch.tensor(pools).flatten().expand(1, 2, -1)
    h, grad = edge(fused, a, unit)
    known, truth = edge(plain, a.double(), unit)
    torch.testing.assert_close(h.double(), known, equal_nan=True, rtol=1e-5, atol=0)
    usable = torch.isfinite(truth)
    torch.testing.assert_close(grad.double()[usable], truth[usable], rtol=1e-5, atol=1e-7)
