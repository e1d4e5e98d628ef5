"""Torch's element-wise operations as expressions: values and slopes at kinks, zeros, infinities and NaN are torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deeprnn.backends.call import Inputs
from deeprnn.backends.unrolling import unroll
from deeprnn.cells.description import CellDescription, Output, Preactivation, Rows, Stage
from deeprnn.cells.expressions import leaf
from deeprnn.cells.functions import FUNCTIONS
from deeprnn.cells.tracing.elementwise import EXPRESSIONS

MAGNITUDES = (0.0, 1e-30, 1e-3, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 50.0, 800.0, 1e30, math.inf)
PLACES = [*(-x for x in MAGNITUDES), *MAGNITUDES, math.nan]


def _elsewhere(*_: Tensor) -> Tensor | bool:
    return True


def _not_equal_infinities(a: Tensor, b: Tensor) -> Tensor:
    """Torch's slope there is NaN."""
    return ~((a == b) & a.isinf())


def _logarithm_counts(a: Tensor, b: Tensor) -> Tensor:
    """At a = 0 torch's slope is NaN for b = 0; a logarithm of ∞ times 0 is NaN here."""
    return ~((a == 0) & ((b == 0) | b.isinf()))


def _moderate(a: Tensor, b: Tensor) -> Tensor:
    """Torch's vectors lose remainders of quotients that their type cannot hold; slopes at ∞ are its own."""
    return ~(((a / b).abs() > 2.0**23) & b.ne(0) & a.isfinite()) & ~b.isinf()


ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "erf": torch.erf, "erfc": torch.erfc, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc,
    "round": torch.round, "frac": torch.frac, "log10": torch.log10, "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg, "sinc": torch.sinc, "logit": torch.logit,
}  # fmt: skip
TWO: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Tensor | bool]]] = {
    "atan2": (torch.atan2, _elsewhere),
    "hypot": (torch.hypot, _elsewhere),
    "fmod": (torch.fmod, _moderate),
    "remainder": (torch.remainder, _moderate),
    "logaddexp": (torch.logaddexp, _not_equal_infinities),
    "xlogy": (torch.xlogy, _logarithm_counts),
    "fmax": (torch.fmax, _elsewhere),
    "fmin": (torch.fmin, _elsewhere),
}
WITH_OPTIONS: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    *[("remainder", torch.remainder, (b,), {}) for b in (2.0, -1.5)],
    *[("fmod", torch.fmod, (b,), {}) for b in (2.0, -1.5)],
    *[("div", torch.div, (b,), {"rounding_mode": m}) for b in (2.0, -1.5) for m in ("floor", "trunc")],
    *[("round", torch.round, (), {"decimals": d}) for d in (2, -1)],
    ("logit", torch.logit, (0.25,), {}),
]


def cell_of(expression: Callable[..., Any], count: int, size: int) -> CellDescription:
    """An expression of as many entries as it has arguments."""
    entries = tuple(Preactivation((), Rows(i * size)) for i in range(count))
    out = expression(*(leaf("preactivation", i) for i in range(count)))
    return CellDescription((size,), (Stage(size, entries, (out,)),), (Output(0, 0),), (), count * size)


def compare(
    expression: Callable[..., Any],
    function: Callable[..., Tensor],
    columns: Tensor,
    counts: Callable[..., Any] = _elsewhere,
) -> None:
    """Values and slopes by the CPU's backend against torch's; where a value is NaN its slope means nothing."""
    count, size = columns.shape
    A = columns.reshape(1, 1, -1).clone().requires_grad_()
    inputs = Inputs(A, [columns.new_zeros(1, size)], [], [], [])
    (out,) = unroll(cell_of(expression, count, size), inputs, "cpu")
    (slopes,) = torch.autograd.grad(out.sum(), A)
    given = [column.clone().requires_grad_() for column in columns]
    truth = function(*given)
    own = torch.autograd.grad(truth.sum(), given, materialize_grads=True)
    holds = torch.as_tensor(counts(*columns)).expand(size)
    torch.testing.assert_close(
        out.view(-1)[holds], truth.detach()[holds], rtol=5e-6, atol=1e-7, equal_nan=True
    )
    holds = holds & ~truth.detach().isnan()
    for found, want in zip(slopes.view(count, size), own, strict=True):
        torch.testing.assert_close(found[holds], want[holds], rtol=5e-5, atol=2e-4, equal_nan=True)


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


@BOTH
@pytest.mark.parametrize("name", ONE)
def test_one_number(name, dtype):
    places = torch.tensor(
        [x for x in PLACES if name != "logit" or x != 0.0], dtype=dtype
    )  # signs of zero differ
    compare(EXPRESSIONS[name], ONE[name], places[None])


