"""The fewest values that carry what one stage computed to a later one: a minimal vertex cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from deeprnn.cells.expressions import Expression, in_order
from deeprnn.cells.functions import FUNCTIONS

Vertex = tuple[Expression, str]  # an expression as it is computed ("in") and as it is used ("out")


def minimal_cut(
    roots: Sequence[Expression], source: Callable[[Expression], bool], may_cut: Callable[[Expression], bool]
) -> list[Expression]:
    """Parts that together stand between all sources and the roots, as few as can be, as close to the roots as can be.

    Of equally many, the values of costly functions: a backward pass reads those where they are stored.
    """
    nodes = in_order(roots)
    reaches = set()
    for node in nodes:
        if source(node) or any(a in reaches for a in node.args):
            reaches.add(node)
    if not reaches:
        return []
    forward: dict[Vertex, dict[Vertex, float]] = {}

    def edge(a: Vertex, b: Vertex, capacity: float) -> None:
        forward.setdefault(a, {})[b] = capacity
        forward.setdefault(b, {}).setdefault(a, 0)

    start, end = (Expression("start"), "out"), (Expression("end"), "in")
    for node in (n for n in nodes if n in reaches):
        costly = node.op in FUNCTIONS and not FUNCTIONS[node.op].cheap
        edge((node, "in"), (node, "out"), (100 if costly else 101) if may_cut(node) else float("inf"))
        if source(node):
            edge(start, (node, "in"), float("inf"))
        for arg in node.args:
            if arg in reaches:
                edge((arg, "out"), (node, "in"), float("inf"))
    for root in set(roots) & reaches:
        edge((root, "out"), end, float("inf"))
    while (path := _path(forward, start, end)) is not None:
        steps = list(pairwise(path))
        least = min(forward[a][b] for a, b in steps)
        for a, b in steps:
            forward[a][b] -= least
            forward[b][a] += least
    back = _reaching(forward, end)
    return [n for n in nodes if n in reaches and (n, "out") in back and (n, "in") not in back]


def _path(graph: dict[Vertex, dict[Vertex, float]], start: Vertex, end: Vertex) -> list[Vertex] | None:
    """A way along edges that have capacity left."""
    came: dict[Vertex, Vertex | None] = {start: None}
    queue = [start]
    for vertex in queue:
        if vertex == end:
            path = [vertex]
            while (before := came[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for other, capacity in graph.get(vertex, {}).items():
            if capacity > 0 and other not in came:
                came[other] = vertex
                queue.append(other)
    return None


def _reaching(graph: dict[Vertex, dict[Vertex, float]], end: Vertex) -> set[Vertex]:
    """Vertices from which the end can be reached along edges that have capacity left."""
    found, queue = {end}, [end]
    for vertex in queue:
        for other in graph.get(vertex, ()):  # every edge is there in both directions
            if other not in found and graph[other][vertex] > 0:
                found.add(other)
                queue.append(other)
    return found
