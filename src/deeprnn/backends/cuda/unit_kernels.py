"""One kernel for a layer's unit at one step, in each direction: what `steps_loop` calls on a GPU.

Everything a kernel reads lies in one parameter block made before the loop; a launch changes nothing but the
step, so it costs the host a microsecond or two and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends.cuda import driver, nvrtc
from deeprnn.backends.cuda.launch import device_of
from deeprnn.backends.steps_loop import Given, Layout, States, UnitAt

THREADS = 128
CODES = {"sigmoid": 0, "tanh": 1, "relu": 2, "identity": 3, "lp": 4, "maxout": 5}
VIEWS = ("pre", "out", "mask", "power", "before", "state_mask", "gradient", "exponent", "growth", "reset")
Launch = Callable[["Params", int], None]  # parameters, step


class _View(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("member", "step", "row")))


class Params(ctypes.Structure):
    """The kernels' `Params`."""

    _fields_ = (
        *((name, _View) for name in VIEWS),
        *((n, ctypes.c_int64) for n in ("steps", "rows", "size", "members")),
    )


def forward(layout: Layout, states: States, given: Given) -> UnitAt:
    """φ at (layer, step)."""
    calls = []
    for l in range(len(layout.units)):
        last = l == layout.last
        tensors = {
            "pre": layout.columns(states.slope, l),
            "out": states.h if last else layout.place(states.z, l),
            "mask": given.masks[l],
            "power": layout.power(states.power, l) if layout.powers[l] else None,
            "before": states.before if last else None,
            "state_mask": given.state_mask if last else None,
            "reset": given.reset if last else None,
        }
        if layout.powers[l]:
            number = layout.learned(l)
            tensors |= {"exponent": given.exponents[number], "growth": given.growth[number]}
        calls.append(_prepare("forward", layout, l, tensors, states.h, given.keep))
    return lambda l, t: calls[l](t)


def backward(
    layout: Layout, slope: Tensor, dA: Tensor, G: Sequence[Tensor], carry: Tensor, state_mask, reset
) -> UnitAt:
    """dL/dpre at (layer, step)."""
    calls = []
    for l in range(len(layout.units)):
        last = l == layout.last
        tensors: dict[str, Tensor | None]
        tensors = {"pre": layout.columns(slope, l), "out": layout.columns(dA, l), "gradient": G[l]}
        if last:
            tensors |= {"before": carry, "state_mask": state_mask, "reset": reset}
        calls.append(_prepare("backward", layout, l, tensors, G[-1], False))
    return lambda l, t: calls[l](t)


def _prepare(
    name: str, layout: Layout, l: int, tensors: dict[str, Tensor | None], like: Tensor, keep: bool
) -> Callable[[int], None]:
    """A layer's kernel with its parameters: a function of the step. `like` is ([P,] T, B, H)."""
    lead = like.shape[:-3]
    tensors = {k: x if x is None or k == "reset" else _side_by_side(x) for k, x in tensors.items()}
    params = Params()
    for field, x in tensors.items():
        setattr(params, field, _view(field, x, len(lead)))
    params.steps, params.rows, params.size = like.shape[-3], like.shape[-2], layout.sizes[l]
    params.members = lead[0] if lead else 1
    unit = layout.units[l]
    flags = (tensors.get("mask"), tensors.get("state_mask"), tensors.get("reset"))
    macros = (
        CODES[unit.name],
        unit.pool,
        *(int(x is not None) for x in flags),
        int(l == layout.last),
        int(keep),
    )
    blocks = -(-params.members * params.rows * params.size // THREADS)
    launch = launcher(name, macros, blocks, like.device)

    def call(
        step: int, _alive: Any = tensors
    ) -> None:  # the tensors live as long as their addresses are used
        launch(params, step)

    return call


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _view(field: str, x: Tensor | None, lead: int) -> _View:
    """Address and strides of a tensor ([P,] [T,] B, n); the marks have no n, the exponents nothing else."""
    if x is None:
        return _View()
    strides = list(x.stride())
    member = strides.pop(0) if lead else 0
    if field in ("exponent", "growth"):
        return _View(x.data_ptr(), member, 0, 0)
    if field != "reset":
        strides.pop()
    step = strides.pop(0) if len(strides) == 2 else 0
    return _View(x.data_ptr(), member, step, strides[0])


@lru_cache(maxsize=256)
def _kernel(name: str, macros: tuple[int, ...], device: int) -> driver.Kernel:
    code = nvrtc.cubin("units.cu", defines(macros), device_of(device).arch)
    return driver.Kernel(code, name, device)


def defines(macros: Sequence[int]) -> dict[str, str]:
    """The macros that specialise units.cu."""
    names = ("UNIT", "POOL", "MASK", "STATE_MASK", "RESET", "LAST", "KEEP")
    return {"THREADS": str(THREADS), **{n: str(v) for n, v in zip(names, macros, strict=True)}}


def launcher(name: str, macros: tuple[int, ...], blocks: int, device: torch.device) -> Launch:
    """A kernel ready to be launched on the stream that is current now."""
    index = torch.cuda.current_device() if device.index is None else device.index
    kernel, library = _kernel(name, macros, index), driver.library()
    driver.ensure_context(index)
    stream = torch.cuda.current_stream(device).cuda_stream
    config = kernel.config(blocks, THREADS, stream or None)
    step = ctypes.c_int()
    pointers = (ctypes.c_void_p * 2)(None, ctypes.addressof(step))
    # The attribute and the step are kept by `config` and by this closure.
    where = ctypes.byref(config)

    def launch(params: Params, t: int) -> None:
        pointers[0] = ctypes.addressof(params)
        step.value = t
        driver.check(library.cuLaunchKernelEx(where, kernel.function, pointers, None), f"launch of {name}")

    return launch
