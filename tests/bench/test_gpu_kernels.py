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
    both = [
        (name, back)
        for name in gpu_kernels.KERNELS
        for back in (False, True)
        if (name, back) != ("gates", False)
    ]
    assert [(shape.kernel, shape.backward) for shape in shapes] == both
    assert all(gpu_kernels.compile_one(shape) is None for shape in shapes)
    names = [Path(source).stem for source in compiled]
    assert names == [shape.kernel.replace("gates", "tensor_core") for shape in shapes]


def test_of_each_structure_one_shape_can_be_swept():
    shapes = [
        s for s in gpu_kernels.shapes(["gates"], 4, distinct=True) if (s.name, s.batch) == ("gru256", 256)
    ]
    structures = {(s.plan.cluster, s.plan.threads, s.plan.row_groups, s.plan.finishers) for s in shapes}
    assert len(structures) == len(shapes) == 4
