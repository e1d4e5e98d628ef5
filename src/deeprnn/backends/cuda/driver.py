"""The few calls of the CUDA driver that launch a compiled kernel, through ctypes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
LOCAL_BYTES, REGISTERS = 3, 4  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, _NUM_REGS
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
COOPERATIVE, CLUSTER_DIMENSION = 2, 4  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """libcuda, which every machine with an NVIDIA driver has."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("libcuda was not found: is an NVIDIA driver installed?")


def check(status: int, what: str) -> None:
    """Raise with the driver's own name for the error."""
    if status == 0:
        return
    name = ctypes.c_char_p()
    library().cuGetErrorName(status, ctypes.byref(name))
    raise DriverError(f"{what}: {name.value.decode() if name.value else status}")


def ensure_context(device: int) -> None:
    """Make torch's (primary) context current in this thread, as autograd's threads may not have it yet."""
    lib, current = library(), ctypes.c_void_p()
    check(lib.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    if current.value is None:
        check(lib.cuDevicePrimaryCtxRetain(ctypes.byref(current), device), "cuDevicePrimaryCtxRetain")
        check(lib.cuCtxSetCurrent(current), "cuCtxSetCurrent")


@lru_cache(maxsize=1)
def driver_version() -> int:
    """Of CUDA, as the driver counts: 12030 is 12.3."""
    version = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return version.value


class _Thread(threading.local):
    """What is known of the thread that asks."""

    device: int | None = None
    """the GPU whose context was found, or made, current"""
    recorder: Any = None
    """takes launches in the place of the card: `recording.Recorder`"""


_thread = _Thread()
# The address alone: torch.cuda.current_stream makes an object of it, at ten times the cost.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_device = getattr(torch._C, "_cuda_getDevice", None)


def stream_of(device: torch.device) -> int | None:
    """The address of the current stream, None without a GPU: worth asking once for several launches."""
    if device.type != "cuda":
        return None
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def current_device() -> int:
    """The index of the current GPU."""
    return torch.cuda.current_device() if _raw_device is None else _raw_device()


def allocate(like: Tensor, *sizes: int) -> tuple[Tensor, list[int]]:
    """Memory for so many bytes each, and where each begins: one allocation instead of several."""
    ends = list(accumulate(-(-size // 512) * 512 for size in sizes))
    memory = like.new_empty((ends[-1],), dtype=torch.uint8)
    start = memory.data_ptr()
    return memory, [start, *(start + end for end in ends[:-1])]


def _new_config(
    grid: int, rows: int, threads: int, shared: int, stream: int | None, cluster: int, cooperative: bool
) -> _Config:
    attribute = _Attribute(COOPERATIVE if cooperative else CLUSTER_DIMENSION, 0)
    attribute.value[:3] = (1, 0, 0) if cooperative else (cluster, 1, 1)
    count = 1 if cooperative or cluster > 1 else 0
    return _Config((grid, rows, 1), (threads, 1, 1), shared, stream, ctypes.pointer(attribute), count)


_config = lru_cache(maxsize=1024)(_new_config)
"""one for each kind of launch, never changed: threads may launch at the same moment"""


class PreparedCall(NamedTuple):
    """A call of the driver whose arguments lie ready, but for the stream: in `place.stream`, or the last of them."""

    function: Any
    arguments: tuple
    place: Any
    what: str


class _Stream(ctypes.Structure):
    """A stream as an argument that can be changed; by value it is passed as the pointer it holds."""

    _fields_ = (("stream", ctypes.c_void_p),)


def prepare_copy(parameters: ctypes.Array, size: int) -> PreparedCall:
    """A copy on the card; the parameters are the addresses, to and from."""
    to, source = (ctypes.c_uint64.from_buffer(parameters, 8 * i) for i in range(2))
    place = _Stream()
    arguments = to, source, ctypes.c_size_t(size), place
    return PreparedCall(library().cuMemcpyDtoDAsync_v2, arguments, place, f"copy of {size} B")


def prepare_fill(parameters: ctypes.Array, size: int) -> PreparedCall:
    """Zeros, in words of four bytes; the parameter is the address."""
    place = _Stream()
    arguments = ctypes.c_uint64.from_buffer(parameters), ctypes.c_uint(0), ctypes.c_size_t(size // 4), place
    return PreparedCall(library().cuMemsetD32Async, arguments, place, f"zeros for {size} B")


def replay(calls: Sequence[PreparedCall], stream: int | None) -> None:
    """All calls in order, on one stream of the current GPU."""
    current = current_device()
    if _thread.device != current:
        ensure_context(current)
        _thread.device = current
    stream = stream or None
    for function, arguments, place, what in calls:
        place.stream = stream
        status = function(*arguments)
        if status == INVALID_CONTEXT:  # another library took it away since this thread's last launch
            ensure_context(current)
            status = function(*arguments)
        if status:
            check(status, what)


@contextmanager
def recorded(recorder: Any) -> Iterator[None]:
    """Inside, this thread's launches go to a recorder (`recording.Recorder`) instead of the card."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


class Kernel:
    """A function of a loaded module, ready to be launched on torch's current stream."""

    def __init__(
        self,
        code: bytes,
        name: str,
        device: int,
        shared: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
    ):
        lib = library()
        torch.cuda.init()
        with torch.cuda.device(device):
            ensure_context(device)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(lib.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
            check(
                lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction"
            )
            if shared > 48 * 1024:
                check(
                    lib.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), f"{shared} B shared memory"
                )
            if cluster > 8:
                check(lib.cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER, 1), f"cluster of {cluster}")
        self.function, self.shared, self.cluster, self.cooperative = function, shared, cluster, cooperative

    def attribute(self, which: int) -> int:
        """An attribute of the compiled function, for reports."""
        value = ctypes.c_int()
        check(library().cuFuncGetAttribute(ctypes.byref(value), which, self.function), "cuFuncGetAttribute")
        return value.value

    def config(self, grid: int, threads: int, stream: int | None, rows: int = 1) -> _Config:
        """The launch description.

        A cooperative kernel starts only when all its blocks can run at once, so that blocks may wait for
        each other; it is never a kernel of clusters too.
        """
        return _config(grid, rows, threads, self.shared, stream, self.cluster, self.cooperative)

    def prepare_call(self, grid: int, rows: int, threads: int, parameters: ctypes.Array) -> PreparedCall:
        """A launch that reads its parameters where they lie, to be replayed several times."""
        config = _new_config(grid, rows, threads, self.shared, None, self.cluster, self.cooperative)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        what = f"launch of {grid} x {rows} blocks of {threads} threads, cluster {self.cluster}"
        arguments = ctypes.byref(config), self.function, pointers, None
        return PreparedCall(library().cuLaunchKernelEx, arguments, config, what)

    def launch(
        self,
        grid: int,
        threads: int,
        arguments: list,
        device: torch.device,
        rows: int = 1,
        stream: int | None = None,
    ) -> None:
        """Launch grid x rows blocks; `arguments` are ctypes values in the kernel's order.

        On the current stream, unless the address of another is given. A function belongs to one GPU's context,
        which is made the current one where it is not.
        """
        if _thread.recorder is not None:
            return _thread.recorder.launched(self, grid, rows, threads, arguments)
        current = current_device()
        if device.index is not None and device.index != current:
            with torch.cuda.device(device):
                return self.launch(grid, threads, arguments, device, rows, stream)
        stream = stream_of(device) if stream is None else stream
        if _thread.device != current:
            ensure_context(current)
            _thread.device = current
        config = self.config(grid, threads, stream or None, rows)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        start = library().cuLaunchKernelEx
        status = start(ctypes.byref(config), self.function, pointers, None)
        if status == INVALID_CONTEXT:  # another library took it away since this thread's last launch
            ensure_context(current)
            status = start(ctypes.byref(config), self.function, pointers, None)
        if status:
            check(status, f"launch of {grid} x {rows} blocks of {threads} threads, cluster {self.cluster}")
