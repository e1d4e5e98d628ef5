"""How a recurrent layer is computed, in words: what leaves the loop, what each step does, what backward keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from deeprnn.backends.choose import fastest_backend, why_not
from deeprnn.backends.registry import PREFERENCE
from deeprnn.cells.adjoint import adjoint_of
from deeprnn.cells.cell import OWN_START, Cell, has_own_start
from deeprnn.cells.description import CellDescription, Output, Preactivation, Rows, Stage, Vector
from deeprnn.cells.expressions import Expression, in_order
from deeprnn.cells.plans import PlanRequest, StepPlan, plan_of
from deeprnn.cells.trace import TracedStep
from deeprnn.cells.tracing.algebra import uses
from deeprnn.cells.tracing.operations import name_of

MEANINGS = {
    "mix": "mix(w, a, b) = a + w · (b − a)",
    "select": "select(c, a, b) = a where c is not 0, else b",
}
INFIX = {"add": " + ", "subtract": " − ", "multiply": " · ", "divide": " / "}
SUMS = ("add", "subtract")
BRACKETS = {
    "add": ((), ("negative",)),
    "subtract": ((), (*SUMS, "negative")),
    "multiply": (SUMS, (*SUMS, "negative")),
    "divide": (SUMS, (*INFIX, "negative")),
}
"""signs of a first and of a second argument that has to stand in brackets"""
SHORT, LONG = 20, 100
"""letters of a part that is written out wherever it is used, and of one that gets a name though it is used once"""
SIGNS = {"add": " + ", "sub": " − ", "mul": " · ", "div": " / ", "mm": " · "}
"""of operations before the loop"""
DEEPEST = 8
"""of what is computed before the loop: operations inside each other that are written out"""


def explain(layer: Any, cells: Sequence[Cell], tensors: Sequence[Mapping[str, Tensor]] | None = None) -> str:
    """The text of a layer's `explain()`."""
    dtype, weight = layer.weights_dtype(), layer.first_weight()
    device = "cpu" if weight is None else str(weight.device)
    symbols = bool(getattr(cells[0], "symbols", False))
    request = PlanRequest(torch.int64 if symbols else dtype, dtype, device)
    texts: dict[str, list[str]] = {}
    for k, cell in enumerate(cells):
        level, backward = divmod(k, layer.num_directions)
        place = f"level {level + 1}{', backwards' if backward else ''}"
        plan = plan_of(cell, request, None if tensors is None else dict(tensors[k]))
        texts.setdefault(_cell_text(cell, plan, request, layer.backend), []).append(place)
    blocks = []
    for text, places in texts.items():
        head = f"{', '.join(places)}:\n" if len(cells) > 1 else ""
        blocks.append(head + text)
    return "\n\n".join(blocks)


def step_equations(cell: Cell) -> list[str]:
    """What one step of a cell computes, one line each; its docstring's first line where it cannot be described."""
    plan = plan_of(cell, PlanRequest(torch.float32, torch.float32, "cpu"))
    if plan.traced is None:
        first = (type(cell).__doc__ or "").strip().partition("\n")[0]
        return [first or f"{', '.join(cell.state_names())} = step(x, {', '.join(cell.state_names())})"]
    names = Names(plan.traced.cell, cell.state_names(), plan.traced)
    lines = _before(plan.traced)
    for s in range(len(plan.traced.cell.stages)):
        lines += _stage(plan.traced.cell, s, names)
    lines += [f"where {meaning}" for meaning in _meanings(lines)]
    notes = ("    (travels to all units)", "    (stays with its unit)")
    return [
        line.strip().removesuffix(notes[0].strip()).removesuffix(notes[1].strip()).strip() for line in lines
    ]


def _meanings(lines: Sequence[str]) -> list[str]:
    """Explanations of the functions in these lines that a reader may not know."""
    return [meaning for name, meaning in MEANINGS.items() if re.search(rf"\b{name}\(", "".join(lines))]


