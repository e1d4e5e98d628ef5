"""Elementary functions over the whole range of their arguments: machine code, and the text that kernels are given."""

from __future__ import annotations

import ctypes
import math

import mpmath
import numpy as np
import pytest
import torch

from deeprnn.backends.call import Inputs
from deeprnn.backends.cuda.ctext import device_functions, statements
from deeprnn.backends.unrolling import unroll
from deeprnn.cells.expressions import apply, leaf
from deeprnn.cells.functions import FUNCTIONS
from tests.backends.compiling import library
from tests.backends.small_emulation import EMULATED
from tests.backends.test_cpu import arity, pointwise_cell

MOST_ULPS = {
    "sine": 1.6, "cosine": 1.6, "erf": 2.6, "erfc": 3.5, "sinh": 2.0, "cosh": 2.0, "arcsinh": 2.0, "arctan2": 2.6,
    "hypot": 2.2, "floor": 0.0, "round": 0.0, "exp": 2.0, "log": 1.5, "expm1": 3.0, "log1p": 3.0, "sqrt": 0.51,
}  # fmt: skip
"""of float32, against float64: distances to the exact result in units of its last place"""
EXACT = {
    "sine": mpmath.sin, "cosine": mpmath.cos, "erf": mpmath.erf, "erfc": mpmath.erfc, "sinh": mpmath.sinh,
    "cosh": mpmath.cosh, "arcsinh": mpmath.asinh,
}  # fmt: skip


def machine_code(name: str, *arguments: torch.Tensor) -> torch.Tensor:
    size = arguments[0].numel()
    inputs = Inputs(torch.cat(arguments).view(1, 1, -1), [arguments[0].new_zeros(1, size)], [], [], [])
    return unroll(pointwise_cell(name, size), inputs, "cpu")[0].view(-1)


def any_floats(count: int, seed: int) -> torch.Tensor:
    """Finite numbers of every sign and exponent, denormal ones included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    x = bits.view(np.float32)
    return torch.from_numpy(np.where(np.isfinite(x), x, np.float32(1.0)))


def arguments_of_every_size(seed: int) -> torch.Tensor:
    """Those, many of order one, and many next to multiples of π/2."""
    generator = torch.Generator().manual_seed(seed)
    turns = torch.cat([torch.randint(0, 2**n, (5000,), generator=generator) for n in (8, 21, 22, 30, 50)])
    near = (turns.double() * (math.pi / 2)).float()
    return torch.cat(
        [
            *(any_floats(60_000, seed), near, -near, torch.linspace(-12, 12, 40_001)),
            *(torch.linspace(-110, 110, 20_001), torch.randn(20_000, generator=generator)),
        ]
    )


def ulps(found: torch.Tensor, truth: torch.Tensor) -> np.ndarray:
    """Distances in units in the last place of the exact result; none where that is no number of float32."""
    exact = truth.double().numpy()
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        distance = np.abs(found.double().numpy() - exact) / np.spacing(np.abs(rounded)).astype(np.float64)
    finite = np.isfinite(rounded) & np.isfinite(exact)
    overflow = np.isinf(rounded) & ~np.isnan(exact)  # the nearest number is infinite, or the largest there is
    large = found.abs().double().numpy() >= float(np.finfo(np.float32).max)
    return np.where(finite, distance, np.where(overflow & ~large, np.inf, 0.0))


@pytest.mark.parametrize("name", MOST_ULPS)
def test_float32_of_every_size(name):
    arguments = [arguments_of_every_size(seed) for seed in range(arity(name))]
    if arity(name) == 2:
        arguments[1] = arguments[1].flip(0)
    found = machine_code(name, *arguments)
    truth = FUNCTIONS[name].torch(*(x.double() for x in arguments))
    assert torch.equal(found.isnan(), truth.isnan())
    errors = ulps(found, truth)
    worst = int(errors.argmax())
    places = [x[worst].item() for x in arguments]
    assert errors[worst] <= MOST_ULPS[name], f"{name}{places}: {found[worst].item()}, {truth[worst].item()}"


@pytest.mark.parametrize("name", EXACT)
def test_float64_of_every_size(name):
    """Against 30 digits more than the argument has; the last ones lie next to multiples of π/2."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-300, 300, (80,), generator=generator).double()
    x = torch.cat(
        [
            torch.randn(150, generator=generator, dtype=torch.float64) * 4,
            torch.randn(80, generator=generator, dtype=torch.float64) * 2.0**19,
            torch.randn(80, generator=generator, dtype=torch.float64) * 10.0**exponents,
            torch.tensor([math.ldexp(6381956970095103, 797), 1.5707963267948966e17, 1570796338.0, 2.0**20]),
        ]
    )
    limits = {"erf": 30.0, "erfc": 26.0, "sinh": 700.0, "cosh": 700.0}
    x = x[x.abs() < limits.get(name, math.inf)]
    with mpmath.workprec(1300):
        exact = [EXACT[name](mpmath.mpf(value)) for value in x.tolist()]
        for value, found, truth in zip(x.tolist(), machine_code(name, x).tolist(), exact, strict=True):
            last_place = mpmath.mpf(math.ulp(float(truth)))
            assert abs(found - truth) <= 3.5 * last_place, (
                f"{name}({value!r}) = {found!r}, not {float(truth)!r}"
            )


