"""From tensors to a kernel launch: fill the parameter block, find or compile the kernel, launch it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends import TransitionSpec
from deeprnn.backends.cuda import nvrtc, planning
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.largest import Case, Look
from deeprnn.backends.cuda.planning import SHARED_LIMIT, Device, Plan, Ring, macros, make_plan, ring
from deeprnn.backends.cuda.wide import WidePlan

logger = logging.getLogger("deeprnn")
SOURCES = {"cluster": "cluster.cu", "mma": "mma.cu", "wide": "wide.cu", "generic": "generic.cu"}


@lru_cache(maxsize=16)
def device_of(index: int) -> Device:
    """What the plan must know of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    shared = int(getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT))
    return Device((properties.major, properties.minor), shared, properties.multi_processor_count)


@lru_cache(maxsize=1024)
def kernel_of(plan: Plan, stages: Ring, has_reset: bool, has_grad_mid: bool, device: int) -> Kernel:
    """The compiled and loaded kernel of a plan."""
    logger.info("deeprnn CUDA kernel, %s: %s", "backward" if stages.backward else "forward", plan.describe())
    defines = macros(plan, stages, has_reset, has_grad_mid)
    code = nvrtc.cubin(SOURCES[plan.path], defines, plan.arch(device_of(device)))
    return Kernel(code, "transition", device, plan.shared, plan.cluster, isinstance(plan, WidePlan))


class Prepared(NamedTuple):
    """Everything about a launch that does not depend on where the tensors lie."""

    plan: Plan
    stages: Ring
    kernel: Kernel
    order: tuple[int, ...]  # where the kernel's matrices are among W and S


@lru_cache(maxsize=4096)
def prepared(
    spec: TransitionSpec, batch: int, members: int, company: int, bf16: bool, backward: bool,
    has_reset: bool, has_grad_mid: bool, device: int,
) -> Prepared:  # fmt: skip
    """Planned, compiled and loaded; `company` is what the plan was made for (see `expect_company`)."""
    stages = ring(spec, backward)
    plan = make_plan(spec, batch, members, bf16, backward, device_of(device))
    return _prepared(plan, stages, spec, has_reset, has_grad_mid, device)


def _prepared(
    plan: Plan, stages: Ring, spec: TransitionSpec, has_reset: bool, has_grad_mid: bool, device: int
) -> Prepared:
    kernel = kernel_of(plan, stages, has_reset, has_grad_mid, device)
    return Prepared(plan, stages, kernel, order_of(stages, spec))


def order_of(stages: Ring, spec: TransitionSpec) -> tuple[int, ...]:
    """Where each of the kernel's matrices is among all W and then all S."""
    shortcuts = [l for l in range(spec.depth) if spec.shortcuts[l]]
    return tuple(l if kind == "W" else spec.depth + shortcuts.index(l) for kind, l in stages.names)


def forward(
    A: Tensor, h0: Tensor, W: Sequence[Tensor], S: Sequence[Tensor], reset: Tensor | None,
    spec: TransitionSpec, bf16: bool, h: Tensor, z: Tensor, plan: Plan | None = None, looked: Look | None = None,
) -> None:  # fmt: skip
    """Fill h ([P,] T, B, H) and z ([P,] T, B, ΣM-H) from A ([P,] T, B, ΣM). `looked`: `look_ahead`, begun."""
    ready = _ready(h, spec, bf16, False, reset is not None, False, plan)
    A, h0 = _rows(A, 3), _rows(h0, 2)
    strides = [A.stride(0), h0.stride(0)] if A.dim() == 4 else [0, 0]
    _launch(ready, _matrices(ready, W, S, bf16), [A, None, h, z, h0, None, None, reset], strides, h, looked)


def backward(
    dh: Tensor, dz: Tensor | None, h: Tensor, z: Tensor, W: Sequence[Tensor], S: Sequence[Tensor],
    reset: Tensor | None, spec: TransitionSpec, bf16: bool, dA: Tensor, dh0: Tensor | None,
    plan: Plan | None = None, after: Tensor | None = None, looked: Look | None = None,
) -> None:  # fmt: skip
    """Fill dA ([P,] T, B, ΣM) and dh0 ([P,] B, H).

    The tensor-core kernel can go through a stretch of a sequence: `after` is dA (B, ΣM) of the step that follows,
    dh0 is None where steps come before, and the marks' row that follows is read as well. `looked`: `look`, begun.
    """
    dh, h, z = dh.contiguous(), h.contiguous(), z.contiguous()
    dz = _wanted(dz, spec)
    ready = _ready(h, spec, bf16, True, reset is not None, dz is not None, plan)
    several = h.dim() == 4 and len(h) > 1
    if (after is not None or dh0 is None) and (several or ready.plan.path != "mma"):
        raise ValueError("only the tensor-core kernel of one model goes through a stretch of a sequence")
    _launch(ready, _matrices(ready, W, S, bf16), [dh, dz, h, z, after, dA, dh0, reset], [0, 0], h, looked)


