"""Compile CUDA source at first use with NVRTC, and keep the result on disk.

NVRTC comes with torch's CUDA wheels, so neither nvcc nor a C++ compiler is needed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from deeprnn.backends import code_cache
from deeprnn.errors import UserError

FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++17",)
_lock = threading.Lock()


class CompileError(RuntimeError):
    """NVRTC refused a kernel: its log is in the message."""


def _candidates() -> Iterator[str]:
    """Places where libnvrtc may lie, torch's own first."""
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    site = Path(torch.__file__).parent.parent
    folders = [site / f"nvidia/cu{major}/lib", site / "nvidia/cuda_nvrtc/lib", site / "torch/lib"]
    folders += [Path(p) / "nvidia" / sub / "lib" for p in sys.path for sub in (f"cu{major}", "cuda_nvrtc")]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            folders += [Path(home) / "lib64", Path(home) / "lib", Path(home) / "targets/x86_64-linux/lib"]
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                yield str(folder / name)
    yield from names  # the loader's own search path
    if installed := ctypes.util.find_library("nvrtc"):
        yield installed


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libnvrtc, or an error that says where it was sought."""
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise UserError(
        "libnvrtc was not found, so the CUDA kernels cannot be compiled: install a CUDA build of torch, "
        "or set CUDA_HOME to a CUDA toolkit; or choose backend='reference'"
    )


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@lru_cache(maxsize=1)
def identity() -> str:
    """Which NVRTC would compile: told by its file, so that kernels found on disk never load it."""
    for path in _candidates():
        if os.path.isabs(path):
            status = os.stat(path)
            return f"{os.path.basename(path)} {status.st_size} {status.st_mtime_ns}"
    return str(version())


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """The text of every header beside the sources, by its name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.cuh"))}


def cubin(
    source: str, macros: Mapping[str, str], arch: str, generated: Mapping[str, str] | None = None
) -> bytes:
    """Machine code of a source file, by its path from this folder, from the disk where it has been compiled before.

    `generated` are headers written for this kernel, by name.
    """
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    text += (FOLDER / source).read_text(encoding="utf-8")
    included = headers() | dict(generated or {})
    parts = [text, *(f"{name}\n{header}" for name, header in included.items()), arch, *OPTIONS, identity()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    name = f"{Path(source).stem}-{arch}-{key}.cubin"
    code = code_cache.read(name)
    if code is None:
        code = compile_source(text, Path(source).name, included, arch)
        code_cache.keep(name, code)
    return code


def compile_source(text: str, name: str, headers: Mapping[str, str], arch: str) -> bytes:
    """One NVRTC compilation."""
    lib = library()
    program = ctypes.c_void_p()
    contents = (ctypes.c_char_p * len(headers))(*(h.encode() for h in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))
    with _lock:
        _check(
            lib,
            lib.nvrtcCreateProgram(
                ctypes.byref(program), text.encode(), name.encode(), len(headers), contents, names
            ),
        )
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = lib.nvrtcCompileProgram(program, len(options), array)
    try:
        if status != 0:
            log = _text(lib, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            raise CompileError(f"NVRTC could not compile {name} for {arch} (status {status}):\n{log}")
        return _text(lib, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, size_of)(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, get)(program, buffer))
    return buffer.raw


def _check(lib: ctypes.CDLL, status: int) -> None:
    if status != 0:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {lib.nvrtcGetErrorString(status).decode()}")