def entering_parameters(cell: Cell) -> set[str]:
    """The parameters that multiply the input; where a cell is not described, those that are as wide as it alone."""
    plan = plan_of(cell, PlanRequest(torch.float32, torch.float32, "cpu"))
    if plan.traced is None:
        width, states = cell.sizes().input, cell.sizes().states
        return {n for n, p in cell.named_parameters() if p.shape[-1:] == (width,) and width not in states}
    hoisted = plan.traced.hoisted
    enters = _ancestors([*hoisted.U, *([] if hoisted.entering is None else [hoisted.entering])])
    inside = _ancestors(hoisted.written.matrices)
    held = hoisted.columns.recording.held
    return {name for name, node in held.items() if node in enters and node not in inside}


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    ancestors, stack = set(), list(nodes)
    while stack:
        if (node := stack.pop()) not in ancestors:
            ancestors.add(node)
            stack += node.all_input_nodes
    return ancestors


def _cell_text(cell: Cell, plan: StepPlan, request: PlanRequest, backend: str) -> str:
    sizes = cell.sizes()
    states = ", ".join(f"{n} ({width})" for n, width in zip(cell.state_names(), sizes.states, strict=True))
    head = f"{type(cell).__name__}: input {sizes.input}, state {states}"
    if plan.traced is None:
        return f"{head}\nunrolled by the plain loop over step, because it cannot be described: {plan.reason}"
    names = Names(plan.traced.cell, cell.state_names(), plan.traced)
    lines = [head, "before the loop, for all steps at once:", *_before(plan.traced), "in every step:"]
    for s in range(len(plan.traced.cell.stages)):
        lines += _stage(plan.traced.cell, s, names)
    lines += [f"  where {meaning}" for meaning in _meanings(lines)]
    lines += [*_backward(plan.traced.cell, names), _backend(plan.traced.cell, request, backend)]
    if has_own_start(cell):
        lines.append(f"with reset marks: by the plain loop, because {OWN_START}")
    return "\n".join(lines)


class Names:
    """Names for the parts of a description in the text."""

    def __init__(self, cell: CellDescription, state_names: Sequence[str], traced: TracedStep) -> None:
        self.states = [
            state_names[p.state] + ("" if p.places is None else f"[{_span(p.places)}]") for p in traced.parts
        ]
        self.outputs: dict[Output, str] = {}
        for output in cell.outputs:
            states = [self.states[k] for k, new in enumerate(cell.new_states) if new == output]
            inner = sum(o not in cell.new_states for o in self.outputs) + 1
            self.outputs[output] = states[0] if states else f"z{inner}"
        self.named = 0
        stages = [
            self._stage(stage, s, adjoint_of(cell).stages[s].saved) for s, stage in enumerate(cell.stages)
        ]
        self.lines, self.spelled = zip(*stages, strict=True)

    def vector(self, v: Vector) -> str:
        """A vector that a matrix multiplies."""
        return f"{self.states[v.index]}(t-1)" if v.kind == "state" else self.outputs[Output(v.stage, v.index)]

    def _stage(
        self, stage: Stage, s: int, saved: tuple[Expression, ...]
    ) -> tuple[list[Line], dict[Expression, Spelled]]:
        """A stage line by line, and how its parts are spelled in them.

        Parts that are used again, and those of very long formulas, get names of their own: written out as a tree, a
        formula may be larger than any memory.
        """
        outputs = {e: Output(s, k) for k, e in enumerate(stage.outputs)}
        roots = [*stage.outputs, *saved]
        count = uses(roots)
        lines: list[Line] = []
        spelled: dict[Expression, Spelled] = {}
        for e in in_order(roots):
            full = spelled[e] = self._leaf(e) if e.is_leaf else _applied(e, [spelled[a] for a in e.args])
            if e in outputs:
                lines.append(Line(self.outputs[outputs[e]], full.text, outputs[e]))
            elif not e.is_leaf and len(full.text) > (SHORT if count[e] > 1 else LONG):
                self.named += 1
                lines.append(Line(f"p{self.named}", full.text))
            else:
                continue
            spelled[e] = full if e.is_leaf else Spelled(lines[-1].name)
        return lines, spelled

    def _leaf(self, e: Expression) -> Spelled:
        index: Any = e.value
        if e.op == "constant":
            return Spelled(f"{e.value:g}")
        if e.op == "preactivation":
            return Spelled(f"a{index[0] + 1}")
        if e.op == "state":
            return Spelled(f"{self.states[index[0]]}(t-1)")
        if e.op == "output":
            return Spelled(self.outputs[Output(*index)])
        return Spelled(f"{'v' if e.op == 'vector' else 'mask'}{index[0] + 1}")


