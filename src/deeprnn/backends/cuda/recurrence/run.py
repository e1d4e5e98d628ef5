"""The persistent kernels' forward and backward pass of a cell: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deeprnn.backends import plain
from deeprnn.backends.call import Case, Gradients, Inputs
from deeprnn.backends.cuda.device import device_of
from deeprnn.backends.cuda.epilogue import Epilogue, EpilogueOptions
from deeprnn.backends.cuda.recurrence.launch import LoadedKernel, launch, prepare, prepare_plan
from deeprnn.backends.cuda.recurrence.max_abs_scan import MaxAbsScan, ScanShape, scanned_stages
from deeprnn.backends.cuda.recurrence.parameters import Arguments
from deeprnn.backends.cuda.recurrence.plans import KernelPlan
from deeprnn.backends.cuda.recurrence.schedule import inline_stages, sent_states, slope_of_sent
from deeprnn.backends.cuda.recurrence.tensor_core_plans import TensorCorePlan
from deeprnn.cells.adjoint import adjoint_of, chain_rule
from deeprnn.cells.description import CellDescription, Output
from deeprnn.cells.expressions import Expression, constant, fold, leaf, leaves_of
from deeprnn.cells.functions import FUNCTIONS

ONE = constant(1.0)


def forward(
    case: Case, inputs: Inputs, keep: bool, plan: KernelPlan | None = None, scan: MaxAbsScan | None = None
) -> list[Tensor]:
    """Every output of every step, and with `keep` what the backward pass needs; a caller has already started `scan`."""
    assert inputs.A is not None
    cell, lead = case.cell, inputs.A.shape[:-1]
    stored = [inputs.A.new_empty((*lead, n)) for n in stored_sizes(cell, keep)]
    if stored[0].numel() == 0:
        return stored
    inputs = dense(inputs)
    loaded = prepared(case, inputs, stored[0], EpilogueOptions(inputs.reset is not None, keep), False, plan)
    vectors: list[Tensor | None] = [None] * len(loaded.schedule.stages)
    for stage, vector in sent_vectors(cell, inputs, False).items():
        vectors[stage] = vector
    arguments = Arguments(rounded(inputs, case, loaded.plan), stored, vectors)
    if loaded.plan.keeps_locals_in_memory:
        arguments.locals = first_locals(loaded.epilogue, inputs, stored[0])
    if scan is None:
        scan = forward_scan(loaded, arguments.inputs, stored[0])
        scan = None if scan is None else scan.start()
    arguments.scanned = (0, 0) if scan is None else scan.addresses
    launch(loaded, arguments)
    return inlined_outputs(cell, stored, inputs)


def backward(
    case: Case,
    gradients: Sequence[Tensor | None],
    stored: Sequence[Tensor],
    inputs: Inputs,
    plan: KernelPlan | None = None,
    states: bool = True,
) -> Gradients:
    """The gradients of pre-activations and, where `states` are wanted, of the first ones."""
    like = stored[0]
    delta = like.new_empty(*like.shape[:-1], adjoint_of(case.cell).width)
    if delta.numel() == 0:
        return Gradients(delta, [torch.zeros_like(x) for x in inputs.states])
    gradients, first = moved_to_states(case.cell, gradients, stored, inputs)
    chunk = BackwardLaunch.of(case, gradients, stored, inputs, delta, plan=plan)
    if chunk.scan is not None:
        chunk.scan.start()
    chunk.launch()
    return Gradients(delta, with_first(chunk.state_gradients(), first) if states else [])


@dataclass
class BackwardLaunch:
    """A backward pass through a sequence, or a chunk of one; all memory is taken when it is made."""

    case: Case
    loaded: LoadedKernel
    arguments: Arguments
    scan: MaxAbsScan | None

    @classmethod
    def of(
        cls,
        case: Case,
        gradients: Sequence[Tensor | None],
        stored: Sequence[Tensor],
        inputs: Inputs,
        delta: Tensor,
        next_delta: Tensor | None = None,
        first: bool = True,
        plan: KernelPlan | None = None,
    ) -> BackwardLaunch:
        """`next_delta`: delta of the step that follows the chunk; `first`: no steps come before it."""
        cell, like = case.cell, stored[0]
        inputs, stored = dense(inputs), [x.contiguous() for x in stored]
        dense_gradients = [None if g is None else g.contiguous() for g in gradients]
        has_gradient = tuple(g is not None for g in dense_gradients)
        options = EpilogueOptions(inputs.reset is not None, gradients=has_gradient)
        loaded = prepared(case, inputs, like, options, True, plan)
        if (next_delta is not None or not first) and not isinstance(loaded.plan, TensorCorePlan):
            raise ValueError("only the tensor-core kernel goes through a chunk of a sequence")
        lead = (*like.shape[:-3], like.shape[-2])
        sums: list[Tensor | None] = [None] * len(loaded.schedule.stages)
        for stage, state in sent_states(cell, True).items():
            sums[stage] = like.new_empty(*lead, cell.states[state]) if first else None
        arguments = Arguments(
            rounded(inputs, case, loaded.plan),
            stored,
            (),
            dense_gradients,
            delta,
            sums,
            next_delta=next_delta,
        )
        if loaded.plan.keeps_locals_in_memory:
            arguments.locals = [like.new_zeros(*lead, n) for n in loaded.epilogue.slots]
        else:
            arguments.grad_initial_locals = [like.new_empty(*lead, n) for n in loaded.epilogue.slots]
        scan = _backward_scan(loaded, arguments.inputs, dense_gradients, like)
        return cls(case, loaded, arguments, scan)

    def launch(self) -> None:
        """On the current stream; a scan must have been started."""
        self.arguments.scanned = (0, 0) if self.scan is None else self.scan.addresses
        launch(self.loaded, self.arguments)

    def state_gradients(self) -> list[Tensor]:
        """Of the states before the first step."""
        cell, finals = self.case.cell, self.loaded.epilogue.finals
        sums = {s: x for s, x in enumerate(self.arguments.grad_initial_vectors) if x is not None}
        carried = [None if slot is None else self._carried(slot) for slot in finals]
        return [state_gradient(cell, self.arguments.inputs, i, sums, c) for i, c in enumerate(carried)]

    def _carried(self, slot: int) -> Tensor:
        in_memory = self.loaded.plan.keeps_locals_in_memory
        carried = (self.arguments.locals if in_memory else self.arguments.grad_initial_locals)[slot]
        assert carried is not None
        reset = self.arguments.inputs.reset
        if in_memory and reset is not None:
            return carried.masked_fill(reset.select(-2, 0).unsqueeze(-1), 0)
        return carried


def first_locals(epilogue: Epilogue, inputs: Inputs, like: Tensor) -> list[Tensor]:
    """Memory for what units carry from step to step, as it is before the first; `like` is ([P,] T, B, any)."""
    lead = (*like.shape[:-3], like.shape[-2])
    return [
        like.new_empty(*lead, n) if i is None else inputs.states[i].clone()
        for i, n in zip(epilogue.initial, epilogue.slots, strict=True)
    ]


stored_sizes = lru_cache(maxsize=1024)(plain.stored_sizes)


def prepared(
    case: Case,
    inputs: Inputs,
    like: Tensor,
    options: EpilogueOptions,
    backward: bool,
    plan: KernelPlan | None = None,
) -> LoadedKernel:
    """The kernel of a case, or of a plan that is given; `like` is ([P,] T, B, any)."""
    device = like.device.index or 0
    if plan is not None:
        return prepare_plan(plan, case.cell, backward, options, device)
    members = inputs.members or 1
    return prepare(case.cell, like.shape[-2], members, case.precision == "bf16", backward, options, device)


def forward_scan(loaded: LoadedKernel, inputs: Inputs, like: Tensor) -> MaxAbsScan | None:
    """Prepare, but do not start, the scan for the largest magnitudes that `forward` needs."""
    if not isinstance(loaded.plan, TensorCorePlan):
        return None
    stages = scanned_stages(loaded.plan, loaded.schedule, ())
    return _scan(loaded, inputs, [inputs.A if s else None for s in stages], stages, like)


def _backward_scan(
    loaded: LoadedKernel, inputs: Inputs, gradients: Sequence[Tensor | None], like: Tensor
) -> MaxAbsScan | None:
    if not isinstance(loaded.plan, TensorCorePlan):
        return None
    stages = scanned_stages(loaded.plan, loaded.schedule, [g is not None for g in gradients])
    outputs = {o.stage: g for o, g in zip(loaded.schedule.cell.outputs, gradients, strict=True)}
    return _scan(
        loaded, inputs, [outputs[stage.cell_stage] for stage in loaded.schedule.stages], stages, like
    )


def _scan(
    loaded: LoadedKernel,
    inputs: Inputs,
    rows: Sequence[Tensor | None],
    stages: tuple[bool, ...],
    like: Tensor,
) -> MaxAbsScan:
    members, steps, batch = like.shape[:-1] if like.dim() == 4 else (1, *like.shape[:-1])
    stride = inputs.A.stride(0) if inputs.A is not None and inputs.A.dim() == 4 else 0
    shape = ScanShape(members, steps, batch, stride, stages)
    arch = loaded.plan.arch(device_of(like.device.index or 0))
    return MaxAbsScan(loaded.schedule, shape, inputs, rows, arch, like)


def dense(inputs: Inputs) -> Inputs:
    """Each member's rows contiguous; members made by expand stay so."""
    return inputs._replace(
        A=None if inputs.A is None else _dense(inputs.A, 3),
        states=[_dense(x, 2) for x in inputs.states],
        vectors=[_dense(x, 1) for x in inputs.vectors],
        masks=[_dense(x, x.dim() - (inputs.members is not None)) for x in inputs.masks],
        reset=None if inputs.reset is None else inputs.reset.contiguous(),
    )


