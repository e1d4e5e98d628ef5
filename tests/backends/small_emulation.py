"""Kernels without clusters, compiled for the CPU by g++: the source as it is, the launch as the driver takes it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deeprnn.backends.cuda import nvrtc

HERE = Path(__file__).parent / "emulation"
EMULATED = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


class Small:
    """Has the `launch` of `driver.Kernel`."""

    def __init__(
        self,
        folder: Path,
        source: str,
        name: str,
        macros: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        for file_name, content in {**nvrtc.headers(), **(headers or {})}.items():
            (folder / file_name).write_text(content)
        text = "".join(f"#define {k} {v}\n" for k, v in (macros or {}).items())
        text += (nvrtc.FOLDER / source).read_text().replace('"common.cuh"', '"small.h"')
        file = folder / f"{name}.cpp"
        file.write_text(f"{text}\nRUN({name})\n")
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{folder}", f"-I{HERE}"]
        subprocess.run(["g++", *options, "-o", f"{file}.so", file], check=True)
        self.run = ctypes.CDLL(f"{file}.so").run

    def launch(
        self, grid: int, threads: int, arguments: list, device: Any, rows: int = 1, stream: int | None = None
    ) -> None:
        """Run all blocks, one after the other; there are no streams."""
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.run(addresses, grid, rows, threads)
