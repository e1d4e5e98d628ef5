"""The CUDA backend without a GPU: tensors on the CPU stand in for those on a card, and launches do nothing.

What the host does for a call is then what it does for a card, so that it can be counted and profiled anywhere
(`tests/backends/test_host_work.py`), and every kernel that a call would launch is asked for, so that worker processes
can compile them ahead (`gpu_layers.py`). Results are numbers of no meaning: kernels compute nothing.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from deeprnn.backends import choose, cuda, direct, registry, unrolling
from deeprnn.backends.cuda import driver, nvrtc
from deeprnn.backends.cuda.device import Device

H200 = Device()


def _modules() -> list[ModuleType]:
    """Every module of the backend, loaded: one that loads later would keep the double's functions."""
    folder = Path(cuda.__path__[0])
    names = sorted(path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py"))
    return [importlib.import_module(".".join((cuda.__name__, *n)).removesuffix(".__init__")) for n in names]


def _forget() -> None:
    """Empty every cache of the backend: what was found with a card's double is not meant for the real one."""
    for module in (*_modules(), choose):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    unrolling._projection_cases.clear()
    direct._calls.clear()
    direct._seen_once.clear()


def _without_module(self: Any, code: bytes, name: str, device: int, shared: int = 0, cluster: int = 1,
                    cooperative: bool = False) -> None:  # fmt: skip
    self.function, self.shared, self.cluster, self.cooperative = (
        ctypes.c_void_p(),
        shared,
        cluster,
        cooperative,
    )


@contextmanager
def _training() -> Iterator[None]:
    """What training launches beside the loop, too: noise, step, a softmax over many classes, a NADE."""
    from deeprnn.model import large_softmax, nade_loss
    from deeprnn.training import fused, updater

    with ExitStack() as stack:
        for module in (fused, updater, nade_loss, large_softmax):
            stack.enter_context(patch.object(module, "nvidia", lambda device: True))
        stack.enter_context(patch.object(fused, "device_of", lambda index: H200))
        stack.enter_context(patch.object(driver, "stream_of", lambda device: None))
        for cached in (fused._kernel, large_softmax._kernel):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield


@contextmanager
def rehearsal(
    compile: bool = False, launched: Callable[[], Any] | None = None, training: bool = False
) -> Iterator[None]:
    """Inside, layers on the CPU run as on an H200. `compile`: kernels into the cache on disk; `launched`: by each.

    With `training` so do the updates and scores of `deeprnn.training`.
    """

    class Library:
        @staticmethod
        def cuLaunchKernelEx(*_: Any) -> int:
            if launched is not None:
                launched()
            return 0

        cuMemcpyDtoDAsync_v2 = cuMemsetD32Async = cuLaunchKernelEx

    _forget()
    with ExitStack() as stack:
        for module in _modules():
            if hasattr(module, "device_of"):
                stack.enter_context(patch.object(module, "device_of", lambda index: H200))
            if hasattr(module, "hopper"):
                stack.enter_context(patch.object(module, "hopper", lambda device: True))
        if not compile:
            stack.enter_context(patch.object(nvrtc, "cubin", lambda *given: b""))
        stack.enter_context(patch.object(driver.Kernel, "__init__", _without_module))
        stack.enter_context(patch.object(driver, "library", Library))
        stack.enter_context(patch.object(driver, "ensure_context", lambda device: None))
        stack.enter_context(patch.object(driver, "_raw_device", lambda: 0))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(patch.object(direct, "DEVICES", ("cpu",)))
        stack.enter_context(patch.object(cuda.Cuda, "why_not", lambda self, case: None))
        stack.enter_context(patch.dict(registry.PREFERENCE, {"cpu": ("cuda",)}))
        if training:
            stack.enter_context(_training())
        try:
            yield
        finally:
            _forget()