def _dense(x: Tensor, dims: int) -> Tensor:
    return x if x.is_contiguous() or (x.dim() > dims and x[0].is_contiguous()) else x.contiguous()


def rounded(inputs: Inputs, case: Case, plan: KernelPlan | None = None) -> Inputs:
    """Where bf16 products are asked for and the kernel holds fp32 weights, those are rounded beforehand."""
    if case.precision != "bf16" or (plan is not None and plan.bf16):
        return inputs
    return inputs._replace(matrices=[m.bfloat16().float() for m in inputs.matrices])


def _value(formula: Expression, state: Tensor, inputs: Inputs, masks: Sequence[Tensor]) -> Tensor:
    """A function of one state, of masks and vectors, by torch."""

    def leaf_value(node: Expression) -> Any:
        if node.op == "constant":
            return node.value
        if node.op == "state":
            return state
        (k,) = node.value  # type: ignore[misc]
        return masks[k] if node.op == "mask" else inputs.vectors[k].unsqueeze(-2)

    return fold([formula], leaf_value, lambda name, args: FUNCTIONS[name].torch(*args))[0]


def sent_vectors(
    cell: CellDescription, inputs: Inputs, backward: bool, strict: bool = True
) -> dict[int, Tensor]:
    """What of the states travels before the first step, by the stage that sends it."""
    vectors = {}
    for stage, state in sent_states(cell, backward, strict).items():
        formula, first = inline_stages(cell).sent_as[state], inputs.states[state]
        sent = first if formula == leaf("state", state) else _first(formula, inputs, state)
        vectors[stage] = _dense(sent, 2)
    return vectors


