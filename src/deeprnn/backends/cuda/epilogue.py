"""The pointwise code of a cell as CUDA C, generated: what a kernel does with a unit's sums, in either direction.

For each stage S of a schedule the header `cell.cuh` has, for one unit e of one batch row,

- `epilogue_load<S>`: everything that is read from memory beside the sums, ahead of time;
- `epilogue<S>`: from the sums, what was loaded and the unit's local values (which stay with the thread or the place
  that owns the unit from step to step) to the numbers that travel and those that are stored;
- `epilogue_store<S>`: the latter written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from deeprnn.backends.cuda.ctext import device_functions, statements
from deeprnn.backends.cuda.recurrence.schedule import Schedule, lower, slope_of_sent, with_outputs
from deeprnn.cells.adjoint import adjoint
from deeprnn.cells.description import CellDescription, Output
from deeprnn.cells.expressions import Expression, add, constant, in_order, leaf, leaves_of, multiply, replace


class Options(NamedTuple):
    """What of a launch changes the code."""

    reset: bool = False
    keep: bool = True
    """forward: whether what the backward pass needs is stored"""
    gradients: tuple[bool, ...] = ()
    """backward: which outputs have a gradient from outside the loop"""


@dataclass(frozen=True)
class StageCode:
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
class Code:
    """The code of a schedule. `code` makes each once, so that they compare by identity."""

    schedule: Schedule
    options: Options
    stages: tuple[StageCode, ...]
    slots: tuple[int, ...]
    """size of each local value"""
    initial: tuple[int | None, ...]
    """forward: the state that a local value starts from; backward None, zero"""
    finals: tuple[int | None, ...]
    """backward: for each state the local value that its gradient ends with, None where there is none"""

    @property
    def functions(self) -> str:
        """Device functions that the code calls."""
        return device_functions([e for stage in self.stages for e in stage.roots])


@lru_cache(maxsize=1024)
def code(schedule: Schedule, options: Options) -> Code:
    """The code of every stage."""
    return _Backward(schedule, options).code() if schedule.backward else _Forward(schedule, options).code()


class _Forward:
    """Forward code. A sum is the leaf preactivation (gate,); states are `carried`, earlier outputs `local` values."""

    def __init__(self, schedule: Schedule, options: Options) -> None:
        self.schedule, self.options, self.cell = schedule, options, schedule.cell
        read = [self.cell.stages[stage.stage].outputs for stage in schedule.stages]
        nodes = [node for outputs in read for node in in_order(outputs) if node.op in ("state", "output")]
        self.slots = {node: slot for slot, node in enumerate(dict.fromkeys(nodes))}
        self.sent_as = lower(self.cell).sent_as

    def code(self) -> Code:
        stages = tuple(self.stage(stage.stage) for stage in self.schedule.stages)
        initial = tuple(node.value[0] if node.op == "state" else None for node in self.slots)  # type: ignore[index]
        sizes = tuple(_size(self.cell, node) for node in self.slots)
        return Code(self.schedule, self.options, stages, sizes, initial, ())

    def stage(self, s: int) -> StageCode:
        stage, own = self.cell.stages[s], adjoint(self.cell).stages[s]
        what = {
            node: leaf("carried" if node.op == "state" else "local", slot)
            for node, slot in self.slots.items()
        }
        gates = iter(range(len(stage.preactivations)))
        for i, a in enumerate(stage.preactivations):
            total = leaf("preactivation", next(gates)) if a.products else constant(0.0)
            what[leaf("preactivation", i)] = total if a.entry is None else add(total, leaf("entry", *a.entry))
        outputs = [replace(e, what) for e in stage.outputs]
        saved = [replace(e, what) for e in own.saved] if self.options.keep else []
        first = len(self.cell.outputs) + sum(len(x.saved) for x in adjoint(self.cell).stages[:s])
        stored = [("stored", self.cell.outputs.index(Output(s, k)), e) for k, e in enumerate(outputs)]
        stored += [("stored", first + k, e) for k, e in enumerate(saved)]
        sets = []
        for node, slot in self.slots.items():
            origin = self.cell.new_states[node.value[0]] if node.op == "state" else Output(*node.value)  # type: ignore[index,misc]
            if origin.stage == s:
                sets.append((slot, outputs[origin.index]))
        sent = [self._sent(o, outputs[o.index]) for o in sorted(summed_outputs(self.cell)) if o.stage == s]
        roots = [*sent, *(e for *_, e in stored), *(e for _, e in sets)]
        return StageCode(_loads(roots), tuple(sent), tuple(stored), (1,) * len(stored), tuple(sets))

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
    """Streams of the next step."""
    return {n: leaf("next_mask", *n.value) for n in leaves_of([formula], "mask")}  # type: ignore[misc]


def summed_outputs(cell: CellDescription) -> set[Output]:
    """Outputs that products multiply, themselves or by way of a stage without pre-activations."""
    low, outputs = lower(cell), set()
    for _, _, product in cell.products:
        v = product.vector
        if v.kind == "state":
            outputs.add(cell.new_states[v.index])
        elif v.stage in low.inlined:
            (node,) = leaves_of([cell.stages[v.stage].outputs[v.index]], "state")
            outputs.add(cell.new_states[node.value[0]])  # type: ignore[index]
        else:
            outputs.add(Output(v.stage, v.index))
    return outputs


class _Backward:
    """Backward code: gradients that go on to another stage or step at the same unit are `local` values."""

    def __init__(self, schedule: Schedule, options: Options) -> None:
        self.schedule, self.options, self.cell = schedule, options, schedule.cell
        self.own = adjoint(self.cell)
        self.order = [stage.stage for stage in reversed(schedule.stages)]
        self.slots: dict[Expression, int] = {}
        for s in reversed(self.order):
            for node, _ in self.own.stages[s].leaves:
                if node.op in ("state", "output"):
                    self.slots.setdefault(node, len(self.slots))

    def code(self) -> Code:
        started: set[Expression] = set()
        stages = tuple(self.stage(stage.stage, started) for stage in self.schedule.stages)
        states = [self.slots.get(leaf("state", i)) for i in range(len(self.cell.states))]
        sizes = tuple(_size(self.cell, node) for node in self.slots)
        return Code(self.schedule, self.options, stages, sizes, (None,) * len(sizes), tuple(states))

    def stage(self, s: int, started: set[Expression]) -> StageCode:
        """`started`: gradients of this step that an earlier stage has begun to add up."""
        stage, own = self.cell.stages[s], self.own.stages[s]
        incoming = {
            leaf("gradient", k): self._incoming(Output(s, k), started) for k in range(len(stage.outputs))
        }
        formulas = [*own.preactivations, *(formula for _, formula in own.leaves)]
        before = {n: leaf("previous", *n.value) for n in leaves_of(formulas, "state")}  # type: ignore[misc]
        what = {**incoming, **before}
        deltas = [replace(f, what) for f in own.preactivations]
        stored, steps = [], []
        for i, value in enumerate(deltas):
            rows = self.own.columns[s, i]
            stored.append(("delta", rows.start, value))
            steps.append(rows.step)
        sets = []
        for node, formula in own.leaves:
            value = replace(formula, what)
            if node.op == "vector":
                rows = self.own.vector_columns[s, node.value[0]]  # type: ignore[index]
                if rows not in self.own.columns.values():
                    stored.append(("delta", rows.start, value))
                    steps.append(rows.step)
                continue
            slot = self.slots[node]
            if node in started:
                value = add(leaf("local", slot), value)
            started.add(node)
            sets.append((slot, value))
        sent = [deltas[i] for i, a in enumerate(stage.preactivations) if a.products]
        roots = [*sent, *(e for *_, e in stored), *(e for _, e in sets)]
        return StageCode(_loads(roots), tuple(sent), tuple(stored), tuple(steps), tuple(sets))

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


# ---- the header


def header(code: Code) -> str:
    """`cell.cuh`: the lists of the schedule, the parameter block and the epilogues."""
    schedule, cell, own = code.schedule, code.schedule.cell, adjoint(code.schedule.cell)
    stages = schedule.stages
    lists = {
        "size": schedule.sizes,
        "gates": [stage.gates for stage in stages],
        "sent": [stage.sent for stage in stages],
        "loads": [len(stage.loads) for stage in code.stages],
        "stores": [len(stage.stored) for stage in code.stages],
        "stage_of": [m.stage for m in schedule.matrices],
        "source_of": [m.source for m in schedule.matrices],
        "delayed": [int(m.delayed) for m in schedule.matrices],
        "slot_size": code.slots or (0,),
        "slot_state": [-1 if i is None else i for i in code.initial] or (-1,),
    }
    slots = range(len(code.slots))
    marks = {
        "reads_local": [int(k in stage.locals_read) for stage in code.stages for k in slots],
        "sets_local": [int(k in dict(stage.locals)) for stage in code.stages for k in slots],
    }
    constants = {
        "DEPTH": len(stages),
        "MATRICES": len(schedule.matrices),
        "PIECES": max(len(m.pieces) for m in schedule.matrices),
        "SLOTS": len(code.slots),
        "STATES": len(cell.states),
        "STORED": len(cell.outputs) + len(own.saved),
        "OUTPUTS": len(cell.outputs),
        "VECTORS": max(1, len(cell.vectors)),
        "MASKS": max(1, len(cell.masks)),
        "ENTRY_WIDTH": cell.entry_width,
        "DELTA_WIDTH": own.width,
        "BACKWARD": int(schedule.backward),
        "HAS_RESET": int(code.options.reset),
    }
    text = [f"#define {name} {value}" for name, value in constants.items()]
    text += [
        f"CONST int {name}(int i) {{ constexpr int list[] = {{{', '.join(map(str, values))}}}; return list[i]; }}"
        for name, values in lists.items()
    ]
    text += [
        f"CONST bool {name}(int s, int k) {{ constexpr bool list[] = {{{', '.join(map(str, values or (0,)))}}}; "
        "return list[s * SLOTS + k]; }"
        for name, values in marks.items()
    ]
    text += ['#include "params.cuh"', code.functions]
    text += [_load_text(code), _touch_text(code), _epilogue_text(code), _store_text(code)]
    text.append(_after_text(code))
    return "\n".join(["#pragma once", *text]) + "\n"


def _branches(parts: list[str]) -> str:
    return "\n".join(f"  if constexpr (S == {s}) {{\n{part}\n  }}" for s, part in enumerate(parts))


def _address(code: Code, node: Expression, s: int) -> str:
    """The C expression that reads a leaf at unit e of row n."""
    cell, own = code.schedule.cell, adjoint(code.schedule.cell)
    index: tuple[int, ...] = node.value  # type: ignore[assignment]
    size = code.schedule.stages[s].size
    own_row = f"[n * {size} + e]"
    if node.op == "entry":
        start, step = index
        return f"(p.entry + w.entry)[n * {cell.entry_width} + {start} + e{f' * {step}' if step > 1 else ''}]"
    if node.op == "vector":
        return f"(p.vector[{index[0]}] + w.member * p.vector_member[{index[0]}])[e]"
    if node.op in ("mask", "next_mask"):
        k, shift = index[0], " + 1" if node.op == "next_mask" else ""
        offset = f"w.member * p.mask_member[{k}] + (w.t{shift}) * p.mask_step[{k}] + w.b * {size}"
        read = f"(p.mask[{k}] + {offset}){own_row}"
        return read if not shift else f"w.t + 1 < p.steps ? {read} : 0.0f"
    if node.op == "outer":
        return f"(p.gradient[{index[0]}] + w.at * {size}){own_row}"
    if node.op == "output":
        return f"(p.stored[{cell.outputs.index(Output(*index))}] + w.at * {size}){own_row}"
    if node.op == "saved":
        place = len(cell.outputs) + own.saved.index(index)  # type: ignore[arg-type]
        return f"(p.stored[{place}] + w.at * {size}){own_row}"
    (i,) = index  # previous
    place = cell.outputs.index(cell.new_states[i])
    first = f"p.initial[{i}] + w.member * p.initial_member[{i}] + w.b * {size}"
    read = f"(w.t == 0 ? {first} : p.stored[{place}] + (w.at - p.batch) * {size}){own_row}"
    return f"(p.reset + w.mark)[n] ? 0.0f : {read}" if code.options.reset else read


def _load_text(code: Code) -> str:
    parts = []
    for s, stage in enumerate(code.stages):
        lines = [f"    x[{k}] = {_address(code, node, s)};" for k, node in enumerate(stage.loads)]
        parts.append("\n".join(lines))
    return (
        "template <int S> INLINE void epilogue_load(const Params& p, const Place& w, int n, int e, float* x) {\n"
        + _branches(parts)
        + "\n}"
    )


def _touch_text(code: Code) -> str:
    """What of `epilogue_load` differs from step to step, asked into L2 ahead of time."""
    changing = ("entry", "outer", "output", "saved")
    parts = []
    for s, stage in enumerate(code.stages):
        nodes = [node for node in stage.loads if node.op in changing]
        parts.append("\n".join(f"    touch(&{_address(code, node, s)});" for node in nodes))
    return (
        "template <int S> INLINE void epilogue_touch(const Params& p, const Place& w, int n, int e) {\n"
        + _branches(parts)
        + "\n}"
    )


def _epilogue_text(code: Code) -> str:
    parts = []
    for stage in code.stages:
        loads = {node: f"x[{k}]" for k, node in enumerate(stage.loads)}

        def value(node: Expression, loads: dict[Expression, str] = loads) -> str:
            if node in loads:
                return loads[node]
            index: tuple[int, ...] = node.value  # type: ignore[assignment]
            if node.op == "preactivation":
                return f"sum[{index[0]}]"
            if node.op == "carried" and code.options.reset:
                return f"(fresh ? 0.0f : local[{index[0]}])"
            return f"local[{index[0]}]"

        lines, names = statements(stage.roots, value)
        ends = [f"send[{k}] = {name};" for k, name in enumerate(names[: len(stage.sent)])]
        rest = names[len(stage.sent) :]
        ends += [f"out[{k}] = {name};" for k, name in enumerate(rest[: len(stage.stored)])]
        # Set together at the end: one may be read where another is computed.
        new = [f"float next{k} = {name};" for k, name in enumerate(rest[len(stage.stored) :])]
        new += [f"local[{slot}] = next{k};" for k, (slot, _) in enumerate(stage.locals)]
        parts.append("\n".join(f"    {line}" for line in (*lines, *ends, *new)))
    return (
        "// `fresh`: a sequence starts anew, so that what a unit carries from the step before counts for nothing.\n"
        "template <int S>\n"
        "INLINE void epilogue(const float* sum, const float* x, bool fresh, float* local, float* send, float* out) {\n"
        + _branches(parts)
        + "\n}"
    )


def _store_text(code: Code) -> str:
    parts = []
    for s, stage in enumerate(code.stages):
        lines, size = [], code.schedule.stages[s].size
        for k, ((kind, place, _), step) in enumerate(zip(stage.stored, stage.steps, strict=True)):
            if kind == "stored":
                lines.append(f"    (p.stored[{place}] + w.at * {size})[n * {size} + e] = out[{k}];")
            else:
                column = f"{place} + e{f' * {step}' if step > 1 else ''}"
                lines.append(f"    (p.delta + w.at * DELTA_WIDTH)[n * DELTA_WIDTH + {column}] = out[{k}];")
        parts.append("\n".join(lines))
    return (
        "template <int S>\n"
        "INLINE void epilogue_store(const Params& p, const Place& w, int n, int e, const float* out) {\n"
        + _branches(parts)
        + "\n}"
    )


def _after_text(code: Code) -> str:
    """The numbers of a vector of the step that follows, read from that step's delta."""
    own, parts = adjoint(code.schedule.cell), []
    for stage in code.schedule.stages:
        preactivations = code.schedule.cell.stages[stage.stage].preactivations
        summed = [i for i, a in enumerate(preactivations) if a.products]
        places = [own.columns[stage.stage, i] for i in summed]
        if not code.schedule.backward:
            parts.append("    return 0.0f;")
            continue
        starts, steps = (", ".join(str(rows[k]) for rows in places) for k in (0, 1))
        parts.append(
            f"    constexpr int starts[] = {{{starts}}}, steps[] = {{{steps}}};\n"
            "    return p.after[b * DELTA_WIDTH + starts[part] + e * steps[part]];"
        )
    return (
        "template <int S> INLINE float after_value(const Params& p, i64 b, int part, int e) {\n"
        + _branches(parts)
        + "\n}"
    )
