"""How large the numbers of a cell can become: what is known of its outputs before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product

from deeprnn.cells.description import CellDescription, Output
from deeprnn.cells.expressions import Expression, constant, fold, in_order, replace
from deeprnn.cells.functions import ANY, FUNCTIONS, Interval

MOST_GATES = 4
"""gates of one output whose extremes are tried in all combinations"""
POLYNOMIAL = ("add", "subtract", "negative", "multiply")
MAGNITUDES = (1.0, 2.0, 1e3, 1e6)
"""of states, for which it is checked that they grow no further"""


class Bounds:
    """Ranges of a cell's outputs where no state is larger than `most`."""

    def __init__(self, cell: CellDescription, most: float) -> None:
        self.cell, self.most = cell, most
        self.known: dict[Output, Interval] = {}

    def of(self, output: Output) -> Interval:
        """Where an output lies, whatever else the cell is given.

        A gate that appears several times, as z in z h + (1 - z) n, is the same number in all places: where a formula
        is affine in it, the extremes are those at the gate's own extremes.
        """
        if output not in self.known:
            formula = self.cell.stages[output.stage].outputs[output.index]
            gates = list(islice(self._repeated_gates(formula), MOST_GATES))
            ranges = []
            for ends in product(*(self._by_intervals([gate])[0] for gate in gates)):
                at_ends = replace(
                    formula, {gate: constant(end) for gate, end in zip(gates, ends, strict=True)}
                )
                ranges += self._by_intervals([at_ends])
            self.known[output] = min(low for low, _ in ranges), max(high for _, high in ranges)
        return self.known[output]

    def _by_intervals(self, formulas: Sequence[Expression]) -> list[Interval]:
        found = fold(formulas, self._of_leaf, lambda name, args: FUNCTIONS[name].bounds(*args))
        return [
            (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
            for low, high in found
        ]

    def _of_leaf(self, node: Expression) -> Interval:
        if node.op == "constant":
            value = float(node.value)  # type: ignore[arg-type]
            return value, value
        if node.op == "output":
            return self.of(Output(*node.value))  # type: ignore[misc]
        return (-self.most, self.most) if node.op == "state" else ANY

    def _repeated_gates(self, formula: Expression) -> Iterator[Expression]:
        """Bounded parts in which the formula is affine, and which it reads more than once."""
        nodes = in_order([formula])
        uses = dict.fromkeys(nodes, 0)
        for node in nodes:
            for argument in node.args:
                uses[argument] += 1
        bent = {a for n in nodes if n.op not in POLYNOMIAL for a in n.args}
        shared = [
            n for n in nodes if uses[n] > 1 and n not in bent and (len(n.args) == 1 or n.op == "output")
        ]
        for node, ends in zip(shared, self._by_intervals(shared), strict=True):
            if all(map(math.isfinite, ends)) and _degree(nodes, node) == 1:
                yield node


def _degree(nodes: Sequence[Expression], variable: Expression) -> float:
    """Of a formula, the last of its parts, as a polynomial in one of them; infinite where it is none."""
    degrees: dict[Expression, float] = {}
    for node in nodes:
        if node == variable:
            degrees[node] = 1
            continue
        inner = [degrees[a] for a in node.args]
        if node.op not in POLYNOMIAL:
            degrees[node] = math.inf if any(inner) else 0
        else:
            degrees[node] = sum(inner) if node.op == "multiply" else max(inner)
    return degrees[nodes[-1]]


@lru_cache(maxsize=512)
def within_one(cell: CellDescription, output: Output) -> bool:
    """Whether an output lies within ±1 whatever the cell is given."""
    low, high = Bounds(cell, math.inf).of(output)
    return low >= -1.0 and high <= 1.0


@lru_cache(maxsize=512)
def within_first_states(cell: CellDescription, outputs: tuple[Output, ...]) -> bool:
    """Whether neither states nor these outputs exceed both 1 and the largest number of the first states."""
    for most in MAGNITUDES:
        bounds = Bounds(cell, most)
        for low, high in map(bounds.of, (*cell.new_states, *outputs)):
            if low < -most or high > most:
                return False
    return True