def look(
    dh: Tensor, dz: Tensor | None, W: Sequence[Tensor], S: Sequence[Tensor], spec: TransitionSpec, bf16: bool,
    has_reset: bool, plan: Plan | None = None,
) -> Look | None:  # fmt: skip
    """What `backward` would look at before its loop, if its kernel does: to be begun. dh is contiguous."""
    dz = _wanted(dz, spec)
    ready = _ready(dh, spec, bf16, True, has_reset, dz is not None, plan)
    if ready.plan.path != "mma":
        return None
    return _look(ready, _matrices(ready, W, S, bf16), dh, dz, 0, dh)


def look_ahead(
    x: Tensor, W: Sequence[Tensor], S: Sequence[Tensor], spec: TransitionSpec, bf16: bool, has_reset: bool,
    plan: Plan | None = None,
) -> Look | None:  # fmt: skip
    """What `forward` would look at before its loop, where that is the matrices alone: to be begun. x is (T, B, any)."""
    ready = _ready(x, spec, bf16, False, has_reset, False, plan)
    if ready.plan.path != "mma" or planning.unbounded(ready.stages):
        return None
    return _look(ready, _matrices(ready, W, S, bf16), None, None, 0, x)


def _wanted(dz: Tensor | None, spec: TransitionSpec) -> Tensor | None:
    return dz.contiguous() if dz is not None and spec.depth > 1 else None


def _look(
    ready: Prepared, matrices: list[tuple[Tensor, int, int, int]], given: Tensor | None, mid: Tensor | None,
    stride: int, h: Tensor,
) -> Look:  # fmt: skip
    members, steps, batch = h.shape[:-1] if h.dim() == 4 else (1, *h.shape[:-1])
    case = Case(members, steps, batch, stride, mid is not None)
    arch = ready.plan.arch(device_of(h.device.index))
    return Look(ready.stages, case, matrices, (given, mid), h.device, arch)


def _ready(
    h: Tensor, spec: TransitionSpec, bf16: bool, backward: bool, has_reset: bool, has_grad_mid: bool,
    plan: Plan | None,
) -> Prepared:  # fmt: skip
    batch, members, device = h.shape[-2], h.shape[0] if h.dim() == 4 else 1, h.device.index
    if plan is None:
        case = spec, batch, members, planning._company.size, bf16, backward, has_reset, has_grad_mid, device
        return prepared(*case)
    return _prepared(plan, ring(spec, backward), spec, has_reset, has_grad_mid, device)


def _rows(x: Tensor, own: int) -> Tensor:
    """x with each member's block, its last `own` dimensions, contiguous; members made by expand stay so."""
    return x if x.dim() > own and x[0].is_contiguous() else x.contiguous()


def _matrices(
    ready: Prepared, W: Sequence[Tensor], S: Sequence[Tensor], bf16: bool
) -> list[tuple[Tensor, int, int, int]]:
    """Each matrix as the kernel sees it: its tensor and the strides of member, output row and inner column."""
    plan, backward, given = ready.plan, ready.stages.backward, [*W, *S]
    rounded = bf16 and (plan.path == "generic" or not plan.bf16)  # the kernel keeps what it is given
    found = []
    for place in ready.order:
        m = given[place].bfloat16().float() if rounded else given[place]
        if plan.path == "generic":  # this kernel reads rows of 32 outputs: they must be adjacent
            m = m.contiguous() if backward else m.mT.contiguous().mT
        *member, row, column = m.stride()
        row, column = (column, row) if backward else (row, column)
        found.append((m, member[0] if member else 0, row, column))
    return found


def _launch(
    ready: Prepared, matrices: list[tuple[Tensor, int, int, int]], pointers: list[Tensor | None],
    strides: list[int], h: Tensor, looked: Look | None = None,
) -> None:  # fmt: skip
    """`strides` are those of A's and h0's members; h is the state of all steps, ([P,] T, B, H)."""
    plan, reset, device = ready.plan, pointers[-1], h.device
    members, steps, batch = h.shape[:-1] if h.dim() == 4 else (1, *h.shape[:-1])
    groups = -(-batch // plan.rows)
    fields: list[int] = []
    for tensor, *member_row_column in matrices:
        fields += [tensor.data_ptr(), *member_row_column]
    fields += [0 if x is None else x.data_ptr() for x in pointers]
    reset_stride = 0 if reset is None or reset.dim() == 2 else reset.stride(0)
    fields += [*strides, reset_stride, steps, batch, groups]
    blocks, items = groups * members * plan.cluster, groups * members
    if isinstance(plan, WidePlan):
        share = -(-items // plan.teams)
        teams = -(-items // share)
        exchange = torch.zeros(teams * plan.words, dtype=torch.int32, device=device)
        fields += [exchange.data_ptr(), items, share]
        blocks = teams * plan.team
    elif plan.words:
        exchange = torch.empty(items * plan.words, dtype=torch.int32, device=device)
        fields += [exchange.data_ptr(), 0, 0]
    else:
        fields += [0, 0, 0]
    if plan.path == "mma":
        looked = looked or _look(ready, matrices, pointers[0], pointers[1], strides[0], h).begin()
        fields += looked.addresses
    else:
        fields += [0, 0]
    block = (ctypes.c_int64 * len(fields))(*fields)
    ready.kernel.launch(blocks, plan.threads, [block], device)
