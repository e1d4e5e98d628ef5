"""From a user's step in ordinary PyTorch to a description, and to what it needs before the loop begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from deeprnn.cells.description import CellDescription
from deeprnn.cells.tracing import products, reductions
from deeprnn.cells.tracing.batch_size import mark_batch
from deeprnn.cells.tracing.columns import Columns
from deeprnn.cells.tracing.hoisting import HoistedNodes, extract
from deeprnn.cells.tracing.normalising import normalise
from deeprnn.cells.tracing.pulling import pull_expressions
from deeprnn.cells.tracing.recording import Draw, Recording, Undescribable, record
from deeprnn.cells.tracing.staging import StageAssignment
from deeprnn.cells.tracing.writing import WrittenCell

__all__ = ["Graphs", "StatePart", "TracedStep", "Undescribable", "trace"]


class StatePart(NamedTuple):
    """A state of the description: the whole of a state of the cell (places None), or some places of it."""

    state: int
    places: tuple[int, ...] | None


class Graphs(NamedTuple):
    """What is computed before the loop, for tensors on one device."""

    fixed: fx.GraphModule  # (*held) -> (*matrices, *vectors, *U, *b, *what the others need)
    rows: fx.GraphModule | None  # (rows, x, *draws, *needed) -> (A or its source, *masks of steps)
    sequence: fx.GraphModule | None  # (rows, *draws, *needed) -> masks of sequences


@dataclass
class TracedStep:
    """A step that has been described."""

    cell: CellDescription
    parts: list[StatePart]
    held: list[str]  # paths of the tensors that the graphs take
    draws: list[Draw]
    hoisted: HoistedNodes
    _graphs: dict[torch.device, Graphs] = field(default_factory=dict)

    @property
    def linear(self) -> bool:
        """Whether A is one product of rows with matrices that are computed before the loop."""
        return bool(self.hoisted.U)

    @property
    def plain_input(self) -> bool:
        """Whether those rows are x itself."""
        return self.linear and self.hoisted.entering is self.hoisted.columns.recording.x

    def graphs(self, device: torch.device) -> Graphs:
        """The graphs that compute what the loop needs."""
        if device not in self._graphs:
            self._graphs[device] = self._extract(device)
        return self._graphs[device]

    def _extract(self, device: torch.device) -> Graphs:
        hoisted, recording = self.hoisted, self.hoisted.columns.recording
        kinds = hoisted.columns.kinds
        entering = [] if hoisted.entering is None or self.plain_input else [hoisted.entering]
        by_step = entering + [n for n, per_sequence in hoisted.masks if not per_sequence]
        by_sequence = [n for n, per_sequence in hoisted.masks if per_sequence]
        needed = [_boundary(outputs, kinds) for outputs in (by_step, by_sequence)]
        draws = [d.node for d in self.draws]
        once = [d.node for d in self.draws if d.per_sequence]
        fixed = [*hoisted.written.matrices, *hoisted.vectors, *hoisted.U, *hoisted.b, *needed[0], *needed[1]]
        held = [recording.held[name] for name in self.held]

        def part(inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
            return extract(recording.graph, inputs, outputs, recording.constants, device)

        return Graphs(
            part(held, fixed),
            part([recording.rows, recording.x, *draws, *needed[0]], by_step) if by_step else None,
            part([recording.rows, *once, *needed[1]], by_sequence) if by_sequence else None,
        )


def _boundary(outputs: Sequence[fx.Node], kinds: Mapping[fx.Node, str]) -> list[fx.Node]:
    """What is computed from parameters alone, among what the outputs need."""
    found: dict[fx.Node, None] = {}
    seen, stack = set(), list(outputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if kinds.get(node) == "fixed" and not node.meta["batch"]:
            found[node] = None
        else:
            stack += node.all_input_nodes
    return list(found)


def trace(
    step: Callable[..., Any],
    module: nn.Module,
    held: Mapping[str, Tensor],
    parameters: set[str],
    x: tuple[tuple[int, ...], torch.dtype],
    states: Sequence[int],
    dtype: torch.dtype,
    narrow_stages: bool = True,
) -> TracedStep:
    """Describe `step(x, *states)`, or raise `Undescribable` with the operation and the line that prevent it.

    With `narrow_stages` a number that many units read, such as a mean, is computed once, by a stage of its own. That
    saves work on a CPU; in a persistent kernel every unit had better compute it, for an exchange takes longer.
    """
    recording, other = record(step, module, held, x, states, dtype)
    try:
        return _described(recording, other, parameters, states, narrow_stages)
    except Undescribable as error:
        error.may_write = False
        raise
    except Exception as error:  # a fault here should not keep anybody from a step that torch can compute
        refusal = Undescribable(f"reading it failed: {type(error).__name__}: {error}")
        refusal.may_write = False
        raise refusal from error


def _read_operation(columns: Columns, node: fx.Node) -> Sequence[Tensor]:
    """The names of the numbers of each result of an operation that neither moves numbers nor is element-wise."""
    return reductions.read(columns, node) or (products.read(columns, node),)


def _described(
    recording: Recording, other: Recording, parameters: set[str], states: Sequence[int], narrow_stages: bool
) -> TracedStep:
    mark_batch(recording, other)
    normalise(recording)

    def read(cuts: list[list[Any]]) -> Columns:
        columns = Columns(recording, cuts=cuts, narrow_stages=narrow_stages)
        columns.read(parameters, _read_operation)
        return columns

    expressions = pull_expressions(read, states)
    staging = StageAssignment(expressions)
    staging.arrange()
    written = WrittenCell(staging)
    written.write()
    hoisted = HoistedNodes(written)
    hoisted.hoist()
    parts = [
        StatePart(a.state, None if a.width == states[a.state] else tuple(a.places.tolist()))
        for a in expressions.columns.state_parts
    ]
    used = {n for n in recording.graph.nodes if n.users}
    names = [name for name, node in recording.held.items() if node in used]
    return TracedStep(written.cell, parts, names, recording.draws, hoisted)
