"""Random draws become inputs of a recorded step, and tensors of a constant are made from their sizes alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from deeprnn.cells.tracing.operations import FILLS, name_of
from deeprnn.cells.tracing.recording import SIZES, Draw, Recording, Undescribable, where

aten = torch.ops.aten


def normalise(recording: Recording) -> None:
    """Let random draws be inputs of the graph, and tensors of a constant be made from their sizes."""
    for node in list(recording.graph.nodes):
        if node.op != "call_function":
            continue
        name = name_of(node)
        with recording.graph.inserting_before(node):
            if name in FILLS and node.meta["batch"]:
                _refill(recording, node, FILLS[name](*node.args, **node.kwargs))
            elif name in _RANDOM:
                new = _RANDOM[name](recording, node)
                node.replace_all_uses_with(new)
                recording.graph.erase_node(node)
            elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise Undescribable(f"{name} draws random numbers in a way that is not known{where(node)}")
    recording.new_states = list(recording.graph.output_node().args[0])  # type: ignore[arg-type]  # some were replaced
    recording.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _refill(recording: Recording, node: fx.Node, value: Any) -> None:
    is_tensor = isinstance(value, fx.Node) and value.meta.get("shape") == ()
    if isinstance(value, fx.Node) and not is_tensor:
        raise Undescribable(f"{name_of(node)} computes with the batch size{where(node)}")
    size = _size(recording, node)
    if is_tensor:  # as in y[:, 0] = 0.5, where torch makes a tensor of the number
        if value.meta["dtype"] != node.meta["dtype"]:
            value = _call(recording, value, aten._to_copy.default, value, dtype=node.meta["dtype"])
            value.meta["dtype"] = node.meta["dtype"]
        new = recording.graph.call_function(aten.expand.default, (value, size))
    else:
        new = recording.graph.call_function(aten.full.default, (size, value), {"dtype": node.meta["dtype"]})
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    recording.graph.erase_node(node)


def _size(recording: Recording, node: fx.Node) -> list[Any]:
    """A node's shape, the batch size as a node."""
    shape: list[Any] = list(node.meta["shape"])
    for d in node.meta["batch"]:
        times = shape[d] // SIZES[0]
        rows = recording.rows
        shape[d] = rows if times == 1 else recording.graph.call_function(operator.mul, (rows, times))
    return shape


def _draw(recording: Recording, node: fx.Node, kind: str, per_sequence: bool = False) -> fx.Node:
    """A new input of the graph in place of a random operation."""
    shape, batch = node.meta["shape"], node.meta["batch"]
    if batch != (0,) or shape[0] != SIZES[0]:
        raise Undescribable(f"{name_of(node)} draws numbers that belong to no row of the batch{where(node)}")
    with recording.graph.inserting_after(recording.rows):
        new = recording.graph.placeholder(f"draw_{len(recording.draws)}")
    new.meta = dict(node.meta) | {"draw": "sequence" if per_sequence else "step"}
    recording.draws.append(Draw(kind, new, tuple(shape[1:]), per_sequence))
    return new


def _call(recording: Recording, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = recording.graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    return node


def _bernoulli(recording: Recording, node: fx.Node) -> fx.Node:
    args: Any = node.args
    given = args[1] if len(args) > 1 and isinstance(args[1], float) else args[0]
    uniform = _draw(recording, node, "uniform")
    below = aten.lt.Tensor if isinstance(given, fx.Node) else aten.lt.Scalar
    chosen = _call(recording, node, below, uniform, given)
    chosen.meta["dtype"] = torch.bool
    return _call(recording, node, aten._to_copy.default, chosen, dtype=node.meta["dtype"])


def _scaled(recording: Recording, node: fx.Node, kind: str, offset: float, scale: float) -> fx.Node:
    drawn = _draw(recording, node, kind)
    if scale != 1:
        drawn = _call(recording, node, aten.mul.Tensor, drawn, scale)
    return drawn if offset == 0 else _call(recording, node, aten.add.Tensor, drawn, offset)


def _two(node: fx.Node) -> tuple[float, float]:
    """The two numbers that a distribution is given by, 0 and 1 where they are left out."""
    given: Any = (*node.args[1:3], *(0.0, 1.0)[len(node.args) - 1 :])
    return given


def _uniform(recording: Recording, node: fx.Node) -> fx.Node:
    low, high = _two(node)
    return _scaled(recording, node, "uniform", low, high - low)


def _normal(recording: Recording, node: fx.Node) -> fx.Node:
    mean, std = _two(node)
    return _scaled(recording, node, "normal", mean, std)


_RANDOM: dict[str, Callable[[Recording, fx.Node], fx.Node]] = {
    "bernoulli": _bernoulli,
    "rand": lambda recording, node: _draw(recording, node, "uniform"),
    "rand_like": lambda recording, node: _draw(recording, node, "uniform"),
    "randn": lambda recording, node: _draw(recording, node, "normal"),
    "randn_like": lambda recording, node: _draw(recording, node, "normal"),
    "uniform": _uniform,
    "normal_functional": _normal,
    "sequence_uniform": lambda recording, node: _draw(recording, node, "uniform", per_sequence=True),
}
