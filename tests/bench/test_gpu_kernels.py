"""The sweep over shapes of the kernels, as far as it goes without a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_kernels

from deeprnn.backends.cuda import nvrtc


def test_a_shape_of_every_kernel_can_be_swept(monkeypatch):
    compiled = []
    monkeypatch.setattr(nvrtc, "cubin", lambda source, *_: compiled.append(source) or b"")
    monkeypatch.setattr(gpu_kernels, "WORK", {name: work[:1] for name, work in gpu_kernels.WORK.items()})
    shapes = list(gpu_kernels.shapes(list(gpu_kernels.KERNELS), best=1))
    assert [shape.backward for shape in shapes] == [False, True] * 4
    assert all(gpu_kernels.compile_one(shape) is None for shape in shapes)
    assert [Path(source).stem for source in compiled] == [shape.kernel for shape in shapes]
