"""The CUDA kernels' own sources, run on the CPU by fibres: indices, exchange and barriers without a GPU.

Needs g++; arithmetic is that of the emulation (see emulation/common.cuh), so errors are those of fp32 and of
the split into fp16 parts, not of a GPU's units.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from deeprnn.backends import reference
from deeprnn.backends.cuda import largest, launch, nvrtc, planning
from tests.backends import grid
from tests.backends.grid import Case, fresh_seed
from tests.backends.small_emulation import Small

HERE = Path(__file__).parent / "emulation"
H200 = planning.Device()
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


class Emulated:
    """Stands in for a loaded kernel: compiles the source for the CPU and runs it in the calling thread."""

    def __init__(self, plan: planning.Plan, ring: planning.Ring, reset: bool, mid: bool, folder: Path):
        defines = planning.macros(plan, ring, reset, mid)
        text = "".join(f"#define {name} {value}\n" for name, value in defines.items())
        text += (nvrtc.FOLDER / launch.SOURCES[plan.path]).read_text()
        for declaration in ("unsigned char memory[];", "float memory[];"):
            place = "float* memory = (float*)machine.memory[machine.now->rank].data();"
            if f"extern __shared__ __align__(128) {declaration}" in text:
                text = text.replace(f"extern __shared__ __align__(128) {declaration}", place)
        source = folder / f"{plan.path}{int(ring.backward)}.cpp"
        source.write_text(text + (HERE / "run.h").read_text())
        library = source.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-D__CUDA_ARCH__=900", f"-I{HERE}"]
        subprocess.run(["g++", *options, f"-I{nvrtc.FOLDER}", "-w", "-o", library, source], check=True)
        self.plan, self.run = plan, ctypes.CDLL(str(library)).run
        self.run.restype = ctypes.c_char_p

    def launch(self, grid: int, threads: int, arguments: list, device: torch.device) -> None:
        clusters = grid // self.plan.cluster
        seed = fresh_seed()
        error = self.run(arguments[0], clusters, self.plan.cluster, threads, self.plan.shared, seed)
        assert error is None, f"{error.decode()} (order of threads by seed {seed})"


def emulate_kernels(folder: Path, monkeypatch) -> None:
    """What `launch` compiles is compiled for the CPU."""
    kernels = {}

    def kernel_of(plan, ring, reset, mid, device):
        if ring.backward not in kernels:
            kernels[ring.backward] = Emulated(plan, ring, reset, mid, folder)
        return kernels[ring.backward]

    @lru_cache
    def looking(jobs, device, arch):
        (folder / str(jobs)).mkdir()
        return Small(folder / str(jobs), "largest.cu", "largest", {"JOBS": jobs})

    monkeypatch.setattr(launch, "kernel_of", kernel_of)
    monkeypatch.setattr(largest, "kernel_of", looking)
    monkeypatch.setattr(launch, "device_of", lambda index: H200)


def emulate(
    case: Case, choose, folder: Path, monkeypatch, bounds: tuple[int, ...] = (),
    change=lambda tensors: None, by_row: bool = False,
) -> None:  # fmt: skip
    """Forward and backward of a case against the reference in float64; `choose(ring)` gives the plan.

    `bounds`: where the sequence is cut into stretches, each a launch of its own. `change` may alter what was drawn.
    """
    emulate_kernels(folder, monkeypatch)
    tensors = grid.draw(case, fresh_seed())
    change(tensors)
    lead = (lambda x: x) if case.population else (lambda x: x.unsqueeze(0))
    given = {n: x if n == "reset" else lead(x.float()) for n, x in tensors.items()}
    W, S = grid._weights(given)
    bf16 = case.precision == "bf16"
    P, T, B = max(1, case.population), case.T, case.B
    H, total = case.sizes[-1], sum(case.sizes)
    h, z, dA, dh0 = (
        torch.full((P, *s), float("nan")) for s in ((T, B, H), (T, B, total - H), (T, B, total), (B, H))
    )
    reset, spec = given.get("reset"), case.spec
    plans = [choose(planning.ring(spec, backward)) for backward in (False, True)]
    stretches = list(pairwise((0, *bounds, T)))

    def part(x, a, b):
        return None if x is None else x[a:b] if x is reset else x[:, a:b]

    for a, b in stretches:
        first, cut = h[:, a - 1] if a else given["h0"], part(reset, a, b)
        outs = [part(h, a, b), part(z, a, b)]
        arguments: list[Any] = [part(given["A"], a, b), first, W, S, cut, spec, bf16, *outs]
        marked = reset is not None
        looked = launch.look_ahead(arguments[0], W, S, spec, bf16, marked, plans[0]) if bounds else None
        looked = None if looked is None else looked.begin()
        launch.forward(*arguments, plan=plans[0], looked=looked)
    dz = given["dz"] if case.z_gradient else None
    for a, b in reversed(stretches):
        ins = [part(x, a, b) for x in (given["dh"], dz, h, z)]
        arguments = [*ins, W, S, part(reset, a, b), spec, bf16, part(dA, a, b), None if a else dh0]
        looked = (
            launch.look(*ins[:2], W, S, spec, bf16, reset is not None, plans[1]).begin() if bounds else None
        )
        launch.backward(*arguments, plan=plans[1], after=dA[0, b] if b < T else None, looked=looked)
    for p in range(P):
        member = {n: x if n == "reset" else lead(x)[p] for n, x in tensors.items()}
        compare(case, member, {"h": h[p], "z": z[p], "dA": dA[p], "dh0": dh0[p]}, by_row)


def compare(
    case: Case, member: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor], by_row: bool
) -> None:
    """A member's outputs and gradients with the reference in float64, beside the reference in fp32."""
    truth, plain = (by_reference(case, member, dtype) for dtype in (torch.float64, torch.float32))
    usable = torch.isfinite(torch.cat([plain["h"], plain["z"]], -1)).all(-1)
    for name, out in outputs.items():
        finite = torch.isfinite(plain[name]).all(-1)
        assert not torch.isfinite(out[~finite]).all(-1).any(), f"{name} has numbers where none should be"
        if name in ("dA", "dh0"):  # what is beyond an output that is none is nobody's concern
            finite = finite & (usable if name == "dA" else usable.all(0))
        assert torch.isfinite(out[finite]).all(), f"{name} was not written everywhere"
        rows = [x[finite] for x in (out, plain[name], truth[name])]
        error, least = off(rows[0], rows[2]), 4 * off(*rows[1:])
        assert error < 1e-6 or error < least, f"{name} is off by {error:.1e}"
        if by_row and out.numel():  # each row of the batch at each step by itself
            for mine, fp32, known in zip(*rows, strict=True):
                assert off(mine, known) < max(3e-6, 8 * off(fp32, known)), f"a row of {name}"


