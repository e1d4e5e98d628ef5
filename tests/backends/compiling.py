"""The kernels' own sources compiled for the CPU by g++: each text once, for all tests, processes and later runs."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from deeprnn.backends.cuda import nvrtc

HERE = Path(__file__).parent / "emulation"
FOLDER = Path(tempfile.gettempdir()) / "deeprnn-emulation"
OPTIONS = ("-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")


def library(text: str, headers: Mapping[str, str] | None = None) -> ctypes.CDLL:
    """Machine code of a source that sees the kernels' headers, the emulation's in their place, and `headers`."""
    files = {**nvrtc.headers(), **_stand_ins(), **(headers or {}), "kernel.cpp": text}
    return ctypes.CDLL(str(_compiled(files, "kernel.cpp", ".so", ["-include", str(_system_headers())])))


@cache
def _stand_ins() -> dict[str, str]:
    """Headers of the emulation, some by the name of one that they replace."""
    return {path.name: path.read_text() for path in sorted(HERE.iterdir())}


@cache
def _system_headers() -> Path:
    """What the emulation includes of the system, read by the compiler once: that takes longer than most kernels."""
    lines = sorted({line for text in _stand_ins().values() for line in re.findall(r"#include <.*>", text)})
    return _compiled(
        {"system.h": "\n".join(lines) + "\n"}, "system.h", ".h.gch", ["-xc++-header"]
    ).with_suffix("")


@cache
def _version() -> str:
    """The compiler's: another one does not read its headers."""
    return subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout


def _compiled(files: Mapping[str, str], main: str, ending: str, options: Sequence[str]) -> Path:
    """What the compiler makes of files, kept by a hash of them all."""
    parts = (
        *(f"{name}\n{content}" for name, content in sorted(files.items())),
        main,
        *OPTIONS,
        *options,
        _version(),
    )
    path = FOLDER / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}{ending}"
    if not path.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as name:
            folder = Path(name)
            for file, content in files.items():
                (folder / file).write_text(content)
            subprocess.run(["g++", *OPTIONS, *options, "-o", "result", main], cwd=folder, check=True)
            (folder / "result").rename(path)  # whole or not at all: two processes may compile the same
    return path
