"""Machine code for this processor: LLVM's target, compiled functions by what they compute, kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
from llvmlite import binding as llvm

from deeprnn.backends import code_cache
from deeprnn.backends.cpu.jit.builder import YIELD, Builder
from deeprnn.cells import expressions, functions

SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(functions.__file__), Path(expressions.__file__))
"""files that decide what machine code is written: kept code is thrown away when one changes"""
_COMPILING = threading.Lock()
_ADDRESSES: dict[str, int] = {}


class Machine(NamedTuple):
    """What of the processor decides the code."""

    vector_bytes: int
    registers: int
    """of vectors"""


class Compiler(NamedTuple):
    """LLVM for this processor."""

    target: Any
    engine: Any
    fingerprint: str
    """what compiled code depends on besides the program: processor, LLVM, the sources of the emitters"""


@lru_cache(maxsize=1)
def machine() -> Machine:
    """This processor."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(64, 32)
    if features.get("avx2"):
        return Machine(32, 16)
    arm = features.get("neon") or "aarch64" in llvm.get_process_triple()
    return Machine(16, 32 if arm else 16)


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """LLVM's target, and the engine that holds compiled code for as long as the process lives."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3, jit=True
    )
    system = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.windll.kernel32  # type: ignore[attr-defined]
    let_others_run = system.sched_yield if sys.platform != "win32" else system.SwitchToThread
    llvm.add_symbol(YIELD, ctypes.cast(let_others_run, ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    text = "\0".join([cpu, features, llvmlite.__version__, str(llvm.llvm_version_info), sys.platform])
    sources = b"\0".join(path.read_bytes() for path in SOURCES)
    return Compiler(target, engine, hashlib.sha256(text.encode() + sources).hexdigest())


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """None where LLVM can make and run code here, else the reason: it may not know the processor or the system."""
    try:
        address("probe", "", _probe)
    except (RuntimeError, OSError) as error:
        return f"LLVM cannot make code for this machine ({error})"
    return None


def _probe(name: str) -> str:
    b = Builder(name, [])
    b.b.ret_void()
    return b.text


def address(kind: str, program: object, write: Callable[[str], str]) -> int:
    """Where the machine code of a program begins; `write(name)` gives its LLVM text and is only called if need be.

    The program is named by its `repr`. Code is sought in this process, then on disk, and compiled otherwise.
    """
    made = compiler()
    key = repr((kind, program, machine(), made.fingerprint))
    name = f"deeprnn_{kind}_{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    with _COMPILING:
        if name not in _ADDRESSES:
            file = f"{name}.o"
            code = code_cache.read(file)
            if code is None:
                code = compiled(write(name))
                code_cache.keep(file, code)
            made.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            made.engine.finalize_object()
            _ADDRESSES[name] = made.engine.get_function_address(name)
    return _ADDRESSES[name]


def compiled(text: str) -> bytes:
    """The object code of a module."""
    module = llvm.parse_assembly(text)
    module.verify()
    return compiler().target.emit_object(module)