@BOTH
@pytest.mark.parametrize("name", TWO)
def test_two_numbers(name, dtype):
    pairs = torch.cartesian_prod(*[torch.tensor(PLACES, dtype=dtype)] * 2)
    compare(EXPRESSIONS[name], TWO[name][0], pairs.t().contiguous(), TWO[name][1])


@BOTH
@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_a_quotient_that_is_rounded(mode, dtype):
    pairs = torch.cartesian_prod(*[torch.tensor(PLACES, dtype=dtype)] * 2).t().contiguous()
    compare(
        lambda a, b: EXPRESSIONS["div"](a, b, rounding_mode=mode),
        lambda a, b: torch.div(a, b, rounding_mode=mode),
        pairs,
        _moderate,
    )


@BOTH
@pytest.mark.parametrize("case", WITH_OPTIONS, ids=lambda case: f"{case[0]}{case[2]}{case[3]}")
def test_numbers_and_options(case, dtype):
    name, function, rest, options = case
    compare(
        lambda a: EXPRESSIONS[name](a, *rest, **options),
        lambda a: function(a, *rest, **options),
        torch.tensor(PLACES, dtype=dtype)[None],
    )


@BOTH
def test_gelu_by_the_error_function(dtype):
    """Torch's vectors give NaN at ∞ in one type and not in the other."""
    compare(EXPRESSIONS["gelu"], F.gelu, torch.tensor(PLACES, dtype=dtype)[None], lambda a: ~a.isinf())


SMOOTH: dict[str, Callable[..., Tensor]] = {
    name: function for name, function in ONE.items() if name != "acosh"
} | {"gelu": F.gelu}


@pytest.mark.parametrize("name", [*SMOOTH, *TWO])
def test_slopes_of_slopes(name):
    """Of numbers between 0.05 and 0.95, which every function takes."""
    function: Callable[..., Tensor] = SMOOTH.get(name) or TWO[name][0]
    count = 1 if name in SMOOTH else 2
    generator = torch.Generator().manual_seed(0)
    x = 0.05 + 0.9 * torch.rand(count, 40, generator=generator, dtype=torch.float64)

    def second(apply: Callable[[Tensor], Tensor]) -> Tensor:
        leaves = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(apply(leaves).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad((first * leaves).sum(), leaves)[0]

    def unrolled(leaves: Tensor) -> Tensor:
        inputs = Inputs(leaves.reshape(1, 1, -1), [x.new_zeros(1, 40)], [], [], [])
        return unroll(cell_of(EXPRESSIONS[name], count, 40), inputs, "cpu")[0]

    torch.testing.assert_close(
        second(unrolled), second(lambda leaves: function(*leaves)), rtol=1e-9, atol=1e-9
    )


def test_zeros_keep_their_sign():
    zeros = torch.tensor([-0.0, 0.0])
    for name in ("sin", "tan", "sinh", "asinh", "erf", "floor", "ceil", "trunc", "round", "asin", "atan"):
        (out,) = unroll(
            cell_of(EXPRESSIONS[name], 1, 2), Inputs(zeros.view(1, 1, 2), [torch.zeros(1, 2)], [], [], [])
        )
        assert torch.signbit(out).flatten().tolist() == [True, False], name


RANGED = (
    *("sine", "cosine", "sinh", "cosh", "arcsinh", "erf", "erfc", "floor", "round"),
    *("hypot", "arctan2", "fmod", "remainder"),
)


def test_ranges_hold_what_functions_give():
    """Interval arithmetic of every function whose numbers a persistent kernel may have to scale."""
    generator = torch.Generator().manual_seed(0)
    for name in RANGED:
        row = FUNCTIONS[name]
        assert row.arity is not None
        for _ in range(200):
            ends = (torch.randn(row.arity, 2, generator=generator, dtype=torch.float64) * 4).sort(1).values
            low, high = row.bounds(*(tuple(pair) for pair in ends.tolist()))
            share = torch.rand(row.arity, 300, generator=generator, dtype=torch.float64)
            y = row.torch(*(ends[:, :1] + share * (ends[:, 1:] - ends[:, :1])))
            assert low - 1e-12 <= y.min(), (name, ends)
            assert y.max() <= high + 1e-12, (name, ends)
        low, high = row.bounds(*[(-math.inf, math.inf)] * row.arity)
        assert low < high
    assert FUNCTIONS["sine"].bounds((0.1, 0.2)) == pytest.approx((math.sin(0.1), math.sin(0.2)))
    assert FUNCTIONS["cosine"].bounds((3.0, 4.0))[0] == -1.0