@pytest.mark.parametrize("name", ["fmod", "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_remainders_are_exact(name, dtype):
    """For every quotient that two numbers can have: numpy's have the bits too."""
    x, y = any_floats(20_000, 0).to(dtype), any_floats(20_000, 1).to(dtype)
    if dtype == torch.float64:
        x, y = x**5, y**5
    x, y = (
        torch.cat([a, torch.tensor([6.5, -6.5, 6.5, -6.0, 3e38, 1e-44], dtype=dtype)]) for a in (x, y.flip(0))
    )
    y[-6:] = torch.tensor([2.0, 2.0, -2.0, 2.0, 1e-45, 3e38], dtype=dtype)
    whole = y.ne(0) & x.isfinite()
    truth = np.fmod(x.numpy(), y.numpy()) if name == "fmod" else np.remainder(x.numpy(), y.numpy())
    np.testing.assert_array_equal(machine_code(name, x, y)[whole].numpy(), truth[whole.numpy()])


@pytest.mark.parametrize("vector_bytes", [16, 32])
def test_processors_with_narrower_vectors(vector_bytes, monkeypatch):
    from deeprnn.backends.cpu.jit import machine, run

    if vector_bytes > machine.machine().vector_bytes:
        pytest.skip("this processor has no vectors so wide")
    for name in ("forward_program", "backward_program"):  # plans are made anew
        monkeypatch.setattr(run, name, getattr(run, name).__wrapped__)
    monkeypatch.setattr(machine, "machine", lambda: machine.Machine(vector_bytes, 16))
    x = torch.cat([torch.randn(99), torch.tensor([1e5, 1e7, 1e20, -3e38])])
    for name in ("sine", "cosine", "erf", "fmod", "arctan2"):
        arguments = [x, x.flip(0)][: arity(name)]
        for given in (arguments, [a.double() for a in arguments]):
            truth = FUNCTIONS[name].torch(*(a.double() for a in arguments))
            torch.testing.assert_close(
                machine_code(name, *given), truth.to(given[0].dtype), rtol=1e-6, atol=1e-12
            )


# ---- the text for CUDA


@EMULATED
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_text_for_cuda_computes_the_same(name):
    """Compiled by g++, whose library has the functions that CUDA's has."""
    count = arity(name)
    out = apply(name, *(leaf("mask", i) for i in range(count)))
    lines, (result,) = statements([out], lambda node: f"x[{node.value[0]} * n + i]")  # type: ignore[index]
    body = " ".join([*lines, f"y[i] = {result};"])
    run = library(
        f'#include "small.h"\n{device_functions([out])}\n'
        f'extern "C" void run(const float* x, float* y, int n) {{ for (int i = 0; i < n; i++) {{ {body} }} }}'
    ).run
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e6, -1e6, 0.5, 1.5, -2.5, 1e30, math.inf, -math.inf, math.nan]
    )
    x = torch.cat([torch.randn(count, 500, generator=generator) * 3, ends.expand(count, -1)], 1)
    if name in ("power", "power_log", "lp", "ratio"):  # what they are given is of order one
        x = torch.rand(count, 500, generator=generator) + 1.0
    x, y = x.contiguous(), torch.empty(x.shape[1])
    run(*(ctypes.c_void_p(a.data_ptr()) for a in (x, y)), x.shape[1])
    truth = FUNCTIONS[name].torch(*x.double().unbind(0)).float()
    torch.testing.assert_close(y, truth, rtol=3e-6, atol=1e-30, equal_nan=True)