class Line(NamedTuple):
    """A formula and its name; an output of the stage, or a part of the formulas behind it."""

    name: str
    text: str
    output: Output | None = None


class Spelled(NamedTuple):
    """Text, and the arithmetic sign that stands in it outside all brackets."""

    text: str
    sign: str = ""


def _applied(e: Expression, args: Sequence[Spelled]) -> Spelled:
    """A function, as it would be written by hand."""
    if e.op == "negative":
        return Spelled(f"−({args[0].text})" if args[0].sign else f"−{args[0].text}", "negative")
    if e.op not in INFIX:
        return Spelled(f"{e.op}({', '.join(a.text for a in args)})")
    texts = [f"({a.text})" if a.sign in BRACKETS[e.op][k] else a.text for k, a in enumerate(args)]
    return Spelled(INFIX[e.op].join(texts), e.op)


def _span(places: tuple[int, ...]) -> str:
    if places == tuple(range(places[0], places[-1] + 1)):
        return f"{places[0]}:{places[-1] + 1}"
    return f"{len(places)} places"


def _before(traced: TracedStep) -> list[str]:
    hoisted, cell = traced.hoisted, traced.cell
    recording = hoisted.columns.recording
    paths = {node: path for path, node in recording.held.items()}
    constants = [node for node in recording.graph.nodes if node.op == "get_attr"]
    paths |= {node: _constant(recording.constants[str(node.target)]) for node in constants}
    lines = []
    for k, node in enumerate(hoisted.written.matrices, 1):
        rows, columns = node.meta["shape"]
        lines.append(f"  M{k} ({rows} × {columns}) = {_node(node, paths)}")
    for k, node in enumerate(hoisted.vectors, 1):
        lines.append(f"  v{k} ({node.meta['shape'][0]}) = {_node(node, paths)}")
    for k, (node, per_sequence) in enumerate(hoisted.masks, 1):
        when = "once a sequence" if per_sequence else "anew at every step"
        lines.append(f"  mask{k} ({node.meta['shape'][1]}), {when} = {_node(node, paths)}")
    if hoisted.entering is None:
        lines.append("  nothing of the input")
    elif traced.linear:
        U = ", ".join(_node(u, paths) for u in hoisted.U)
        b = f" + {', '.join(_node(b, paths) for b in hoisted.b)}" if hoisted.b else ""
        lines.append(
            f"  A ({cell.entry_width} a step) = {_node(hoisted.entering, paths)} · [{U}]ᵀ{b}, one product"
        )
    else:
        lines.append(f"  A ({cell.entry_width} a step) = {_node(hoisted.entering, paths)}")
    return lines


def _stage(cell: CellDescription, s: int, names: Names) -> list[str]:
    stage = cell.stages[s]
    lines = [f"  stage {s + 1}: {stage.size} units"]
    for i, a in enumerate(stage.preactivations, 1):
        lines.append(f"    a{i} = {_preactivation(a, stage.size, names)}")
    for name, text, output in names.lines[s]:
        travels = "travels to all units" if output in cell.travelling else "stays with its unit"
        lines.append(f"    {name} = {text}" + ("" if output is None else f"    ({travels})"))
    return lines


