"""The fast path through a layer: one level in one direction, from its input and parameters as they are.

A layer asks here first. What it gets is what its general path computes, or None where that way is to be taken: see
`backends/direct.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from deeprnn.backends.direct import MOST_CALLS, direct, eligible_for_direct_call
from deeprnn.backends.transformations import no_modes_or_transforms
from deeprnn.backends.unrolling import autocasts
from deeprnn.backends.wiring import ParameterSlice, Wiring, projection_wiring
from deeprnn.cells import plans
from deeprnn.cells.cell import Cell
from deeprnn.cells.description import from_text
from deeprnn.cells.held_tensors import held_tensor
from deeprnn.cells.plans import StepPlan
from deeprnn.model.operator_specs import PlusSpec
from deeprnn.model.overrides import refresh_weights
from deeprnn.model.transition import cell_of

WIRED = "_wired"
"""where a layer keeps its `Wired`; it is made anew in copies"""


class Wired(NamedTuple):
    """A layer's wiring, None where it has none, and its parameters' names in the wiring's order."""

    wiring: Wiring | None
    names: Sequence[str]
    step: Any = None  # of the cell, which may be replaced


def call_directly(
    layer: nn.Module, wired: Wired, input: Any, states: Sequence[Any] | None, batch_first: bool, backend: str
) -> tuple[Tensor, list[Tensor]] | None:
    """The output laid out as the input is, (T, B, I) or with batch_first (B, T, I), and the last states.

    The input is one that `eligible_for_direct_call`.
    """
    if wired.wiring is None or input.dim() != 3:
        return None
    x = input.transpose(0, 1) if batch_first else input
    if x.shape[0] == 1 and x.device.type == "cpu":  # `single_step` serves it
        return None
    # Read at every call; what hooks or replicas put elsewhere does not count.
    own = layer.__dict__["_parameters"]
    parameters = [own.get(name) for name in wired.names]
    results = direct(wired.wiring, x, states, parameters, backend)
    if results is None or not batch_first:
        return results
    return results[0].transpose(0, 1), results[1]


def transition_wiring(spec: PlusSpec) -> Wiring | None:
    """That of a ⊕ whose parameters are every U, W, S and b, the last b being the first layer's second."""
    if not all(spec.inputs):
        return None
    depth, columns = spec.depth, [0, *accumulate(spec.widths)]
    below = spec.hidden_size, *spec.sizes
    shapes: list[tuple[int, ...]] = [(n, spec.input_size) for n in spec.widths]
    shapes += [(n, m) for n, m in zip(spec.widths, below, strict=False)]
    shapes += [
        (n, spec.hidden_size) for n, shortcut in zip(spec.widths, spec.shortcuts, strict=True) if shortcut
    ]
    biases: list[ParameterSlice] = []
    if spec.bias:
        for width, column in zip((*spec.widths, spec.widths[0]), (*columns[:-1], 0), strict=True):
            biases.append(ParameterSlice(len(shapes), 0, width, column))
            shapes.append((width,))
    matrices = range(depth, len(shapes) - len(biases))
    cell = cell_of(spec, (False,) * depth, False)
    return Wiring(cell, tuple(shapes), tuple(range(depth)), tuple(matrices), tuple(biases))


# ---- cells


def _needs_input_alone(signature: plans.StepSignature) -> bool:
    """Whether all that enters the loop is a product of x: nothing drawn, and states in one part each."""
    if signature.enters != "x" or signature.masks or signature.draws or any(signature.needed):
        return False
    return signature.parts == tuple((k, None) for k in range(len(signature.parts)))


def cell_wiring(plan: StepPlan, shapes: Sequence[tuple[int, ...]]) -> Wiring | None:
    """That of a traced cell with these parameters, where its description takes them as they are or in slices."""
    signature = plan.signature
    if signature is None or not _needs_input_alone(signature):
        return None
    graph: fx.GraphModule = getattr(plans.GRAPHS, f"{plan.key}/fixed")
    results = _pieces(graph.graph, shapes)
    if results is None:
        return None
    ends = [0, *accumulate(signature.counts)]
    matrices, vectors, U, b = (results[i:j] for i, j in pairwise(ends))
    if any(isinstance(v, list) for v in (*matrices, *U)) or any(isinstance(v, int) for v in (*vectors, *b)):
        return None
    if any(len(v) != 1 for v in vectors) or len(b) > len(U):
        return None
    starts = [0, *accumulate(shapes[u][0] for u in U)]
    biases = [p._replace(column=p.column + start) for own, start in zip(b, starts, strict=False) for p in own]
    cell = from_text(signature.text)
    return Wiring(cell, tuple(shapes), tuple(U), tuple(matrices), tuple(biases), tuple(v[0] for v in vectors))


class DirectCell(NamedTuple):
    """What a plan says about a cell's direct call: its wiring, and the order of what the graph computes in it."""

    wiring: Wiring
    order: Sequence[int]


_cells: dict[tuple[str, int], DirectCell | None] = {}
"""by a plan's key and the width of the input"""


