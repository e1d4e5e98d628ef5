"""A recorded step read column by column: which number of a row each element of each tensor is.

Every tensor of the step is followed as an integer tensor of the same shape whose elements name *numbers*: a number
belongs to a block (a state, the result of a product, of an element-wise operation, something known before the loop) and
to a row of the batch, or to all of them. Operations that only move elements (view, cat, chunk, slice, transpose, …) are
then run as they are, on these names, and whatever a step does with shapes is understood without a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from deeprnn.cells.expressions import Expression
from deeprnn.cells.tracing.blocks import BATCH, ROWS, Constant, Index, State
from deeprnn.cells.tracing.elementwise import EXPRESSIONS, OF_TRUTH_VALUES
from deeprnn.cells.tracing.operations import (
    FILLS,
    MOVES,
    ROW_WISE,
    SAME,
    TAKE_SIZES,
    name_of,
    treats_rows_apart,
)
from deeprnn.cells.tracing.outside import Outside
from deeprnn.cells.tracing.recording import Undescribable, where

MOST_POINTWISE = 1000
"""pointwise operations in the loop: reading and compiling more would take longer than a few seconds"""


@dataclass
class Columns(Outside):
    """The reading of a recorded step; `cuts` are the places of each part of each state."""

    cuts: list[list[Index]] = field(default_factory=list)
    narrow_stages: bool = True  # whether what many units read may be computed by a few units of their own
    state_parts: list[State] = field(default_factory=list)
    pointwise: int = 0  # operations
    results: dict[fx.Node, Sequence[Tensor]] = field(default_factory=dict)  # of operations that are neither

    def read(self, parameters: set[str], otherwise: Callable[[Columns, fx.Node], Sequence[Tensor]]) -> None:
        """Follow every node; `parameters` are the names of held tensors that may have gradients.

        `otherwise` reads operations in the loop that neither move elements nor are element-wise: the names of each of
        their results.
        """
        for node in list(self.recording.graph.nodes):
            if node.op == "placeholder":
                self._input(node, parameters)
            elif node.op == "get_attr":
                self.kinds[node], self.sources[node] = "fixed", frozenset()
            elif node.op == "call_function":
                self._call(node, otherwise)

    def _input(self, node: fx.Node, parameters: set[str]) -> None:
        recording = self.recording
        if node is recording.rows:
            self.kinds[node] = "size"
        elif node in recording.states:
            self.kinds[node] = "loop"
            k, width = recording.states.index(node), node.meta["shape"][1]
            names = torch.empty(BATCH, width, dtype=torch.long)
            for places in self.cuts[k]:
                state_part = self.add(State, len(places), k, places)
                self.state_parts.append(state_part)
                names[:, places] = self.name_rows(state_part, (BATCH, len(places)), 0)
            self.values[node] = names
        elif node is recording.x or node.meta.get("draw"):
            self.kinds[node] = "row"
            self.sources[node] = frozenset([node.meta.get("draw", "x")])
            self.fresh_row(node)
        else:
            name = next(n for n, held in recording.held.items() if held is node)
            self.kinds[node] = "fixed"
            self.sources[node] = frozenset(["parameter"] if name in parameters else [])

    def _call(self, node: fx.Node, otherwise: Callable[[Columns, fx.Node], Sequence[Tensor]]) -> None:
        kinds = [self.kinds[a] for a in node.all_input_nodes]
        kind = next((k for k in ("loop", "row", "fixed") if k in kinds), "size" if kinds else "fixed")
        name = name_of(node)
        if name in FILLS:
            self._filled(node, FILLS[name](*node.args, **node.kwargs), kind)
            return
        self.kinds[node] = kind
        known = [self.sources[a] for a in node.all_input_nodes if a in self.sources]
        self.sources[node] = frozenset().union(*known)
        if kind == "size" or node.meta.get("shape", ()) is None:  # of several results: one by one
            return
        inner: Any = node
        while inner.target is getitem:
            inner = inner.args[0]
        name = name_of(inner)
        if name not in TAKE_SIZES and any(self.kinds[a] == "size" for a in inner.all_input_nodes):
            raise Undescribable(f"{name} computes with the batch size{where(node)}")
        if name in MOVES:
            if kind != "fixed" or node.meta["batch"]:
                self.values[node] = self._moved(node)
        elif kind == "fixed" and not node.meta["batch"]:
            return
        elif kind == "row":
            self._row(node, inner, name)
        elif name in EXPRESSIONS:
            self._check_type(node)
            self.pointwise += 1
            if self.pointwise > MOST_POINTWISE:
                raise Undescribable(f"it has more than {MOST_POINTWISE:,} pointwise operations in the loop")
            flat, build = _arguments_apart(inner)
            self.values[node] = self.compute(build, [self.names(a) for a in flat], node)
        else:
            self._check_type(node)
            if inner not in self.results:
                self.results[inner] = otherwise(self, inner)
            self.values[node] = self.results[inner][0 if inner is node else node.args[1]]  # type: ignore[index]

    def _moved(self, node: fx.Node) -> Tensor:
        """The operation itself, on names."""
        if node.target is getitem:
            return self._moved(node.args[0])[node.args[1]]  # type: ignore[index,arg-type]
        mapped: Any = fx.map_arg((node.args, node.kwargs), self._argument)
        args, kwargs = mapped
        if name_of(node) == "constant_pad_nd":
            fill = self.add(Constant, 1, float(args[2] if len(args) > 2 else 0.0))
            args = (*args[:2], fill.start * ROWS)
        if name_of(node) in SAME:
            return args[0]
        if name_of(node) == "copy":
            self._check_copy(node)
        if name_of(node) in ("view", "_unsafe_view"):  # names need not lie in memory as the tensor does
            return args[0].reshape(args[1])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _argument(self, node: fx.Node) -> Any:
        if self.kinds[node] != "size":
            return self.names(node)
        return BATCH if node is self.recording.rows else BATCH * node.args[1]  # type: ignore[operator]

    def _filled(self, node: fx.Node, value: Any, kind: str) -> None:
        if isinstance(value, fx.Node):
            raise Undescribable(f"{name_of(node)} fills with the value of a tensor{where(node)}")
        block = self.add(Constant, 1, float(value))
        self.values[node] = torch.full(node.meta["shape"], block.start * ROWS)
        self.kinds[node], self.sources[node] = "row" if kind == "loop" else "fixed", frozenset()

    def _row(self, node: fx.Node, inner: fx.Node, name: str) -> None:
        """A function of x: nothing of it may mix the rows of a batch."""
        given = [a for a in inner.all_input_nodes if self.kinds[a] == "row"]
        if name in EXPRESSIONS or torch.Tag.pointwise in getattr(inner.target, "tags", ()):
            shape = node.meta["shape"]
            self.rows_of([self.names(a).expand(shape) for a in given], node)
        elif name not in ROW_WISE or not treats_rows_apart(inner, {a: self.names(a) for a in given}, ROWS):
            raise Undescribable(f"{name} mixes the rows of a batch, or may do so{where(node)}")
        self.fresh_row(node)

    def _check_copy(self, node: fx.Node) -> None:
        """What is written into a tensor takes its type: truth values may become numbers, and nothing else another."""
        into, given = (a.meta["dtype"] for a in node.all_input_nodes[:2])
        if into != given and not (given is torch.bool and into.is_floating_point):
            raise Undescribable(f"{given} is written into a tensor of {into}{where(node)}")

    def _check_type(self, node: fx.Node) -> None:
        dtype, state = node.meta["dtype"], self.recording.states[0].meta["dtype"]
        if dtype not in (state, torch.bool):
            raise Undescribable(
                f"{name_of(node)} computes in {dtype} while the state is {state}{where(node)}"
            )


def _arguments_apart(node: fx.Node) -> tuple[list[fx.Node], Callable[..., Expression]]:
    """The tensors among a node's arguments, and a function of expressions in their place."""
    flat: list[fx.Node] = []

    def note(arg: fx.Node) -> int:
        flat.append(arg)
        return len(flat) - 1

    places = fx.map_arg((node.args, node.kwargs), lambda n: _Place(note(n)))
    build = EXPRESSIONS[name_of(node)]
    if node.meta.get("dtype") is torch.bool:
        build = OF_TRUTH_VALUES.get(name_of(node), build)

    def rebuild(*given: Expression) -> Expression:
        args, kwargs = _filled_in(places, given)
        return build(*args, **kwargs)

    return flat, rebuild


class _Place(int):
    """Where an argument goes."""


def _filled_in(structure: Any, given: Sequence[Expression]) -> Any:
    if isinstance(structure, _Place):
        return given[structure]
    if isinstance(structure, (tuple, list)):
        return type(structure)(_filled_in(x, given) for x in structure)
    if isinstance(structure, dict):
        return {k: _filled_in(x, given) for k, x in structure.items()}
    return structure
