"""Kernels without clusters, compiled for the CPU by g++: the source as it is, the launch as the driver takes it."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from deeprnn.backends.cuda import nvrtc
from tests.backends.compiling import library

EMULATED = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++")


class Small:
    """Has the `launch` of `driver.Kernel`."""

    def __init__(
        self,
        source: str,
        name: str,
        macros: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        text = "".join(f"#define {k} {v}\n" for k, v in (macros or {}).items())
        text += (nvrtc.FOLDER / source).read_text().replace('"common.cuh"', '"small.h"')
        self.run = library(f"{text}\nRUN({name})\n", headers).run

    def launch(
        self, grid: int, threads: int, arguments: list, device: Any, rows: int = 1, stream: int | None = None
    ) -> None:
        """Run all blocks, one after the other; there are no streams."""
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.run(addresses, grid, rows, threads)
