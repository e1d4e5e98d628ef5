"""Machine code from the programs of `cpu_programs.py`: compiled once for each plan, kept in the process."""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import lru_cache
from typing import Any

from llvmlite import binding as llvm

from deeprnn.backends.cpu.jit.emit import DOUBLE, FLOAT, YIELD
from deeprnn.backends.cpu.jit.packing import Packing
from deeprnn.backends.cpu.jit.plan import Plan
from deeprnn.backends.cpu.jit.programs import Backward, Forward

_COMPILING = threading.Lock()


@lru_cache(maxsize=1)
def machine() -> tuple[Any, Any, int, int]:
    """LLVM's target for this processor, the engine that holds compiled code, vector bytes and registers."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True
    )
    system = ctypes.CDLL(None) if sys.platform != "win32" else ctypes.windll.kernel32  # type: ignore[attr-defined]
    relax = system.sched_yield if sys.platform != "win32" else system.SwitchToThread
    llvm.add_symbol(YIELD, ctypes.cast(relax, ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    if features.get("avx512f"):
        return target, engine, 64, 32
    if features.get("avx2"):
        return target, engine, 32, 16
    return target, engine, 16, 32 if features.get("neon") or "aarch64" in target.triple else 16


@lru_cache(maxsize=256)
def compiled(plan: Plan, backward: bool) -> Any:
    """The function of a plan."""
    program = (Backward if backward else Forward)(plan)
    return _function(program.text, program.name, *program.arguments)


@lru_cache(maxsize=8)
def packing(double: bool, lanes: int, transposed: bool) -> Any:
    """The function that copies a matrix into panels."""
    program = Packing(DOUBLE if double else FLOAT, lanes, transposed)
    return _function(program.text, program.name, *program.ARGUMENTS)


def _function(text: str, name: str, pointers: int, counts: int) -> Any:
    """Compile; called through ctypes, which lets other Python threads run meanwhile."""
    _, engine, _, _ = machine()
    with _COMPILING:
        module = llvm.parse_assembly(text)
        module.verify()
        engine.add_module(module)
        engine.finalize_object()
        address = engine.get_function_address(name)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * pointers, *[ctypes.c_int64] * counts)(address)
