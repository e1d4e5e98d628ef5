"""CUDA backend: one persistent kernel a direction unrolls a cell over the whole sequence (docs/kernels.md).

Its modules are imported where they are used: what is shared with training on a CPU (`nvrtc`) should not load them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from deeprnn.backends.call import Case, Gradients, InputProjection, Inputs, ProjectionCase
from deeprnn.backends.cuda.device import Device, device_of, index_of
from deeprnn.backends.protocol import DirectCall
from deeprnn.backends.wiring import Wiring
from deeprnn.cells.adjoint import Adjoint
from deeprnn.cells.description import CellDescription

PRECISIONS = ("fp32", "bf16")


class Cuda:
    """Cells whose weights stay on the chip for the whole sequence."""

    name = "cuda"

    def why_not(self, case: Case) -> str | None:
        """None where this backend can serve, else the reason and the remedy in a sentence."""
        if case.device.type != "cuda":
            return f"the cuda backend cannot serve tensors on {case.device}: move them to a GPU with .cuda()"
        if not torch.cuda.is_available():
            return "no CUDA device is available: use backend='cpu'"
        if torch.version.cuda is None:
            return "the cuda backend needs an NVIDIA GPU: use backend='reference'"
        if case.dtype != torch.float32:
            return f"the cuda backend computes in float32, not {case.dtype}: cast the model with .float()"
        if case.precision not in PRECISIONS:
            return f"the cuda backend has no precision {case.precision!r}: use one of {', '.join(PRECISIONS)}"
        capability = torch.cuda.get_device_capability(case.device)
        if capability < (7, 0):
            return f"compute capability {capability[0]}.{capability[1]} is below 7.0: use backend='reference'"
        return why_not_planned(case.cell, case.precision == "bf16", device_of(index_of(case.device)))

    def describe(self, case: Case, batch: int) -> str:
        """The kernel of the forward pass."""
        device = device_of(index_of(case.device))
        return describe_plan(case.cell, batch, bf16=case.precision == "bf16", device=device)["forward"]

    def forward(self, case: Case, inputs: Inputs, keep: bool) -> list[Tensor]:
        """Every output of every step, and with `keep` what the backward pass needs."""
        from deeprnn.backends.cuda.recurrence import run

        assert inputs.A is not None
        with current_device(inputs.A):
            return run.forward(case, inputs, keep)

    def backward(
        self, case: Case, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
    ) -> Gradients:
        """The gradients of pre-activations and first states."""
        from deeprnn.backends.cuda.recurrence import run

        with current_device(stored[0]):
            return run.backward(case, gradients, stored, inputs)

    def matrix_gradients(
        self, adjoint: Adjoint, delta: Tensor, stored: Sequence[Tensor], inputs: Inputs
    ) -> list[Tensor]:
        """The gradient of every matrix, on Hopper's tensor cores where that is faster; no gradient is recorded."""
        from deeprnn.backends import gradients
        from deeprnn.backends.cuda.gemm import weight_sums

        if not weight_sums.serves(adjoint, delta, inputs.members or 1):
            return gradients.matrix_gradients(adjoint, delta, stored, inputs)
        with current_device(delta):
            sums = weight_sums.WeightSums(adjoint, stored, inputs)
            sums.start()
            return gradients.scatter_to_matrices(adjoint, sums.finish(delta)[0])

    def serves_projection(self, case: Case, projection: InputProjection, inputs: Inputs) -> bool:
        """Whether the input's product should be taken in one with the loop."""
        from deeprnn.backends.cuda.input_projection import serves

        return serves(case, projection, inputs)

    def forward_with_projection(
        self, projection_case: ProjectionCase, projection: InputProjection, inputs: Inputs, keep: bool
    ) -> list[Tensor]:
        """As `forward`, of the input's product."""
        from deeprnn.backends.cuda.input_projection import forward

        with current_device(projection.x):
            return forward(projection_case, projection, inputs, keep)

    def backward_with_projection(
        self,
        projection_case: ProjectionCase,
        gradients: Sequence[Tensor | None],
        stored: Sequence[Tensor],
        projection: InputProjection,
        inputs: Inputs,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of everything that is wanted."""
        from deeprnn.backends.cuda.input_projection import backward

        with current_device(projection.x):
            return backward(projection_case, gradients, stored, projection, inputs, needed)

    def direct_call(self, projection_case: ProjectionCase, wiring: Wiring) -> DirectCall | None:
        """A layer's whole call at these shapes as recorded launches, where nothing else lies between them."""
        from deeprnn.backends.cuda.direct import direct_call

        return direct_call(projection_case, wiring)


def why_not_planned(cell: CellDescription, bf16: bool, device: Device) -> str | None:
    """None where a persistent kernel can hold the cell, else why not."""
    from deeprnn.backends.cuda.recurrence.planning import make_plan
    from deeprnn.backends.cuda.recurrence.schedule import NotScheduled, schedule

    try:
        for backward in (False, True):
            if make_plan(schedule(cell, backward), 1, 1, bf16, device) is None:
                widest = max(stage.size for stage in cell.stages)
                return f"the weights of stages of up to {widest} units do not fit on the chip: use backend='stepwise'"
    except NotScheduled as reason:
        return f"{reason}: use backend='stepwise'"
    return None


def current_device(x: Tensor) -> AbstractContextManager:
    """Make the tensor's GPU the current one, where it is not."""
    if not x.is_cuda or torch.cuda.current_device() == x.device.index:
        return nullcontext()
    return torch.cuda.device(x.device)


def describe_plan(
    cell: CellDescription, batch: int = 1, members: int = 1, bf16: bool = False, device: Device | None = None
) -> dict[str, str]:
    """What would run in either direction, for a person; without a device the answer is for an H200."""
    from deeprnn.backends.cuda.recurrence.planning import make_plan
    from deeprnn.backends.cuda.recurrence.schedule import NotScheduled, schedule

    target, plans = device or Device(), {}
    for name, backward in (("forward", False), ("backward", True)):
        try:
            plan = make_plan(schedule(cell, backward), batch, members, bf16, target)
            plans[name] = "stepwise: library products" if plan is None else plan.describe()
        except NotScheduled as reason:
            plans[name] = f"stepwise: {reason}"
    return plans


BACKEND = Cuda()
