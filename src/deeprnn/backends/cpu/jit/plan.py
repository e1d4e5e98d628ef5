"""How a transition is cut for machine code: panels of columns, products of a step, and the plan of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deeprnn.backends.cpu.jit.emit import DOUBLE, FLOAT


@dataclass(frozen=True)
class Panels:
    """How the columns of one product are cut: `count` panels, the first `wide` one vector wider."""

    columns: int
    lanes: int
    count: int
    width: int  # vectors
    wide: int

    @classmethod
    def cut(cls, columns: int, lanes: int, parts: int, most: int) -> Panels:
        """As few panels as fit, a multiple of `parts`, as equal as possible."""
        vectors = -(-columns // lanes)
        count = parts * -(-vectors // (parts * most))
        return cls(columns, lanes, count, vectors // count, vectors % count)

    def start(self, panel: int) -> int:
        """First vector of a panel."""
        return panel * self.width + min(panel, self.wide)

    def span(self, panel: int) -> tuple[int, int]:
        """Columns [a, b) of a panel."""
        a, b = self.start(panel) * self.lanes, self.start(panel + 1) * self.lanes
        return min(a, self.columns), min(b, self.columns)

    @property
    def padded(self) -> int:
        """Columns including those added to fill the last vector."""
        return -(-self.columns // self.lanes) * self.lanes


@dataclass(frozen=True)
class Plan:
    """Everything the machine code depends on."""

    sizes: tuple[int, ...]
    units: tuple[str, ...]
    shortcuts: tuple[bool, ...]
    double: bool
    heights: tuple[int, ...]  # rows of the tiles, the taller first
    parts: int  # threads that share every layer's columns
    reset: bool
    z_gradient: bool = True
    lanes: int = 16
    registers: int = 32

    @property
    def number(self) -> Any:
        return DOUBLE if self.double else FLOAT

    @property
    def most(self) -> int:
        """Vectors in a panel: results, one row of weights and one broadcast must fit the registers."""
        return max(1, min((self.registers - 2) // (max(self.heights) + 1), 13))

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[:l]) for l in range(len(self.sizes)))

    def products(self, backward: bool) -> list[Product]:
        """The products of one step in the order they run."""
        return _backward_products(self) if backward else _forward_products(self)


@dataclass(frozen=True)
class Product:
    """Columns of one result and the (matrix, depth) whose products with rows are added up in it."""

    layer: int
    panels: Panels
    terms: tuple[tuple[str, int, int], ...]  # ("W" or "S", layer of the matrix, depth k)
    offset: int  # of the first panel in the packed weights

    @property
    def depth(self) -> int:
        return sum(depth for _, _, depth in self.terms)

    @property
    def size(self) -> int:
        return self.depth * self.panels.padded


def _assemble(plan: Plan, specs: Sequence[tuple[int, int, list[tuple[str, int, int]]]]) -> list[Product]:
    products, offset = [], 0
    for layer, columns, terms in specs:
        panels = Panels.cut(columns, plan.lanes, plan.parts, plan.most)
        products.append(Product(layer, panels, tuple(terms), offset))
        offset += products[-1].size
    return products


def _forward_products(plan: Plan) -> list[Product]:
    H = plan.sizes[-1]
    specs = []
    for l, size in enumerate(plan.sizes):
        terms = [("W", l, plan.sizes[l - 1] if l else H)]
        if plan.shortcuts[l]:
            terms.append(("S", l, H))
        specs.append((l, size, terms))
    return _assemble(plan, specs)


def _backward_products(plan: Plan) -> list[Product]:
    """δ_{L-1} .. δ_1 and then, as layer -1, what goes back to h(t-1)."""
    specs = [
        (l, plan.sizes[l], [("W", l + 1, plan.sizes[l + 1])]) for l in range(len(plan.sizes) - 2, -1, -1)
    ]
    back = [("W", 0, plan.sizes[0])]
    back += [("S", l, plan.sizes[l]) for l in range(len(plan.sizes)) if plan.shortcuts[l]]
    return _assemble(plan, [*specs, (-1, plan.sizes[-1], back)])
