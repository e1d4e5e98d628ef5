"""The CUDA kernels of ⊕ with pooling units and masks: their own source, compiled for the CPU by g++.

So indices and formulas are tested without a GPU; on one, `make test-gpu` runs the same cases.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from functools import cache

import pytest
import torch

from deeprnn.backends import stepwise as steps
from deeprnn.backends.cuda import nvrtc, step_kernels, unit_kernels
from tests.backends.grid import fresh_seed
from tests.backends.small_emulation import EMULATED, Small
from tests.backends.step_cases import (
    CASES,
    STAR,
    Case,
    compare_edges,
    compare_floats,
    draw,
    floats,
    fused,
    results,
)


@cache
def compiled(folder, name: str, macros: tuple[tuple[str, int], ...]) -> Small:
    own = folder / f"{name}{''.join(str(v) for _, v in macros)}"
    own.mkdir()
    return Small(own, "units.cu", name, dict(macros))


@pytest.fixture
def emulated(monkeypatch, tmp_path_factory):
    """CPU tensors take the way of a GPU: batched products, and the kernels compiled for the CPU."""
    folder = tmp_path_factory.getbasetemp()

    def launcher(name, macros, grid, device):
        kernel, threads = compiled(folder, name, macros), dict(macros)["THREADS"]
        return lambda params, t: kernel.launch(grid[0], threads, [params, ctypes.c_int(t)], device, grid[1])

    monkeypatch.setattr(unit_kernels, "launcher", launcher)
    monkeypatch.setattr(steps, "by_torch", lambda x: False)


@EMULATED
@pytest.mark.parametrize("unit", ["lp:2", "maxout:2"])
def test_emulated_empty_pools_equals_and_extremes(unit, emulated):
    compare_edges(unit)


@EMULATED
@pytest.mark.parametrize("case", [STAR, CASES[4], CASES[6], CASES[12]], ids=str)
def test_emulated_unit_kernels(case, emulated, monkeypatch):
    monkeypatch.setattr(step_kernels, "ROWS", 0)
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
def test_emulated_step_kernels(case, emulated):
    """Product and unit in one, where the layout allows; the widths of WIDE fill tiles and warps unevenly."""
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
    if not joined:
        monkeypatch.setattr(step_kernels, "ROWS", 0)
    given = draw(case, fresh_seed())
    compare_floats(case, given, results(fused, case, floats(given, "cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("joined", [True, False])
def test_captured_in_a_graph(joined, monkeypatch):
    if not joined:
        monkeypatch.setattr(step_kernels, "ROWS", 0)
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