def by_reference(case: Case, member: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one member."""
    own = {n: x if n == "reset" else x.detach().to(dtype) for n, x in member.items()}
    a, h_first = own["A"].requires_grad_(), own["h0"].requires_grad_()
    h, z = reference.unroll(a, h_first, *grid._weights(own), case.spec, own.get("reset"))
    loss = (h * own["dh"]).sum() + ((z * own["dz"]).sum() if case.z_gradient else 0.0)
    dA, dh0 = torch.autograd.grad(loss, (a, h_first))
    return {"h": h.detach(), "z": z.detach(), "dA": dA, "dh0": dh0}


def off(x: torch.Tensor, known: torch.Tensor) -> float:
    return float((x.double() - known.double()).norm() / known.double().norm().clamp(min=1e-33))


TWO = Case((37, 50), ("tanh", "sigmoid"), (False, True), 4, 3, reset=True)
THREE = Case((50, 33, 40), ("sigmoid", "tanh", "identity"), (False, True, True), 3, 5, population=2)
BARE = Case((40, 35), ("relu", "tanh"), (False, False), 4, 9, z_gradient=False)
EVEN = Case((40, 47), ("tanh", "sigmoid"), (False, True), 5, 10)
ONE = Case((45,), ("sigmoid",), (False,), 5, 4)
CLUSTER = [
    (TWO, (2, 128, 8, 2, 1), True),
    (TWO, (4, 128, 16, 2, 3), False),
    (THREE, (2, 128, 32, 1, 5), True),
    (ONE, (4, 128, 8, 4, 2), True),
    (dataclasses.replace(BARE, precision="bf16"), (2, 128, 8, 2, 4), True),
]
MMA = [
    (TWO, (2, 1, 4, 3), True),
    (THREE, (2, 2, 2, 5), True),
    (BARE, (2, 1, 2, 9), False),
    (ONE, (2, 2, 1, 4), True),
    (dataclasses.replace(TWO, B=18), (2, 1, 2, 18), True),
    (dataclasses.replace(TWO, precision="bf16"), (2, 2, 2, 3), True),
    (dataclasses.replace(TWO, B=7), (3, 1, 3, 4), True),  # no power of two; the last cluster has fewer rows
    (dataclasses.replace(THREE, B=11), (3, 2, 1, 11), True),
    # Streams: three of two rows, the last cluster's last with none; eight finishers; one layer.
    (dataclasses.replace(EVEN, B=10), (3, 1, 3, 6, 3), False),
    (dataclasses.replace(EVEN, B=13, reset=True), (2, 1, 4, 14, 2), True),
    (dataclasses.replace(EVEN, B=9, population=2), (2, 2, 2, 9, 3, True, 8), True),
    (dataclasses.replace(ONE, B=20), (3, 1, 2, 20, 2), True),
    (dataclasses.replace(THREE, sizes=(40, 33, 47), B=7, population=0, reset=True), (3, 1, 4, 6, 2), True),
    (dataclasses.replace(EVEN, B=6, precision="bf16"), (2, 2, 2, 6, 2), True),
    # Tiles stored into every block by the lanes; stages of unequal width; more tiles than finishers.
    (TWO, (2, 1, 4, 3, 1, False), True),
    (dataclasses.replace(EVEN, B=10), (3, 1, 3, 6, 3, False), False),
    (dataclasses.replace(THREE, B=11), (2, 3, 1, 12, 2, False), True),
    (dataclasses.replace(TWO, sizes=(90, 37), B=20), (2, 2, 2, 20, 2), True),
]


@pytest.mark.parametrize(("case", "shape", "registers"), CLUSTER, ids=str)
def test_cluster_kernel(case, shape, registers, tmp_path, monkeypatch):
    if not registers:
        monkeypatch.setattr(planning, "REGISTERS", dict.fromkeys(planning.REGISTERS, 0))

    def choose(ring):
        return planning.cluster_plan(ring, case.B, 1, case.precision == "bf16", H200, *shape)

    emulate(case, choose, tmp_path, monkeypatch)


@pytest.mark.parametrize(("case", "shape", "registers"), MMA, ids=str)
def test_tensor_core_kernel(case, shape, registers, tmp_path, monkeypatch):
    if not registers:
        monkeypatch.setattr(planning, "REGISTERS", dict.fromkeys(planning.REGISTERS, 0))

    def choose(ring):
        return planning.mma_plan(ring, case.B, 1, case.precision == "bf16", H200, *shape)

    emulate(case, choose, tmp_path, monkeypatch)


def large_start(tensors):
    tensors["h0"] *= 3e4
    for name in ("W1", "S2"):  # or every unit would be saturated
        tensors[name] *= 1e-4


def last_step_alone(tensors):  # nothing but the last step is scored, and gradients vanish on the way back
    tensors["dh"][:-1] = 0
    tensors["dz"][:] = 0
    for name in tensors:
        if name[0] in "WS":
            tensors[name] *= 1e-4


def huge_gradients(tensors):
    for name in ("dh", "dz"):
        tensors[name] *= 1e25


def tiny_gradients(tensors):  # of some rows
    for name in ("dh", "dz"):
        tensors[name][:, ::2] *= 1e-28


def nearly_no_matrix(tensors):  # what reaches the lower layer is nothing beside the shortcut's share
    tensors["W2"] *= 1e-33


def one_large_weight(tensors):
    tensors["W1"][0, 0] = 300.0


RANGES = [large_start, last_step_alone, huge_gradients, tiny_gradients, nearly_no_matrix, one_large_weight]
RELU = dataclasses.replace(EVEN, units=("relu", "identity"), B=6)


@pytest.mark.parametrize("change", RANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", [dataclasses.replace(EVEN, B=6), RELU], ids=["bounded", "unbounded"])
def test_tensor_core_kernel_at_any_range(case, change, tmp_path, monkeypatch):
    """Numbers of any size that fp32 holds keep their precision, although the kernel multiplies in fp16."""

    def choose(ring):
        return planning.mma_plan(ring, case.B, 1, False, H200, 2, 1, 4, 6, 2)

    emulate(case, choose, tmp_path, monkeypatch, change=change, by_row=True)


def grown_before_a_start(tensors):  # 1e25 in one sequence, 1 in the next; backward the other way round
    tensors["reset"][:] = False
    tensors["reset"][2] = True
    tensors["A"][:2] *= 1e25
    for name in ("dh", "dz"):
        tensors[name][3:] *= 1e25


def lost_before_a_start(tensors):  # other rows know nothing of it; and nothing comes of -inf before a relu
    tensors["reset"][:] = False
    tensors["reset"][2] = True
    for name in ("A", "dh"):
        tensors[name] *= 1e8
    tensors["A"][0, 0, :5] = float("nan")
    tensors["A"][0, 1, 3] = float("inf")
    tensors["A"][:, 2, 7] = -float("inf")
    tensors["dh"][4, 3, 2] = float("nan")
    tensors["dh"][4, 4, 2] = float("inf")


def lost_at_the_start(tensors):  # in the first state of some rows, whose first sequence does not begin there
    tensors["reset"][:] = False
    tensors["reset"][0, :4] = True
    tensors["h0"][0, 3] = float("inf")
    tensors["h0"][1, :] = float("nan")
    tensors["h0"][4, 5] = float("nan")


def at_the_end(tensors):  # of fp32: bounds of the gradients are beyond it
    tensors["h0"] *= 1e33
    for name in ("dh", "dz"):
        tensors[name] *= 3e37


def nothing_from_above(tensors):  # what one product adds up is of vectors of very unlike size
    tensors["dh"][-1] *= 1e-33
    tensors["dz"] *= 1e3


def nothing_below(tensors):
    tensors["W2"] *= 1e-32
    tensors["dz"] *= 1e-32


DEEP = dataclasses.replace(THREE, sizes=(40, 33, 47), T=4, B=6, population=0)
ENDS = [
    (dataclasses.replace(DEEP, units=("relu", "relu", "identity"), reset=True), grown_before_a_start, ()),
    (dataclasses.replace(RELU, reset=True), lost_before_a_start, ()),
    (dataclasses.replace(RELU, reset=True), lost_at_the_start, ()),
    (dataclasses.replace(EVEN, B=6, reset=True), lost_at_the_start, ()),
    (dataclasses.replace(EVEN, B=6), at_the_end, ()),
    (DEEP, nothing_from_above, ()),
    (DEEP, nothing_below, (2,)),
]


@pytest.mark.parametrize(("case", "change", "bounds"), ENDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_tensor_core_kernel_at_the_ends_of_range(case, change, bounds, tmp_path, monkeypatch):
    """Where a bound is far from the numbers, or vectors of one sum far from each other."""

    def choose(ring):
        return planning.mma_plan(ring, case.B, 1, False, H200, 2, 1, 4, 6, 2)

    emulate(case, choose, tmp_path, monkeypatch, bounds, change, by_row=True)


STRETCHES = [
    (dataclasses.replace(TWO, T=5), (2, 1, 4, 3), (2,)),
    (dataclasses.replace(EVEN, T=7, B=13, reset=True), (2, 1, 4, 14, 2), (1, 4)),
    (dataclasses.replace(THREE, T=4, B=7, population=0), (3, 1, 4, 6, 2), (2,)),
    (dataclasses.replace(ONE, B=20, reset=True), (3, 1, 2, 20, 2), (3,)),
]


@pytest.mark.parametrize(("case", "shape", "bounds"), STRETCHES, ids=str)
def test_tensor_core_kernel_in_stretches(case, shape, bounds, tmp_path, monkeypatch):
    def choose(ring):
        return planning.mma_plan(ring, case.B, 1, False, H200, *shape)

    emulate(case, choose, tmp_path, monkeypatch, bounds)


@pytest.mark.parametrize("case", [TWO, THREE], ids=str)
def test_generic_kernel(case, tmp_path, monkeypatch):
    def choose(ring):
        shared = planning._generic_shared(ring, 128, 2)
        return planning.Plan("generic", 1, 128, 2, shared=shared)

    emulate(case, choose, tmp_path, monkeypatch)
