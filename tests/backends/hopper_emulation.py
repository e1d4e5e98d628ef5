"""Kernels of warpgroup products on the CPU: their own sources, threads as fibres (see emulation/hopper.cuh)."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from deeprnn.backends.cuda import nvrtc
from tests.backends.compiling import library
from tests.backends.grid import fresh_seed

HALF = b"_Float16 x;"


def needs_half() -> None:
    """Skip where there is no g++ that knows fp16."""
    compiler = shutil.which("g++")
    if (
        compiler is None
        or subprocess.run(
            [compiler, "-fsyntax-only", "-xc++", "-"], input=HALF, check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("the emulation needs a g++ with _Float16")


class Blocks:
    """Has the `launch` of `driver.Kernel`; the product of a warpgroup is a function of the emulation."""

    def __init__(self, source: str, name: str, macros: Mapping[str, str], shared: int):
        given = {**macros, "MULTIPLY(d, a, b, add)": "multiply(d, a, b, add)"}
        text = "".join(f"#define {k} {v}\n" for k, v in given.items())
        text += (nvrtc.FOLDER / source).read_text()
        # Shared memory begins at address 0; the array itself is never touched.
        text = re.sub(
            r"(extern )?__shared__ __align__\(128\) unsigned char (\w+)\[.*?\];", r"u8* \2 = nullptr;", text
        )
        text = re.sub(r'asm volatile\("" : .*?\);', "", text)
        text += f'\n#define KERNEL {name}\n#define JOB Job\n#include "blocks.h"\n'
        self.run, self.shared = library(text).run, shared
        self.run.restype = ctypes.c_char_p

    def launch(
        self, grid: int, threads: int, arguments: list, device: Any, rows: int = 1, stream: int | None = None
    ) -> None:
        """Run all blocks, one after the other."""
        seed = fresh_seed()
        error = self.run(ctypes.byref(arguments[0]), grid, rows, threads, self.shared, seed)
        assert error is None, f"{error.decode()} (order of threads by seed {seed})"
