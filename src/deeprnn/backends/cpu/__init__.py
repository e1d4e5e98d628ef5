"""CPU backend: any cell by its derived backward pass, as machine code where llvmlite is there, else by torch calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module, metadata

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.gradients import aligned, aligned_member
from deeprnn.backends.protocol import DirectCall
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.description import CellDescription
from deeprnn.errors import UserError

logger = logging.getLogger("deeprnn")
DTYPES = (torch.float32, torch.float64)
PATHS = ("auto", "plain")
PATH = os.environ.get("DEEPRNN_CPU", "auto")
"""of `PATHS`: "plain" turns machine code off"""
MOST_WEIGHTS = 2**23
"""weights of a cell up to which machine code serves: more do not stay in caches, and packing them costs more than it
brings. A rule of the cell alone: a row of a batch has the same bits in every batch"""
OLDEST_LLVMLITE = (0, 45)
"""the first with untyped pointers"""


class Cpu:
    """Machine code serves cells of any kind; without it a population's members are computed one by one."""

    name = "cpu"

    def why_not(self, case: Case) -> str | None:
        """None where this backend can serve, else the reason and the remedy in a sentence."""
        if case.device.type != "cpu":
            return f"the cpu backend cannot serve tensors on {case.device}: move them to the CPU"
        if case.dtype not in DTYPES:
            return f"the cpu backend computes in float32 and float64, not {case.dtype}: cast the model with .float()"
        if case.precision != "fp32":
            return f"the cpu backend has no precision {case.precision!r}: use precision='fp32'"
        return None

    def describe(self, case: Case, batch: int) -> str:
        """One line: which of the two ways serves, and why."""
        reason = why_not_machine_code(case.cell)
        if reason is None:
            return "machine code made for each cell with llvmlite"
        return f"plain PyTorch calls with a derived backward: {reason}"

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """Every output of every step, and with `keep` what the backward pass needs."""
        if machine_code(case.cell):
            from deeprnn.backends.cpu.jit import run

            return run.forward(case.cell, inputs, keep)
        return _plain_forward(case, inputs, keep)

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """The gradients of pre-activations and first states."""
        if machine_code(case.cell):
            from deeprnn.backends.cpu.jit import run

            return run.backward(case.cell, gradients, stored, inputs)
        return _plain_backward(case, gradients, stored, inputs)

    def serves_projection(self, case: Case, projection: InputProjection, inputs: Inputs) -> bool:
        """Whether machine code takes the input's product, the loop and all sums of the backward pass."""
        if not machine_code(case.cell) or inputs.members is not None:
            return False
        from deeprnn.backends.cpu.jit import projecting

        return projecting.call_of(case.cell, projection, inputs, case.dtype) is not None

    def forward_with_projection(
        self, projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs, keep: bool
    ) -> list[Tensor]:
        """As `forward`, of `projection.A`."""
        from deeprnn.backends.cpu.jit import projecting

        return projecting.forward(projection_case, projection, inputs, keep)

    def backward_with_projection(
        self,
        projection_case: ProjectionCase,
        gradients: Sequence[Tensor | None],
        stored: Sequence[Tensor],
        projection: InputProjection,
        inputs: Inputs,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of x, U, b, states, matrices and vectors."""
        from deeprnn.backends.cpu.jit import projecting

        return projecting.backward(projection_case, gradients, stored, projection, inputs, needed)

    def direct_call(self, projection_case: ProjectionCase, wiring: Wiring) -> DirectCall | None:
        """A layer's whole call; one step is left to `single_step`."""
        from deeprnn.backends.cpu.jit.direct import DirectCall
        from deeprnn.backends.cpu.jit.layer import layer_call

        steps, _, inputs = projection_case.shape
        call = layer_call(wiring, inputs, projection_case.case.dtype) if steps > 1 else None
        return None if call is None else DirectCall(projection_case, call)


BACKEND = Cpu()


def machine_code(cell: CellDescription) -> bool:
    """Whether machine code serves a cell, at any length and batch; where not, the log says why, once."""
    reason = why_not_machine_code(cell)
    if reason is not None:
        _log_once(reason)
    return reason is None


def why_not_machine_code(cell: CellDescription) -> str | None:
    """None where machine code serves a cell, else the reason and the remedy."""
    if PATH not in PATHS:
        raise UserError(f"DEEPRNN_CPU={PATH!r} is unknown: use one of {', '.join(PATHS)}")
    if PATH == "plain":
        return "as asked for by DEEPRNN_CPU=plain"
    weights = sum(rows * columns for rows, columns in cell.matrices)
    if (reason := why_not_llvm()) is None and weights > MOST_WEIGHTS:
        return f"a cell of {weights:,} weights, more than {MOST_WEIGHTS:,}, is bound by reading them"
    return reason


@lru_cache(maxsize=1)
def why_not_llvm() -> str | None:
    """Why no machine code can be made here, None where it can."""
    try:
        version = metadata.version("llvmlite")
        import_module("llvmlite")
    except ImportError:
        return "faster with llvmlite: pip install 'deeprnn[fastcpu]'"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_LLVMLITE:
        return f"llvmlite {version} is too old: pip install -U 'deeprnn[fastcpu]'"
    from deeprnn.backends.cpu.jit import machine

    return machine.why_not()


@lru_cache(maxsize=8)
def _log_once(reason: str) -> None:
    logger.info("the cpu backend runs by plain PyTorch calls: %s", reason)


@torch.no_grad()
def _plain_forward(case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
    if inputs.members is None:
        return plain.forward(case.cell, inputs, keep)
    each = [plain.forward(case.cell, aligned_member(inputs, p), keep) for p in range(inputs.members)]
    return [torch.stack(members) for members in zip(*each, strict=True)]


@torch.no_grad()
def _plain_backward(
    case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
) -> Gradients:
    if inputs.members is None:
        return plain.backward(case.cell, gradients, stored, inputs)
    each = []
    for p in range(inputs.members):
        of_member = [None if g is None else aligned(g[p]) for g in gradients]
        each.append(
            plain.backward(case.cell, of_member, [aligned(x[p]) for x in stored], aligned_member(inputs, p))
        )
    states = [torch.stack(members) for members in zip(*(found.states for found in each), strict=True)]
    return Gradients(torch.stack([found.delta for found in each]), states)
