"""Every CUDA source compiles, with what it is given for real layers: by NVRTC alone, which needs no GPU.

`pip install nvidia-cuda-nvrtc` where torch came without CUDA.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.rehearsal import rehearsal

import deeprnn
from deeprnn.backends.cuda import epilogue, nvrtc, stepwise
from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.gemm import outer_products, row_products
from deeprnn.backends.cuda.recurrence.schedule import schedule
from deeprnn.errors import UserError
from tests.backends import grid

LAYERS = [
    (lambda: deeprnn.DeepRNN(88, 2048), 16),
    (lambda: deeprnn.DeepRNN(88, 1300), 1),
    (lambda: deeprnn.DeepRNN(88, 400, intermediate_sizes=400, shortcut="last", input_to="all"), 64),
    (lambda: deeprnn.DeepRNN(88, 100, nonlinearity="maxout:2"), 3),
    (lambda: deeprnn.LSTM(88, 256), 64),
    (lambda: deeprnn.RHN(88, 400, depth=3), 16),
]
BESIDE_THE_LOOP = {
    "training/update.cu": {},
    "training/softmax.cu": {"CLASSES": "10000", "ITEMS": "40"},
    "training/nade.cu": {"NOTES": "88", "HIDDEN": "100"},
    "recurrence/max_abs_scan.cu": {"JOBS": "3"},
    "gemm/short_rows.cu": row_products.macros(72, 88),
    "gemm/long_rows.cu": row_products.macros(72, 400),
    "gemm/outer_products.cu": outer_products.macros(72),
}


@pytest.mark.slow
def test_every_cuda_source_compiles(monkeypatch):
    try:
        nvrtc.library()
    except UserError as error:
        pytest.skip(str(error))
    compiled = set()
    compile_source = nvrtc.compile_source

    def noted(text, name, headers, arch):
        code = compile_source(text, name, headers, arch)
        compiled.add(name)
        return code

    monkeypatch.setattr(nvrtc, "compile_source", noted)
    monkeypatch.setattr(nvrtc.code_cache, "read", lambda name: None)
    monkeypatch.setattr(nvrtc.code_cache, "keep", lambda name, code: None)
    for make, batch in LAYERS:
        with rehearsal(compile=True):
            layer = make()
            layer(torch.randn(4, batch, 88))[0].sum().backward()
    for source, macros in BESIDE_THE_LOOP.items():
        nvrtc.cubin(source, macros, "sm_90a")
    cell = grid.transition((80,), ("sigmoid",))
    for backward in (False, True):
        own = epilogue.epilogue_of(schedule(cell, backward), epilogue.EpilogueOptions(gradients=(True,)))
        stepwise.compile_stage(own, 0, Device())
    assert compiled == {path.name for path in nvrtc.FOLDER.rglob("*.cu")}
