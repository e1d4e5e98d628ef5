"""⊕ with pooling units and masks: outputs and every gradient against `reference.unroll_with` in float64.

The CUDA kernels' own source also runs here, compiled for the CPU by g++, so that indices and formulas are
tested without a GPU; on one, `make test-gpu` runs the same cases.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from deeprnn import backends, units
from deeprnn.backends import reference, steps, steps_plain
from deeprnn.backends.cuda import nvrtc, step_kernels, unit_kernels
from deeprnn.models import dots_rnn
from deeprnn.operators import Plus
from tests.backends.grid import fresh_seed

EMULATED = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case):
    given = draw(case, fresh_seed())
    truth = members(case, given)
    compare(results(fused, case, given), truth, 1e-11)
    compare_floats(case, given, results(fused, case, floats(given)))


@pytest.mark.parametrize("case", [STAR, CASES[4], CASES[5]], ids=str)
def test_a_broken_slope_is_caught(case, monkeypatch):
    right = steps_plain.slopes

    def wrong(layout, states, given):
        right(layout, states, given)
        layout.columns(states.slope, 0)[1].mul_(1.01)

    monkeypatch.setattr(steps_plain, "slopes", wrong)
    given = draw(case, fresh_seed())
    with pytest.raises(AssertionError, match="is off by"):
        compare(results(fused, case, given), members(case, given), 1e-11)


def test_forgotten_reset_is_caught(monkeypatch):
    given = draw(STAR, fresh_seed())
    given["reset"] = torch.zeros_like(given["reset"])
    given["reset"][2] = True
    truth = members(STAR, given)
    monkeypatch.setattr(
        steps_plain.PlainBackward, "__call__", _without_reset(steps_plain.PlainBackward.__call__)
    )
    with pytest.raises(AssertionError, match="is off by"):
        compare(results(fused, STAR, given), truth, 1e-11)


def _without_reset(right):
    def call(self, l, t):
        self.reset = None
        right(self, l, t)

    return call


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


@pytest.mark.parametrize("unit", ["lp:2", "maxout:2"])
@pytest.mark.parametrize(
    "function", [fused, pytest.param("emulated", marks=EMULATED)], ids=["torch", "kernel"]
)
def test_empty_pools_equals_and_extremes(unit, function, request):
    """A pool at its centres, equal entries, powers that would overflow, zeros beside numbers, NaN."""
    if function == "emulated":
        request.getfixturevalue("emulated")
        function = fused
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
    h, grad = edge(function, a, unit)
    known, truth = edge(plain, a.double(), unit)
    torch.testing.assert_close(h.double(), known, equal_nan=True, rtol=1e-5, atol=0)
    usable = torch.isfinite(truth)
    torch.testing.assert_close(grad.double()[usable], truth[usable], rtol=1e-5, atol=1e-7)


def test_second_derivative():
    case = Case(("lp:2", "tanh"), (3, 2), "01", T=3, B=2, reset=True, masks="t", state_mask="s")
    given = draw(case, fresh_seed())
    names = [n for n in given if differs(n)]

    def function(*leaves: Tensor):
        return call(fused, case, given | dict(zip(names, leaves, strict=True)))

    leaves = [given[n].requires_grad_() for n in names]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_second_derivative_of_a_population():
    case = dataclasses.replace(STAR, population=2, T=3)
    given = draw(case, fresh_seed())

    def curvature(function):
        own = {n: x.clone().requires_grad_(differs(n)) for n, x in given.items()}
        h, _ = torch.func.vmap(lambda m: call(function, case, m))(own)
        (first,) = torch.autograd.grad(h.square().sum(), own["W0"], create_graph=True)
        return torch.autograd.grad(first.square().sum(), own["rho0"])[0]

    torch.testing.assert_close(curvature(fused), curvature(plain))


def test_a_member_is_the_model_alone_to_the_bit():
    case = dataclasses.replace(STAR, population=3)
    given = floats(draw(case, fresh_seed()))
    together = results(fused, case, given)
    for p in range(3):
        alone = results(fused, dataclasses.replace(case, population=0), {n: x[p] for n, x in given.items()})
        for name, x in alone.items():
            assert torch.equal(together[name][p], x), name


# ---- where it is used


@pytest.fixture
def served(monkeypatch):
    """How often the operator ran."""
    count = []
    right = steps.unroll_with
    monkeypatch.setattr(steps, "unroll_with", lambda *a, **k: (count.append(1), right(*a, **k))[1])
    return count


def test_a_model_is_served_and_agrees_with_the_reference(served):
    model = dots_rnn(
        input_size=6,
        output_size=2,
        hidden_size=5,
        intermediate_size=4,
        output_hidden_size=4,
        intermediate_unit="lp:2",
        unit="tanh",
    ).double()
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    logits, _ = model(x)
    assert served
    served.clear()
    model.backend = "reference"
    torch.testing.assert_close(model(x)[0], logits)
    assert not served


def test_transformations_keep_the_reference(served):
    plus = Plus(3, 4, intermediate_sizes=(5,), units=("lp:2", "tanh"), shortcut="last").double()
    x, h0 = torch.randn(4, 2, 3, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)

    def loss(h0):
        return plus.unroll(x, h0)[0].square().sum()

    gradient = torch.func.grad(loss)(h0)
    torch.func.jvp(loss, (h0,), (h0,))
    assert not served
    h0.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(h0), h0)[0], gradient)
    assert served


def test_own_units_other_types_and_learned_masks_keep_the_reference(served):
    named = [("tanh", None, None)]
    A, W = torch.zeros(2, 3, 4), [torch.zeros(4, 4)]
    assert steps.serves(A, W, named, [None, torch.ones(3, 4), torch.ones(2, 3, 4)])
    assert not steps.serves(A.half(), [W[0].half()], named, [])
    assert not steps.serves(A.to("meta"), [W[0].to("meta")], named, [])
    assert not steps.serves(A, W, named, [torch.ones(3, 4, requires_grad=True)])
    assert not steps.serves(A, W, named, [torch.ones(1, 4)])
    units.register("steps-swish", torch.nn.functional.silu)
    try:
        phis = [torch.nn.functional.silu]
        backends.unroll_with(A, A[0], W, [None], phis, [4], named=[("steps-swish", None, None)])
    finally:
        del units.ELEMENTWISE["steps-swish"]
    assert not served


def test_operators_pass_torchs_own_checks():
    case = Case(("lp:2", "tanh"), (3, 2), "01", T=2, B=2, reset=True, masks="t", state_mask="s")
    g = draw(case, fresh_seed())
    learned = {n: x.requires_grad_(differs(n)) for n, x in g.items()}
    lists = [[learned["W0"], learned["W1"]], [learned["S1"]], [learned["rho0"]], [learned["c0"]]]
    masks = [g["mask0"], g["mask1"]]
    args = (
        learned["A"],
        learned["h0"],
        *lists,
        masks,
        g["state_mask"],
        g["reset"],
        "lp:2,tanh",
        "01",
        "11",
        True,
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(steps.unroll_steps, args, test_utils=tests)


# ---- the kernels

PRELUDE = """
#include <ucontext.h>
#include <cmath>
#include <vector>
typedef unsigned int u32; typedef long long i64; typedef unsigned char u8;
#define INLINE static inline
#define __global__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
struct float4 { float x, y, z, w; };
static struct { u32 x, y; } blockIdx, threadIdx;
static std::vector<ucontext_t> fibres(THREADS);
static ucontext_t home;
// All threads meet at every barrier, so each runs up to it in turn; their order changes from one to the next.
INLINE void __syncthreads() { u32 i = threadIdx.x; swapcontext(&fibres[i], &home); threadIdx.x = i; }
INLINE void __syncwarp() { __syncthreads(); }
"""
RUN = """
static const Params* given; static int step; static std::vector<char> finished;
static void body() {
  u32 i = threadIdx.x;
  NAME(*given, step);
  finished[i] = 1;
  swapcontext(&fibres[i], &home);
}
extern "C" void run(const Params* p, int t, int x, int y) {
  static std::vector<std::vector<char>> stacks(THREADS, std::vector<char>(1 << 15));
  given = p; step = t;
  for (blockIdx.y = 0; blockIdx.y < (u32)y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < (u32)x; blockIdx.x++) {
      finished.assign(THREADS, 0);
      for (u32 i = 0; i < THREADS; i++) {
        getcontext(&fibres[i]);
        fibres[i].uc_stack.ss_sp = stacks[i].data();
        fibres[i].uc_stack.ss_size = stacks[i].size();
        fibres[i].uc_link = &home;
        makecontext(&fibres[i], body, 0);
      }
      for (u32 turn = 0, left = THREADS; left; turn++) {
        left = 0;
        for (u32 n = 0; n < THREADS; n++) {
          u32 i = turn % 2 ? THREADS - 1 - n : n;
          if (finished[i]) continue;
          threadIdx.x = i;
          swapcontext(&home, &fibres[i]);
          left += !finished[i];
        }
      }
    }
}
"""


@cache
def compiled(folder, name: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    text = "".join(f"#define {k} {v}\n" for k, v in macros)
    source = (nvrtc.FOLDER / "units.cu").read_text().replace('#include "common.cuh"', PRELUDE)
    file = folder / f"{name}{''.join(str(v) for _, v in macros)}.cpp"
    file.write_text(text + source + RUN.replace("NAME", name))
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", f"{file}.so", file], check=True
    )
    return ctypes.CDLL(f"{file}.so")


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    """CPU tensors take the way of a GPU: batched products, and the kernels compiled for the CPU."""
    folder = tmp_path_factory.getbasetemp()

    def launcher(name, macros, grid, device):
        run = compiled(folder, name, macros).run
        return lambda params, t: run(ctypes.byref(params), t, *grid)

    monkeypatch.setattr(unit_kernels, "launcher", launcher)
    monkeypatch.setattr(steps, "by_torch", lambda x: False)


@EMULATED
@pytest.mark.parametrize("case", [STAR, CASES[4], CASES[6], CASES[12]], ids=str)
def test_emulated_unit_kernels(case, emulated, monkeypatch):
    monkeypatch.setattr(step_kernels, "JOINED", False)
    given = draw(case, fresh_seed())
    compare_floats(case, given, results(fused, case, floats(given)))


WIDE = [
    Case(("lp:2", "tanh"), (20, 37), "01", T=3, B=5, reset=True, masks="t", population=2),
    Case(("maxout:4", "relu"), (13, 70), "00", T=3, B=18, state_mask="t", z_gradient=False),
    Case(("tanh", "lp:2", "sigmoid"), (33, 9, 300), "011", T=2, B=2, reset=True),
    Case(("tanh", "lp:2", "identity"), (3, 9, 5), "010", T=3, B=1, state_mask="s"),
]


@EMULATED
@pytest.mark.parametrize("case", [*CASES[1:5:2], *CASES[9:14], *WIDE], ids=str)
def test_emulated_step_kernels(case, emulated, monkeypatch):
    """Product and unit in one, where the layout allows; the widths of WIDE fill tiles and warps unevenly."""
    monkeypatch.setattr(step_kernels, "JOINED", True)
    given = draw(case, fresh_seed())
    compare_floats(case, given, results(fused, case, floats(given)))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("product", [0, 1])
def test_kernels_compile(arch, product, tmp_path):
    for unit, pool in ((4, 2), (4, 3), (5, 2), (0, 1), (1, 1), (2, 1), (3, 1)):
        macros = {"UNIT": unit, "POOL": pool, "PRODUCT": product, "THREADS": 256, "ROWS": 16}
        macros |= dict.fromkeys(("MASK", "STATE_MASK", "RESET", "LAST", "KEEP", "OUTSIDE"), 1)
        file = tmp_path / "units.cu"
        text = "".join(f"#define {k} {v}\n" for k, v in macros.items())
        file.write_text(text + (nvrtc.FOLDER / "units.cu").read_text())
        options = [
            "-std=c++17",
            "-cubin",
            f"-arch={arch}",
            f"-I{nvrtc.FOLDER}",
            "-o",
            tmp_path / "units.cubin",
        ]
        subprocess.run(["nvcc", *options, file], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("case", [*CASES, *WIDE], ids=str)
def test_on_a_gpu(case, joined, monkeypatch):
    monkeypatch.setattr(step_kernels, "JOINED", joined)
    given = draw(case, fresh_seed())
    compare_floats(case, given, results(fused, case, floats(given, "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
def test_captured_in_a_graph(joined, monkeypatch):
    monkeypatch.setattr(step_kernels, "JOINED", joined)
    case = dataclasses.replace(STAR, population=2, state_mask="s")
    given = draw(case, fresh_seed())
    inputs = floats(given, "cuda")
    results(fused, case, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(fused, case, inputs)
    graph.replay()
    torch.cuda.synchronize()
    compare_floats(case, given, found)
