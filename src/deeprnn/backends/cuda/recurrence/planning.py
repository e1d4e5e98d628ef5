"""Which persistent kernel serves a schedule, and in which shape: the cheapest by the kernels' cost models."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.cluster_plans import ClusterPlan, cluster_plans
from deeprnn.backends.cuda.recurrence.plans import KernelPlan
from deeprnn.backends.cuda.recurrence.schedule import Schedule
from deeprnn.backends.cuda.recurrence.tensor_core_plans import tensor_core_plans
from deeprnn.backends.cuda.recurrence.whole_card_plans import whole_card_plan
from deeprnn.backends.cuda.recurrence.whole_card_tensor_core_plans import (
    WholeCardTensorCorePlan,
    whole_card_tensor_core_plans,
)

TENSOR_CORES = True  # whether their kernel may be chosen


@lru_cache(maxsize=4096)
def make_plan(schedule: Schedule, batch: int, members: int, bf16: bool, device: Device) -> KernelPlan | None:
    """The cheapest shape that fits, None where no persistent kernel can serve.

    For FFMA weights in bf16 have to be unpacked at every use, which takes twice the time: where they fit in fp32,
    they are rounded beforehand and kept so.
    """
    batch, members, hopper = max(batch, 1), max(members, 1), device.capability[0] >= 9
    tensor_core: tuple[KernelPlan, ...] = ()
    if hopper and TENSOR_CORES and batch > 1:
        tensor_core = tuple(tensor_core_plans(schedule, batch, members, bf16, device))
    if hopper and TENSOR_CORES:  # weights of any size, also for one batch row
        tensor_core += tuple(whole_card_tensor_core_plans(schedule, batch, members, device))
    plans: list[KernelPlan] = []
    for bf16_weights in (False, True) if bf16 else (False,):
        ffma = cluster_plans(schedule, batch, members, bf16_weights, device) if hopper else ()
        best = min(chain(ffma, tensor_core), key=lambda plan: plan.cost, default=None)
        try_whole_card = best is None or isinstance(best, WholeCardTensorCorePlan)
        if try_whole_card or (isinstance(best, ClusterPlan) and batch * members > 1):  # perhaps in many waves
            whole = whole_card_plan(schedule, batch, members, bf16_weights, device)
            best = min(filter(None, (best, whole)), key=lambda plan: plan.cost, default=None)
        plans += [] if best is None else [best]
        if best is not None and not isinstance(best, WholeCardTensorCorePlan):
            break  # where weights fit in fp32, bf16 is not weighed
    return min(plans, key=lambda plan: plan.cost, default=None)
