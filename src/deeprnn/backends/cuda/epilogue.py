"""The pointwise code of a cell as a kernel runs it: expressions for what is read, sent and stored, in either direction.

What a kernel does with a unit's sums follows from the cell's expressions, or from their derivatives; `cell_header.py`
writes it as CUDA C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deeprnn.backends.cuda.recurrence.schedule import (
    Schedule,
    inline_stages,
    slope_of_sent,
    summed_outputs,
    with_outputs,
)
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import CellDescription, Output
from deeprnn.cells.expressions import Expression, add, constant, in_order, leaf, leaves_of, multiply, replace


class EpilogueOptions(NamedTuple):
    """What of a launch changes the code."""

    reset: bool = False
    keep: bool = True
    """forward: whether what the backward pass needs is stored"""
    gradients: tuple[bool, ...] = ()
    """backward: which outputs have a gradient from outside the loop"""


@dataclass(frozen=True)
class StageEpilogue:
    """The code of one stage: expressions over named leaves."""

    loads: tuple[Expression, ...]
    """leaves read from memory, in the order of x"""
    sent: tuple[Expression, ...]
    stored: tuple[tuple[str, int, Expression], ...]
    """("stored" or "delta", number or first column, value); delta columns carry their step in `steps`"""
    steps: tuple[int, ...]
    locals: tuple[tuple[int, Expression], ...]
    """local values that the stage sets"""

    @property
    def roots(self) -> list[Expression]:
        """Everything the stage computes."""
        return [*self.sent, *(e for *_, e in self.stored), *(e for _, e in self.locals)]

    @property
    def locals_read(self) -> set[int]:
        """Local values that something is computed from."""
        return {node.value[0] for node in in_order(self.roots) if node.op in ("carried", "local")}  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """The code of a schedule. `epilogue_of` makes each once, so that they compare by identity."""

    schedule: Schedule
    options: EpilogueOptions
    stages: tuple[StageEpilogue, ...]
    slots: tuple[int, ...]
    """size of each local value"""
    initial: tuple[int | None, ...]
    """forward: the state that a local value starts from; backward None, zero"""
    finals: tuple[int | None, ...]
    """backward: for each state the local value that its gradient ends with, None where there is none"""


@lru_cache(maxsize=1024)
def epilogue_of(schedule: Schedule, options: EpilogueOptions) -> Epilogue:
    """The code of every stage."""
    writer = _Backward if schedule.backward else _Forward
    return writer(schedule, options).epilogue()


class _Forward:
    """Forward code. A sum is the leaf preactivation (gate,); states are `carried`, earlier outputs `local` values."""

    def __init__(self, schedule: Schedule, options: EpilogueOptions) -> None:
        self.schedule, self.options, self.cell = schedule, options, schedule.cell
        read = [self.cell.stages[stage.cell_stage].outputs for stage in schedule.stages]
        nodes = [node for outputs in read for node in in_order(outputs) if node.op in ("state", "output")]
        self.slots = {node: slot for slot, node in enumerate(dict.fromkeys(nodes))}
        self.sent_as = inline_stages(self.cell).sent_as

    def epilogue(self) -> Epilogue:
        stages = tuple(self.stage(stage.cell_stage) for stage in self.schedule.stages)
        initial = tuple(node.value[0] if node.op == "state" else None for node in self.slots)  # type: ignore[index]
        sizes = tuple(_size(self.cell, node) for node in self.slots)
        return Epilogue(self.schedule, self.options, stages, sizes, initial, ())

    def stage(self, s: int) -> StageEpilogue:
        stage, derived = self.cell.stages[s], adjoint_of(self.cell).stages[s]
        what = {
            node: leaf("carried" if node.op == "state" else "local", slot)
            for node, slot in self.slots.items()
        }
        gates = iter(range(len(stage.preactivations)))
        for i, a in enumerate(stage.preactivations):
            total = leaf("preactivation", next(gates)) if a.products else constant(0.0)
            what[leaf("preactivation", i)] = total if a.entry is None else add(total, leaf("entry", *a.entry))
        outputs = [replace(e, what) for e in stage.outputs]
        saved = [replace(e, what) for e in derived.saved] if self.options.keep else []
        first = len(self.cell.outputs) + sum(len(x.saved) for x in adjoint_of(self.cell).stages[:s])
        stored = [("stored", self.cell.outputs.index(Output(s, k)), e) for k, e in enumerate(outputs)]
        stored += [("stored", first + k, e) for k, e in enumerate(saved)]
        sets = []
        for node, slot in self.slots.items():
            origin = self.cell.new_states[node.value[0]] if node.op == "state" else Output(*node.value)  # type: ignore[index,misc]
            if origin.stage == s:
                sets.append((slot, outputs[origin.index]))
        sent = [self._sent(o, outputs[o.index]) for o in sorted(summed_outputs(self.cell)) if o.stage == s]
        roots = [*sent, *(e for *_, e in stored), *(e for _, e in sets)]
        return StageEpilogue(_loads(roots), tuple(sent), tuple(stored), (1,) * len(stored), tuple(sets))

    def _sent(self, output: Output, value: Expression) -> Expression:
        """What travels of an output: itself, or a function of it as the next step's products see it."""
        for i, new in enumerate(self.cell.new_states):
            if new == output and self.sent_as[i] != leaf("state", i):
                return replace(self.sent_as[i], {**_shifted(self.sent_as[i]), leaf("state", i): value})
        return value


