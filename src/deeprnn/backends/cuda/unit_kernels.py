"""One kernel for a layer's unit at one step, in each direction: what `steps_loop` calls on a GPU.

Everything a kernel reads lies in one parameter block made before the loop; a launch changes nothing but the
step, so it costs the host a microsecond or two and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deeprnn.backends.cuda import driver, nvrtc
from deeprnn.backends.cuda.launch import device_of
from deeprnn.backends.stepwise.loop import Given, Layout, States, UnitAt

THREADS = 128
FEW = 128  # blocks
COLUMNS, INNER = 32, 8  # a tile's columns, and what the inner dimension is filled up to
CODES = {"sigmoid": 0, "tanh": 1, "relu": 2, "identity": 3, "lp": 4, "maxout": 5}
VIEWS = (
    *("pre", "out", "mask", "power", "before", "state_mask", "gradient", "exponent", "growth", "reset"),
    *("input", "matrix", "rest"),
)
COUNTS = ("steps", "rows", "size", "members", "inner", "tiles", "rest_size", "ahead")
Launch = Callable[["Params", int], None]  # parameters, step


class _View(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("member", "step", "row")))


class Params(ctypes.Structure):
    """The kernels' `Params`."""

    _fields_ = (
        *((name, _View) for name in VIEWS),
        *((n, ctypes.c_int64) for n in COUNTS),
    )


class Product(NamedTuple):
    """The product in front of a unit: input @ matrix, the first columns for the unit, the others for `rest`."""

    input: Tensor  # ([P,] T, B, inner)
    matrix: Tensor  # ([P,] inner, columns), padded: see `padded`
    own: int  # columns of the unit
    rest: Tensor | None = None
    ahead: int = 0  # the input is that of step t + ahead
    outside: bool = False  # backward: dL/dz has a part already


def padded(*parts: Tensor) -> Tensor:
    """Matrices (inner, n) side by side, each filled up with zeros to whole tiles."""
    below = -parts[0].shape[-2] % INNER
    return torch.cat([pad(m, (0, -m.shape[-1] % COLUMNS, 0, below)) for m in parts], -1)


def forward_tensors(layout: Layout, l: int, states: States, given: Given) -> dict[str, Tensor | None]:
    """What a layer's forward kernel reads and writes, by the names in units.cu."""
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
    return tensors


def forward(layout: Layout, states: States, given: Given) -> UnitAt:
    """φ at (layer, step)."""
    calls = [
        prepare("forward", layout, l, forward_tensors(layout, l, states, given), states.h, given.keep)
        for l in range(len(layout.units))
    ]
    return lambda l, t: calls[l](t)


def backward_tensors(
    layout: Layout, l: int, slope: Tensor, dA: Tensor, G: Sequence[Tensor], carry: Tensor, state_mask, reset
) -> dict[str, Tensor | None]:
    """What a layer's backward kernel reads and writes."""
    tensors = {"pre": layout.columns(slope, l), "out": layout.columns(dA, l), "gradient": G[l]}
    last = {"before": carry, "state_mask": state_mask, "reset": reset} if l == layout.last else {}
    return tensors | last


def backward(
    layout: Layout, slope: Tensor, dA: Tensor, G: Sequence[Tensor], carry: Tensor, state_mask, reset
) -> UnitAt:
    """dL/dpre at (layer, step)."""
    given = (slope, dA, G, carry, state_mask, reset)
    calls = [
        prepare("backward", layout, l, backward_tensors(layout, l, *given), G[-1])
        for l in range(len(layout.units))
    ]
    return lambda l, t: calls[l](t)


def prepare(
    name: str,
    layout: Layout,
    l: int,
    tensors: dict[str, Tensor | None],
    like: Tensor,
    keep: bool = False,
    product: Product | None = None,
) -> Callable[[int], None]:
    """A layer's kernel with its parameters: a function of the step. `like` is ([P,] T, B, H)."""
    lead = like.shape[:-3]
    if product is not None:
        tensors = tensors | {"input": product.input, "matrix": product.matrix, "rest": product.rest}
    tensors = {k: x if x is None or k == "reset" else _side_by_side(x) for k, x in tensors.items()}
    params = Params()
    for field, x in tensors.items():
        setattr(params, field, _view(field, x, len(lead)))
    params.steps, params.rows, params.size = like.shape[-3], like.shape[-2], layout.sizes[l]
    params.members = lead[0] if lead else 1
    unit = layout.units[l]
    macros = {"UNIT": CODES[unit.name], "POOL": unit.pool, "LAST": l == layout.last, "KEEP": keep}
    macros |= {n.upper(): tensors.get(n) is not None for n in ("mask", "state_mask", "reset")}
    if product is None:
        macros |= {"PRODUCT": False, "THREADS": THREADS}
        grid = (-(-params.members * params.rows * params.size // THREADS), 1)
    else:
        rows = next((n for n in (4, 8) if n >= params.rows), 16)
        grid = (product.matrix.shape[-1] // COLUMNS, params.members * -(-params.rows // rows))
        # With a block for each multiprocessor at most, more warps make it done sooner.
        threads = 512 if grid[0] * grid[1] <= FEW and product.input.shape[-1] > 128 else 256
        macros |= {"PRODUCT": True, "THREADS": threads, "ROWS": rows, "OUTSIDE": product.outside}
        params.inner, params.ahead = product.input.shape[-1], product.ahead
        params.tiles = -(-product.own // COLUMNS)
        params.rest_size = 0 if product.rest is None else product.rest.shape[-1]
    launch = launcher(name, tuple((k, int(v)) for k, v in macros.items()), grid, like.device)

    def call(step: int, _alive: Any = tensors) -> None:  # kept: the kernel reads at their addresses
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
def _kernel(name: str, macros: tuple[tuple[str, int], ...], device: int) -> driver.Kernel:
    code = nvrtc.cubin("units.cu", {k: str(v) for k, v in macros}, device_of(device).arch)
    return driver.Kernel(code, name, device)


def launcher(
    name: str, macros: tuple[tuple[str, int], ...], grid: tuple[int, int], device: torch.device
) -> Launch:
    """A kernel ready to be launched on the stream that is current now."""
    index = driver.index_of(device)
    kernel, library = _kernel(name, macros, index), driver.library()
    driver.ensure_context(index)
    stream = torch.cuda.current_stream(device).cuda_stream
    config = kernel.config(grid[0], dict(macros)["THREADS"], stream or None, grid[1])
    step = ctypes.c_int()
    pointers = (ctypes.c_void_p * 2)(None, ctypes.addressof(step))
    where = ctypes.byref(config)

    def launch(params: Params, t: int) -> None:
        pointers[0] = ctypes.addressof(params)
        step.value = t
        driver.check(library.cuLaunchKernelEx(where, kernel.function, pointers, None), f"launch of {name}")

    return launch