def call_cell_directly(
    cell: Cell, input: Any, states: Sequence[Any] | None, batch_first: bool, backend: str
) -> tuple[Tensor, list[Tensor]] | None:
    """As `call_directly`, of a user's cell on a CPU: what its step computes of parameters alone is computed before."""
    if (
        not eligible_for_direct_call(input)
        or input.dim() != 3
        or input.device.type != "cpu"
        or not no_modes_or_transforms()
    ):
        return None
    x = input.transpose(0, 1) if batch_first else input
    if x.shape[0] == 1 or (states is None and type(cell).initial_state is not Cell.initial_state):
        return None
    refresh_weights(cell)  # `step` is read, the cell itself not called
    plan = plans.plan_of(cell, plans.PlanRequest(x.dtype, x.dtype, "cpu"))
    key = plan.key, x.shape[-1]
    if key not in _cells:
        if len(_cells) >= MOST_CALLS:
            _cells.clear()
        _cells[key] = _direct_cell(cell, plan, x.shape[-1])
    own = _cells[key]
    if own is None or plan.signature is None or autocasts("cpu"):
        return None
    graph: fx.GraphModule = getattr(plans.GRAPHS, f"{plan.key}/fixed")
    results = graph.forward(*[_held(cell, path) for path in plan.signature.held])
    outcome = direct(own.wiring, x, states, [results[i] for i in own.order], backend)
    if outcome is None or not batch_first:
        return outcome
    return outcome[0].transpose(0, 1), outcome[1]


def _direct_cell(cell: Cell, plan: StepPlan, inputs: int) -> DirectCell | None:
    signature = plan.signature
    if signature is None or not _needs_input_alone(signature):
        return None
    graph: fx.GraphModule = getattr(plans.GRAPHS, f"{plan.key}/fixed")
    ends = [0, *accumulate(signature.counts)]
    matrices, vectors, U, b = (range(i, j) for i, j in pairwise(ends))
    if len(b) > len(U) + 1:
        return None
    with torch.no_grad():
        results = graph(*[held_tensor(cell, path) for path in signature.held])
    heights = tuple([results[i].shape[0] for i in U])
    wiring = projection_wiring(from_text(signature.text), heights, len(b), inputs)
    return DirectCell(wiring, [*U, *b, *matrices, *vectors])


def _held(cell: Any, path: str) -> Tensor:
    """`held_tensor`, at once where an attribute is a part or a parameter: `nn.Module` searches."""
    for name in path.split("."):
        attributes = cell.__dict__
        own = attributes["_modules"].get(name)
        own = attributes["_parameters"].get(name) if own is None else own
        cell = getattr(cell, name) if own is None or name in attributes else own
    return cell


def _pieces(graph: fx.Graph, shapes: Sequence[tuple[int, ...]]) -> list[Any] | None:
    """What a graph returns: the number of a matrix, or the pieces that are added up in a vector. None: something else.

    It may slice vectors, add them, and join them.
    """
    aten, known, numbers = torch.ops.aten, {}, iter(range(len(shapes)))
    for node in graph.nodes:
        args = node.args
        if node.op == "placeholder":
            i = next(numbers)
            known[node] = i if len(shapes[i]) == 2 else [ParameterSlice(i, 0, *shapes[i])]
        elif node.op == "output":
            return [known[value] for value in args[0]]
        elif node.target == aten.slice.Tensor and isinstance(known[args[0]], list) and len(args) == 4:
            known[node] = _sliced(known[args[0]], args[2], args[3])
        elif node.target in (aten.add.Tensor, operator.add) and all(isinstance(a, fx.Node) for a in args):
            parts = [known[a] for a in args]
            if not all(isinstance(p, list) for p in parts) or node.kwargs:
                return None
            known[node] = [*parts[0], *parts[1]]
        elif node.target == aten.cat.default and all(isinstance(known[a], list) for a in args[0]):
            known[node], at = [], 0
            for part in (known[a] for a in args[0]):
                known[node] += [p._replace(column=p.column + at) for p in part]
                at += max(p.column + p.count for p in part)
        else:
            return None
    return None


def _sliced(pieces: Sequence[ParameterSlice], start: int, end: int) -> list[ParameterSlice]:
    slices = []
    for p in pieces:
        first, last = max(p.column, start), min(p.column + p.count, end)
        if first < last:
            slices.append(
                ParameterSlice(p.parameter, p.start + first - p.column, last - first, first - start)
            )
    return slices


def wired_cell(cell: Cell, tensors: dict[str, Tensor], names: Sequence[str], x: Tensor) -> Wired:
    """Of a layer whose parameters of these names take the places of the cell's."""
    first = next(iter(tensors.values()))
    plan = plans.plan_of(cell, plans.PlanRequest(x.dtype, first.dtype, str(x.device)), tensors)
    signature = plan.signature
    if signature is None:
        return Wired(None, names, type(cell).step)
    by_path = dict(zip(tensors, names, strict=True))
    held = [by_path[path] for path in signature.held]
    shapes = [tuple(tensors[path].shape) for path in signature.held]
    return Wired(cell_wiring(plan, shapes), held, type(cell).step)