def state_gradient(
    cell: CellDescription,
    inputs: Inputs,
    i: int,
    sums: Mapping[int, Tensor],
    carried: Tensor | None,
    strict: bool = True,
) -> Tensor:
    """Of state i before the first step: from what comes back by products and what its units carried."""
    stages = {state: stage for stage, state in sent_states(cell, True, strict).items()}
    total = sums[stages[i]] if i in stages else None
    slope = slope_of_sent(cell)[i]
    if total is not None and slope != ONE:
        total = total * _first(slope, inputs, i)
    if carried is not None:
        total = carried if total is None else total + carried
    return torch.zeros_like(inputs.states[i]) if total is None else total


def inlined_outputs(cell: CellDescription, stored: list[Tensor], inputs: Inputs) -> list[Tensor]:
    """What was stored, with the outputs of stages without pre-activations, which kernels leave out."""
    for s in inline_stages(cell).inlined:
        for k in range(len(cell.stages[s].outputs)):
            stored[cell.outputs.index(Output(s, k))] = _inlined(cell, stored, inputs, s, k)
    return stored


def moved_to_states(
    cell: CellDescription, gradients: Sequence[Tensor | None], stored: Sequence[Tensor], inputs: Inputs
) -> tuple[list[Tensor | None], dict[int, Tensor]]:
    """Gradients of outputs that kernels leave out, as gradients of the states they are functions of.

    Those of states at step t belong to outputs of step t - 1; those of the first states are returned separately.
    """
    moved, first = list(gradients), {}
    for s in inline_stages(cell).inlined:
        for k, formula in enumerate(cell.stages[s].outputs):
            place = cell.outputs.index(Output(s, k))
            gradient, moved[place] = moved[place], None
            if gradient is None:
                continue
            (node,) = leaves_of([formula], "state")
            (i,) = node.value  # type: ignore[misc]
            passed = gradient * _of_all_steps(
                chain_rule((formula,), [constant(1.0)])[node], cell, stored, inputs, i
            )
            if inputs.reset is not None:
                passed = passed.masked_fill(inputs.reset.unsqueeze(-1), 0)
            steps = passed.shape[-3]
            first[i] = first.get(i, 0) + passed.select(-3, 0)
            no_later = torch.zeros_like(passed.narrow(-3, 0, 1))
            later = torch.cat([passed.narrow(-3, 1, steps - 1), no_later], -3)
            target = cell.outputs.index(cell.new_states[i])
            before = moved[target]
            moved[target] = later if before is None else before + later
    return moved, first


