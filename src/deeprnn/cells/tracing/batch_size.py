"""What of a recorded step grows with the batch size, found by comparing recordings of two sizes.

A number that differs between the two must be a multiple of the batch size, or the step is refused.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from deeprnn.cells.tracing.recording import SIZES, Recording, Undescribable, where


def mark_batch(first: Recording, second: Recording) -> None:
    """Let numbers that grow with the batch size be nodes of the first graph; note the batch dimensions of values."""
    ours, theirs = list(first.graph.nodes), list(second.graph.nodes)
    multiples: dict[int, fx.Node] = {1: first.rows}

    def compared(a: Any, b: Any, node: fx.Node) -> Any:
        if isinstance(a, fx.Node):
            if not isinstance(b, fx.Node) or a.name != b.name:
                raise Undescribable(f"what the step does depends on the batch size{where(node)}")
            return a
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
            return type(a)([compared(x, y, node) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {k: compared(a[k], b[k], node) for k in a}
        if isinstance(a, torch.ScriptObject):
            raise Undescribable(f"{node.target} takes an object that is no tensor{where(node)}")
        if a == b:
            return a
        if isinstance(a, int) and isinstance(b, int) and a * SIZES[1] == b * SIZES[0]:
            times = a // SIZES[0]
            if times not in multiples:
                with first.graph.inserting_after(first.rows):
                    multiples[times] = first.graph.call_function(operator.mul, (first.rows, times))
            return multiples[times]
        raise Undescribable(f"what the step computes depends on the batch size{where(node)}")

    if [n.target for n in ours if n.op == "call_function"] != [
        n.target for n in theirs if n.op == "call_function"
    ]:
        raise Undescribable("the operations of the step depend on the batch size")
    if any(not torch.equal(t, second.constants[name]) for name, t in first.constants.items()):
        raise Undescribable("a tensor that the step makes depends on the batch size")
    for a, b in zip(ours, theirs, strict=True):
        if a.op == "call_function":
            a.args, a.kwargs = compared(a.args, b.args, a), compared(a.kwargs, b.kwargs, a)
        if a.meta.get("shape") is not None:
            pairs = enumerate(zip(a.meta["shape"], b.meta["shape"], strict=True))
            a.meta["batch"] = tuple(i for i, (m, n) in pairs if m != n)
