"""From tensors to a kernel launch: fill the parameter block, find or compile the kernel, launch it."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

import torch
from torch import Tensor

from deeprnn.backends.cuda import nvrtc
from deeprnn.backends.cuda.device import Device, device_of
from deeprnn.backends.cuda.driver import Kernel
from deeprnn.backends.cuda.epilogue import Epilogue, EpilogueOptions, epilogue_of
from deeprnn.backends.cuda.recurrence.parameters import Arguments, headers, parameter_block
from deeprnn.backends.cuda.recurrence.planning import make_plan
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, listed
from deeprnn.backends.cuda.recurrence.schedule import Schedule, schedule
from deeprnn.cells.description import CellDescription

logger = logging.getLogger("deeprnn")


class LoadedKernel(NamedTuple):
    """Everything about a launch that does not depend on where the tensors lie."""

    plan: KernelPlan
    epilogue: Epilogue
    kernel: Kernel

    @property
    def schedule(self) -> Schedule:
        """The stages in the kernel's order."""
        return self.epilogue.schedule


@lru_cache(maxsize=4096)
def prepare(
    cell: CellDescription,
    batch: int,
    members: int,
    bf16: bool,
    backward: bool,
    options: EpilogueOptions,
    device: int,
) -> LoadedKernel:
    """Planned, compiled and loaded."""
    plan = make_plan(schedule(cell, backward), batch, members, bf16, device_of(device))
    assert plan is not None  # the backend has asked before
    return prepare_plan(plan, cell, backward, options, device)


def prepare_plan(
    plan: KernelPlan, cell: CellDescription, backward: bool, options: EpilogueOptions, device: int
) -> LoadedKernel:
    """The same for a plan that is given."""
    epilogue = epilogue_of(schedule(cell, backward), options)
    return LoadedKernel(plan, epilogue, load_kernel(plan, epilogue, device))


@lru_cache(maxsize=1024)
def load_kernel(plan: KernelPlan, epilogue: Epilogue, device: int) -> Kernel:
    """The compiled and loaded kernel of a plan."""
    direction = "backward" if epilogue.schedule.backward else "forward"
    logger.info("deeprnn CUDA kernel, %s: %s", direction, plan.describe())
    cubin = compile_plan(plan, epilogue, device_of(device))
    return Kernel(cubin, kernel_name(plan, epilogue), device, plan.shared, plan.cluster, plan.cooperative)


def kernel_name(plan: KernelPlan, epilogue: Epilogue) -> str:
    """The name that profilers show, such as `cluster_forward`."""
    return f"{PurePath(plan.source).stem}_{'backward' if epilogue.schedule.backward else 'forward'}"


def compile_plan(plan: KernelPlan, epilogue: Epilogue, device: Device) -> bytes:
    """The machine code of a plan's kernel; needs no GPU."""
    macros = {name: str(value) for name, value in macros_of(plan, epilogue).items()}
    return nvrtc.cubin(plan.source, macros, plan.arch(device), headers(epilogue))


def macros_of(plan: KernelPlan, epilogue: Epilogue) -> dict[str, int | str]:
    """The #defines of a kernel: the plan's, and what depends on the launch's options."""
    if not epilogue.schedule.backward:
        scanned = [1] * len(epilogue.schedule.stages)
    else:
        has_gradient = dict(zip(epilogue.schedule.cell.outputs, epilogue.options.gradients, strict=True))
        scanned = [
            int(any(has_gradient[o] for o in has_gradient if o.stage == stage.cell_stage))
            for stage in epilogue.schedule.stages
        ]
    return {**plan.macros(), "KERNEL": kernel_name(plan, epilogue), "SCANNED": listed(scanned)}


def launch(loaded: LoadedKernel, arguments: Arguments) -> None:
    """Fill the parameter block and launch, on the current stream."""
    stored, plan = arguments.stored[0], loaded.plan
    members = stored.shape[0] if stored.dim() == 4 else 1
    row_blocks = -(-stored.shape[-2] // plan.rows)
    grid = _grid(plan, row_blocks * members, stored, arguments.scratch)
    exchange = grid.exchange, grid.items, grid.share
    block = parameter_block(loaded.epilogue, arguments, stored, row_blocks, exchange)
    loaded.kernel.launch(grid.blocks, plan.threads, [block], stored.device)


class _Grid(NamedTuple):
    """The blocks of a launch, and what they share."""

    blocks: int
    exchange: int
    """address of the buffer through which blocks exchange vectors, 0: there is none"""
    items: int
    """row blocks of all members, where teams serve them one after the other"""
    share: int
    """how many of those a team serves"""


def _grid(plan: KernelPlan, items: int, like: Tensor, scratch: list[Tensor]) -> _Grid:
    words = plan.exchange_words
    if plan.cooperative:
        teams: int = plan.teams  # type: ignore[attr-defined]
        share = -(-items // teams)
        used = -(-items // share)
        exchange = like.new_zeros((plan.common_words + used * words,), dtype=torch.int32)
        scratch.append(exchange)
        return _Grid(used * plan.team, exchange.data_ptr(), items, share)  # type: ignore[attr-defined]
    if not words:
        return _Grid(items * plan.cluster, 0, 0, 0)
    exchange = like.new_empty((items * words,), dtype=torch.int32)
    scratch.append(exchange)
    return _Grid(items * plan.cluster, exchange.data_ptr(), 0, 0)