def with_first(states: list[Tensor], first: Mapping[int, Tensor]) -> list[Tensor]:
    """The gradients of the first states with what `moved_to_states` returned separately."""
    return [x + first[i] if i in first else x for i, x in enumerate(states)]


def _first(formula: Expression, inputs: Inputs, state: int) -> Tensor:
    """A function of a state at the first step."""
    masks = [plain.at(x, 0, inputs.members) for x in inputs.masks]
    return _value(formula, inputs.states[state], inputs, masks)


def _inlined(cell: CellDescription, stored: Sequence[Tensor], inputs: Inputs, s: int, k: int) -> Tensor:
    """The output of a stage without pre-activations, for all steps."""
    formula = cell.stages[s].outputs[k]
    (node,) = leaves_of([formula], "state")
    (state,) = node.value  # type: ignore[misc]
    return _of_all_steps(formula, cell, stored, inputs, state)


def _of_all_steps(
    formula: Expression, cell: CellDescription, stored: Sequence[Tensor], inputs: Inputs, state: int
) -> Tensor:
    """A function of a state as each step saw it."""
    timed = 3 if inputs.members is None else 4
    masks = [x if x.dim() == timed else x.unsqueeze(-3) for x in inputs.masks]
    vectors = inputs._replace(vectors=[x.unsqueeze(-2) for x in inputs.vectors])
    return _value(formula, plain.previous(cell, stored, inputs, state), vectors, masks)