def _preactivation(a: Preactivation, size: int, names: Names) -> str:
    terms = [] if a.entry is None else [f"A[{_rows(a.entry, size)}]"]
    for p in a.products:
        columns = f", {p.column}:" if p.column else ""
        terms.append(f"M{p.matrix + 1}[{_rows(p.rows, size)}{columns}] {names.vector(p.vector)}")
    return " + ".join(terms)


def _rows(rows: Rows, size: int) -> str:
    end = rows.start + (size - 1) * rows.step + 1
    return f"{rows.start}:{end}" + (f":{rows.step}" if rows.step > 1 else "")


def _backward(cell: CellDescription, names: Names) -> list[str]:
    backward = adjoint_of(cell)
    saved = [names.spelled[s][e].text for s, stage in enumerate(backward.stages) for e in stage.saved]
    numbers = sum(cell.stages[s].size for s, _ in backward.saved)
    saves = f"saves {', '.join(saved)} ({numbers} numbers a step)" if saved else "saves nothing more"
    return [f"for backward: reads all of the above that is named, and {saves}"]


def _backend(cell: CellDescription, request: PlanRequest, backend: str) -> str:
    device = torch.device(request.device)
    if backend != "auto":
        return f"backend: {backend}, as asked for"
    chosen = fastest_backend(cell.text, request.device, request.dtype)
    tried = PREFERENCE.get(device.type, ("reference",))
    reasons = [
        why_not(name, cell.text, request.device, request.dtype) for name in tried[: tried.index(chosen)]
    ]
    why = f" ({'; '.join(r for r in reasons if r)})" if reasons else ""
    return f"backend: {chosen} on {request.device} in {request.dtype}{why}"


def _constant(tensor: Tensor) -> str:
    """A tensor that the step or its reading makes, in a word."""
    values = tensor.unique()
    if len(values) == 1:
        return f"all {values.item():g}"
    return "zeros and ones" if values.tolist() == [0, 1] else f"constant {tuple(tensor.shape)}"


def _node(node: Any, paths: Mapping[fx.Node, str], deep: int = DEEPEST) -> str:
    """What is computed before the loop, as an expression of the cell's tensors."""
    if not isinstance(node, fx.Node):
        return f"{node:g}" if isinstance(node, float) else str(node)
    if node in paths:
        return paths[node]
    if node.op == "placeholder":
        return "random numbers" if node.meta.get("draw") else node.name
    if not deep:
        return "…"
    name, args = name_of(node), [_node(a, paths, deep - 1) for a in node.args if isinstance(a, fx.Node)]
    if name == "getitem" and node.args[1] == 0:
        return args[0]
    if name in ("t", "slice", "select") and any(sign in args[0] for sign in SIGNS.values()):
        args[0] = f"({args[0]})"
    if name == "t":
        return args[0] if args[0].startswith("all ") else f"{args[0]}ᵀ"
    if name == "slice":
        dim, start, end = (*node.args[1:4], None, None)[:3]  # type: ignore[misc]
        last = node.args[0].meta["shape"][dim or 0]  # type: ignore[union-attr]
        return f"{args[0]}[{':, ' * (dim or 0)}{start}:{last if end is None else min(end, last)}]"  # type: ignore[operator]
    if name == "select":
        return f"{args[0]}[{':, ' * node.args[1]}{node.args[2]}]"  # type: ignore[operator]
    if name in ("cat", "stack"):
        return f"[{', '.join(_node(a, paths, deep - 1) for a in node.args[0])}]"  # type: ignore[union-attr]
    if name in ("_to_copy", "reshape", "view", "expand", "lift_fresh"):
        return args[0]
    numbers = [_node(a, paths) for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    sign = SIGNS.get(name)
    if sign is not None and len(args + numbers) == 2:
        return sign.join(args + numbers)
    return f"{name}({', '.join(args + numbers)})"
