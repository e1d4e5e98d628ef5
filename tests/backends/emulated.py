"""The CUDA kernels' own sources, compiled for the CPU and run by fibres: see emulation/common.cuh."""

from __future__ import annotations

import ctypes
import secrets
from functools import lru_cache
from typing import Any

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.epilogue import Epilogue
from deeprnn.backends.cuda.recurrence.launch import macros_of
from deeprnn.backends.cuda.recurrence.parameters import headers
from deeprnn.backends.cuda.recurrence.plans import KernelPlan
from tests.backends.compiling import library


class EmulatedKernel:
    """Stands in for a loaded kernel of the loop: runs the source in the calling thread."""

    def __init__(self, plan: KernelPlan, epilogue: Epilogue) -> None:
        text = "".join(f"#define {name} {value}\n" for name, value in macros_of(plan, epilogue).items())
        text += "#define __CUDA_ARCH_FEAT 900\n" + (nvrtc.FOLDER / plan.source).read_text()
        place = "float* memory = (float*)machine.memory[machine.now->rank].data();"
        for declaration in ("unsigned char memory[];", "float memory[];"):
            text = text.replace(f"extern __shared__ __align__(128) {declaration}", place)
        text = text.replace("#if __CUDA_ARCH__ >= 900", "#if 1") + '\n#include "run.h"\n'
        self.plan = plan
        self.run = library(text, headers(epilogue)).run
        self.run.restype = ctypes.c_char_p

    def launch(
        self, grid: int, threads: int, arguments: list, device: Any, rows: int = 1, stream: int | None = None
    ) -> None:
        """As `driver.Kernel.launch`; raises where the kernel misuses memory or barriers, or hangs."""
        # Blocks of a cooperative launch run all at once, as those of a cluster do.
        cluster = grid if self.plan.cooperative else self.plan.cluster
        seed = secrets.randbits(31)
        shape = (grid // cluster, cluster, threads, self.plan.shared, seed)
        error = self.run(arguments[0], *shape)
        assert error is None, f"{error.decode()}, seed {seed}"


@lru_cache(maxsize=256)
def emulated_kernel(plan: KernelPlan, epilogue: Epilogue, device: int = 0) -> EmulatedKernel:
    """As `launch.load_kernel`."""
    return EmulatedKernel(plan, epilogue)
