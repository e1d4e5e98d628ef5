"""`cell.cuh`, the header of a kernel that is generated for each cell: its lists, its parameter block and its epilogues.

For each stage S of a schedule it has, for one unit e of one batch row,

- `epilogue_load<S>`: everything that is read from memory beside the sums, ahead of time;
- `epilogue_touch<S>`: what of it differs from step to step, asked into L2 still earlier;
- `epilogue<S>`: from the sums, what was loaded and the unit's local values (which stay with the thread or the place
  that owns the unit from step to step) to the numbers that travel and those that are stored;
- `epilogue_store<S>`: the latter written out.
"""

from __future__ import annotations

from deeprnn.backends.cuda.ctext import device_functions, statements
from deeprnn.backends.cuda.epilogue import Epilogue
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.description import Output
from deeprnn.cells.expressions import Expression


def header(epilogue: Epilogue) -> str:
    """`cell.cuh`: the lists of the schedule, the parameter block and the epilogues."""
    schedule, cell, adjoint = epilogue.schedule, epilogue.schedule.cell, adjoint_of(epilogue.schedule.cell)
    stages = schedule.stages
    lists = {
        "size": schedule.sizes,
        "gates": [stage.gates for stage in stages],
        "sent": [stage.sent for stage in stages],
        "loads": [len(stage.loads) for stage in epilogue.stages],
        "stores": [len(stage.stored) for stage in epilogue.stages],
        "stage_of": [m.stage for m in schedule.matrices],
        "source_of": [m.source for m in schedule.matrices],
        "delayed": [int(m.delayed) for m in schedule.matrices],
        "slot_size": epilogue.slots or (0,),
        "slot_state": [-1 if i is None else i for i in epilogue.initial] or (-1,),
    }
    slots = range(len(epilogue.slots))
    marks = {
        "reads_local": [int(k in stage.locals_read) for stage in epilogue.stages for k in slots],
        "sets_local": [int(k in dict(stage.locals)) for stage in epilogue.stages for k in slots],
    }
    constants = {
        "DEPTH": len(stages),
        "MATRICES": len(schedule.matrices),
        "PIECES": max(len(m.pieces) for m in schedule.matrices),
        "SLOTS": len(epilogue.slots),
        "STATES": len(cell.states),
        "STORED": len(cell.outputs) + len(adjoint.saved),
        "OUTPUTS": len(cell.outputs),
        "VECTORS": max(1, len(cell.vectors)),
        "MASKS": max(1, len(cell.masks)),
        "ENTRY_WIDTH": cell.entry_width,
        "DELTA_WIDTH": adjoint.width,
        "BACKWARD": int(schedule.backward),
        "HAS_RESET": int(epilogue.options.reset),
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
    functions = device_functions([e for stage in epilogue.stages for e in stage.roots])
    text += ['#include "params.cuh"', functions]
    text += [_load_text(epilogue), _touch_text(epilogue), _epilogue_text(epilogue), _store_text(epilogue)]
    text.append(_next_delta_text(epilogue))
    return "\n".join(["#pragma once", *text]) + "\n"


def _branches(parts: list[str]) -> str:
    return "\n".join(f"  if constexpr (S == {s}) {{\n{part}\n  }}" for s, part in enumerate(parts))


def _address(epilogue: Epilogue, node: Expression, s: int) -> str:
    """The C expression that reads a leaf at unit e of row n."""
    cell, adjoint = epilogue.schedule.cell, adjoint_of(epilogue.schedule.cell)
    index: tuple[int, ...] = node.value  # type: ignore[assignment]
    size = epilogue.schedule.stages[s].size
    of_row = f"[n * {size} + e]"
    if node.op == "entry":
        start, step = index
        return f"(p.entry + w.entry)[n * {cell.entry_width} + {start} + e{f' * {step}' if step > 1 else ''}]"
    if node.op == "vector":
        return f"(p.vector[{index[0]}] + w.member * p.vector_member[{index[0]}])[e]"
    if node.op in ("mask", "next_mask"):
        k, shift = index[0], " + 1" if node.op == "next_mask" else ""
        offset = f"w.member * p.mask_member[{k}] + (w.t{shift}) * p.mask_step[{k}] + w.b * {size}"
        read = f"(p.mask[{k}] + {offset}){of_row}"
        return read if not shift else f"w.t + 1 < p.steps ? {read} : 0.0f"
    if node.op == "outer":
        return f"(p.gradient[{index[0]}] + w.at * {size}){of_row}"
    if node.op == "output":
        return f"(p.stored[{cell.outputs.index(Output(*index))}] + w.at * {size}){of_row}"
    if node.op == "saved":
        place = len(cell.outputs) + adjoint.saved.index(index)  # type: ignore[arg-type]
        return f"(p.stored[{place}] + w.at * {size}){of_row}"
    (i,) = index  # previous
    place = cell.outputs.index(cell.new_states[i])
    first = f"p.initial[{i}] + w.member * p.initial_member[{i}] + w.b * {size}"
    read = f"(w.t == 0 ? {first} : p.stored[{place}] + (w.at - p.batch) * {size}){of_row}"
    return f"(p.reset + w.mark)[n] ? 0.0f : {read}" if epilogue.options.reset else read


def _load_text(epilogue: Epilogue) -> str:
    parts = []
    for s, stage in enumerate(epilogue.stages):
        lines = [f"    x[{k}] = {_address(epilogue, node, s)};" for k, node in enumerate(stage.loads)]
        parts.append("\n".join(lines))
    return (
        "template <int S> INLINE void epilogue_load(const Params& p, const RowAddress& w, int n, int e, float* x) {\n"
        + _branches(parts)
        + "\n}"
    )


def _touch_text(epilogue: Epilogue) -> str:
    """What of `epilogue_load` differs from step to step, asked into L2 ahead of time."""
    changing = ("entry", "outer", "output", "saved")
    parts = []
    for s, stage in enumerate(epilogue.stages):
        nodes = [node for node in stage.loads if node.op in changing]
        parts.append("\n".join(f"    touch(&{_address(epilogue, node, s)});" for node in nodes))
    return (
        "template <int S> INLINE void epilogue_touch(const Params& p, const RowAddress& w, int n, int e) {\n"
        + _branches(parts)
        + "\n}"
    )


def _epilogue_text(epilogue: Epilogue) -> str:
    parts = []
    for stage in epilogue.stages:
        loads = {node: f"x[{k}]" for k, node in enumerate(stage.loads)}

        def value(node: Expression, loads: dict[Expression, str] = loads) -> str:
            if node in loads:
                return loads[node]
            index: tuple[int, ...] = node.value  # type: ignore[assignment]
            if node.op == "preactivation":
                return f"sum[{index[0]}]"
            if node.op == "carried" and epilogue.options.reset:
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


def _store_text(epilogue: Epilogue) -> str:
    parts = []
    for s, stage in enumerate(epilogue.stages):
        lines, size = [], epilogue.schedule.stages[s].size
        for k, ((kind, place, _), step) in enumerate(zip(stage.stored, stage.steps, strict=True)):
            if kind == "stored":
                lines.append(f"    (p.stored[{place}] + w.at * {size})[n * {size} + e] = out[{k}];")
            else:
                column = f"{place} + e{f' * {step}' if step > 1 else ''}"
                lines.append(f"    (p.delta + w.at * DELTA_WIDTH)[n * DELTA_WIDTH + {column}] = out[{k}];")
        parts.append("\n".join(lines))
    return (
        "template <int S>\n"
        "INLINE void epilogue_store(const Params& p, const RowAddress& w, int n, int e, const float* out) {\n"
        + _branches(parts)
        + "\n}"
    )


def _next_delta_text(epilogue: Epilogue) -> str:
    """The numbers of a vector of the step that follows, read from that step's delta."""
    adjoint, parts = adjoint_of(epilogue.schedule.cell), []
    for stage in epilogue.schedule.stages:
        summed = epilogue.schedule.cell.stages[stage.cell_stage].summed
        places = [adjoint.columns[stage.cell_stage, i] for i in summed]
        if not epilogue.schedule.backward:
            parts.append("    return 0.0f;")
            continue
        starts, steps = (", ".join(str(rows[k]) for rows in places) for k in (0, 1))
        parts.append(
            f"    constexpr int starts[] = {{{starts}}}, steps[] = {{{steps}}};\n"
            "    return p.next_delta[b * DELTA_WIDTH + starts[part] + e * steps[part]];"
        )
    return (
        "template <int S> INLINE float next_delta_value(const Params& p, i64 b, int part, int e) {\n"
        + _branches(parts)
        + "\n}"
    )
