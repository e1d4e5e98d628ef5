"""The CUDA kernels' own sources, compiled for the CPU and run by fibres: see emulation/common.cuh."""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.cell_header import header
from deeprnn.backends.cuda.epilogue import Code
from deeprnn.backends.cuda.recurrence.launch import macros_of
from deeprnn.backends.cuda.recurrence.plans import KernelPlan

HERE = Path(__file__).parent / "emulation"
FOLDER = Path(tempfile.gettempdir()) / "deeprnn-emulation"
OPTIONS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC")


def compiled(text: str, headers: Mapping[str, str]) -> ctypes.CDLL:
    """Machine code of a source text, kept by its hash: another test may want the same."""
    known = "".join(sorted(p.read_text() for p in HERE.iterdir())) + "".join(nvrtc.headers().values())
    key = hashlib.sha256("\0".join((text, *headers.values(), known, *OPTIONS)).encode()).hexdigest()[:24]
    path = FOLDER / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for header_name, content in {**nvrtc.headers(), **headers}.items():
                if not (HERE / header_name).exists():
                    (folder / header_name).write_text(content)
            (folder / "kernel.cpp").write_text(text)
            command = ["g++", *OPTIONS, f"-I{HERE}", f"-I{folder}", "-o", str(folder / "kernel.so")]
            subprocess.run([*command, str(folder / "kernel.cpp")], check=True)
            FOLDER.mkdir(exist_ok=True)
            (folder / "kernel.so").rename(path) if _same(folder, FOLDER) else path.write_bytes(
                (folder / "kernel.so").read_bytes()
            )
    return ctypes.CDLL(str(path))


def _same(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


class EmulatedKernel:
    """Stands in for a loaded kernel of the loop: runs the source in the calling thread."""

    def __init__(self, plan: KernelPlan, own: Code) -> None:
        text = "".join(f"#define {name} {value}\n" for name, value in macros_of(plan, own).items())
        text += "#define __CUDA_ARCH_FEAT 900\n" + (nvrtc.FOLDER / plan.source).read_text()
        place = "float* memory = (float*)machine.memory[machine.now->rank].data();"
        for declaration in ("unsigned char memory[];", "float memory[];"):
            text = text.replace(f"extern __shared__ __align__(128) {declaration}", place)
        text = text.replace("#if __CUDA_ARCH__ >= 900", "#if 1") + '\n#include "run.h"\n'
        self.plan = plan
        self.run = compiled(text, {"cell.cuh": header(own)}).run
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
def emulated_kernel(plan: KernelPlan, own: Code, device: int = 0) -> EmulatedKernel:
    """As `launch.load_kernel`."""
    return EmulatedKernel(plan, own)