def _size(cell: CellDescription, node: Expression) -> int:
    (index, *_) = node.value  # type: ignore[misc]
    return cell.states[index] if node.op == "state" else cell.stages[index].size


def _shifted(formula: Expression) -> dict[Expression, Expression]:
    """Masks in the formula, read one step ahead."""
    return {n: leaf("next_mask", *n.value) for n in leaves_of([formula], "mask")}  # type: ignore[misc]


class _Backward:
    """Backward code: gradients that go on to another stage or step at the same unit are `local` values."""

    def __init__(self, schedule: Schedule, options: EpilogueOptions) -> None:
        self.schedule, self.options, self.cell = schedule, options, schedule.cell
        self.adjoint = adjoint_of(self.cell)
        self.order = [stage.cell_stage for stage in reversed(schedule.stages)]
        self.slots: dict[Expression, int] = {}
        for s in reversed(self.order):
            for node, _ in self.adjoint.stages[s].leaves:
                if node.op in ("state", "output"):
                    self.slots.setdefault(node, len(self.slots))

    def epilogue(self) -> Epilogue:
        started: set[Expression] = set()
        stages = tuple(self.stage(stage.cell_stage, started) for stage in self.schedule.stages)
        states = [self.slots.get(leaf("state", i)) for i in range(len(self.cell.states))]
        sizes = tuple(_size(self.cell, node) for node in self.slots)
        return Epilogue(self.schedule, self.options, stages, sizes, (None,) * len(sizes), tuple(states))

    def stage(self, s: int, started: set[Expression]) -> StageEpilogue:
        """`started`: gradients of this step that an earlier stage has begun to add up."""
        stage, derived = self.cell.stages[s], self.adjoint.stages[s]
        incoming = {
            leaf("gradient", k): self._incoming(Output(s, k), started) for k in range(len(stage.outputs))
        }
        formulas = [*derived.preactivations, *(formula for _, formula in derived.leaves)]
        before = {n: leaf("previous", *n.value) for n in leaves_of(formulas, "state")}  # type: ignore[misc]
        what = {**incoming, **before}
        deltas = [replace(f, what) for f in derived.preactivations]
        stored, steps = [], []
        for i, value in enumerate(deltas):
            rows = self.adjoint.columns[s, i]
            stored.append(("delta", rows.start, value))
            steps.append(rows.step)
        sets = []
        for node, formula in derived.leaves:
            value = replace(formula, what)
            if node.op == "vector":
                rows = self.adjoint.vector_columns[s, node.value[0]]  # type: ignore[index]
                if rows not in self.adjoint.columns.values():
                    stored.append(("delta", rows.start, value))
                    steps.append(rows.step)
                continue
            slot = self.slots[node]
            if node in started:
                value = add(leaf("local", slot), value)
            started.add(node)
            sets.append((slot, value))
        sent = [deltas[i] for i in stage.summed]
        roots = [*sent, *(e for *_, e in stored), *(e for _, e in sets)]
        return StageEpilogue(_loads(roots), tuple(sent), tuple(stored), tuple(steps), tuple(sets))

    def _incoming(self, output: Output, started: set[Expression]) -> Expression:
        """The whole gradient of an output at this step."""
        total = constant(0.0)
        place = self.cell.outputs.index(output)
        if self.options.gradients[place]:
            total = add(total, leaf("outer", place))
        if (node := leaf("output", *output)) in started:
            total = add(total, leaf("local", self.slots[node]))
        for i, new in enumerate(self.cell.new_states):
            if new == output and (slot := self.slots.get(leaf("state", i))) is not None:
                total = add(total, leaf("carried", slot))
        if output in summed_outputs(self.cell):
            total = add(total, multiply(self._slope(output), leaf("preactivation", 0)))
        return total

    def _slope(self, output: Output) -> Expression:
        """What the sums are multiplied by: the slope of what travels of the state."""
        for i, new in enumerate(self.cell.new_states):
            if new == output:
                slope = with_outputs(slope_of_sent(self.cell)[i], self.cell, i)
                return replace(slope, _shifted(slope))
        return constant(1.0)


LOADED = ("entry", "vector", "mask", "next_mask", "outer", "previous", "output", "saved")


def _loads(roots: list[Expression]) -> tuple[Expression, ...]:
    """What has to be read from memory."""
    return tuple(node for node in in_order(roots) if node.op in LOADED)
