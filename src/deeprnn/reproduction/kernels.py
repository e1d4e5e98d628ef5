"""How a GPU goes through time with a model: by which kernels, in which time a step, and whether others fit beside them.

Asked of the planner for an H200, wherever this runs: a plan is made before there is a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from deeprnn.cells.description import CellDescription
from deeprnn.cells.plans import PlanRequest, plan_of
from deeprnn.model.cell_level import CellLevel
from deeprnn.model.operator_specs import PlusSpec
from deeprnn.model.sequence_model import SequenceModel
from deeprnn.model.specs import ModelSpec
from deeprnn.model.transition import cell_of, why_not_described

if TYPE_CHECKING:
    from deeprnn.backends.cuda.device import Device
    from deeprnn.backends.cuda.recurrence.plans import KernelPlan

CLOCK = 1.98e9
"""cycles a second, in which the planner counts: DT(S) 400 takes 2.54 µs a step, as measured"""
SMALL_KERNELS = 4.5e-5
"""seconds of a step and level by small kernels, in a CUDA graph"""


class Loop(NamedTuple):
    """A model's recurrence on the card."""

    step: float
    """seconds, forward and backward, of all levels, with the card to itself"""
    small_kernels: str | None
    """why some level has a kernel for every stage and step; None where all have persistent ones"""
    share: float
    """of the card that a level's kernel takes for a whole sequence: 1 where it takes every processor there is"""

    @property
    def alone(self) -> bool:
        """Whether a GPU should train the model with nothing beside it.

        Small kernels of every step have to wait beside persistent ones, which hold their processors for a whole
        sequence, and several such models in one process wait for each other's calls. A kernel that takes the whole card
        leaves nothing for others, which only make it wait.
        """
        return self.small_kernels is not None or self.share >= 1

    @property
    def wide(self) -> bool:
        """Whether one of its launches leaves less than half of the card to others."""
        return self.share > 0.5


@lru_cache(maxsize=256)
def loop_of(spec: ModelSpec, rows: int, members: int = 1) -> Loop:
    """Of so many batch rows, and models in lockstep."""
    from deeprnn.backends.cuda.device import Device
    from deeprnn.backends.cuda.recurrence.planning import make_plan
    from deeprnn.backends.cuda.recurrence.schedule import NotScheduled, schedule

    step, small, share = 0.0, None, 0.0
    for number, level in enumerate(spec.levels):
        try:
            cell = _transition(spec, level, number) if isinstance(level, PlusSpec) else _gated(spec, number)
            plans = [
                make_plan(schedule(cell, backward), rows, members, False, Device())
                for backward in (False, True)
            ]
        except NotScheduled as reason:
            plans, small = [None], str(reason)
        persistent = [plan for plan in plans if plan is not None]
        if len(persistent) < 2:
            small, step = small or "its weights do not fit on the chip", step + SMALL_KERNELS
            continue
        step += sum(plan.cost for plan in persistent) / CLOCK
        share = max(share, *(_share(plan, rows * members, Device()) for plan in persistent))
    return Loop(step, small, share)


def _share(plan: KernelPlan, rows: int, device: Device) -> float:
    """Of a card's clusters of this size; below 1 where one is left, or the launch comes in waves."""
    if plan.cooperative:
        return 1.0
    clusters = -(-rows // plan.rows)
    return min(0.99, clusters / device.resident(plan.cluster))


def _transition(spec: ModelSpec, level: PlusSpec, number: int) -> CellDescription:
    """With the masks that training gives it."""
    from deeprnn.backends.cuda.recurrence.schedule import NotScheduled

    if (reason := why_not_described(level.unit_specs)) is not None:
        raise NotScheduled(reason)
    masks = SequenceModel(spec, "meta", initialise=False).mask_shapes(1, 1)
    layers = [f"{number}.z{n}" in masks for n in range(1, level.depth)]
    return cell_of(level, (*layers, False), f"{number}.state" in masks)


@lru_cache(maxsize=64)
def _gated(spec: ModelSpec, number: int) -> CellDescription:
    from deeprnn.backends.cuda.recurrence.schedule import NotScheduled

    level = SequenceModel(spec, initialise=False).levels[number]
    assert isinstance(level, CellLevel)
    plan = plan_of(level.cell, PlanRequest(torch.float32, torch.float32, "cpu"))
    if plan.traced is None:
        raise NotScheduled(f"the cell {level.spec.cell} runs as the plain loop")
    return plan.traced.cell
