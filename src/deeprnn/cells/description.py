"""A cell as data: states, stages of matrix products with pointwise code behind them, and the new states.

One step of a recurrence goes through its stages in order. A stage has units; each unit has one or more
*pre-activations*,

    a = A[t] + Σ_k W_k v_k,

where A[t], the *entry*, comes from the input and is computed for all steps before the loop, and v_k is a vector: a
state of the step before or an output of an earlier stage. Pointwise code (`expressions`) turns a unit's
pre-activations, and states and earlier outputs of the same unit, into the stage's outputs. The new states are outputs.
Everything that runs a recurrence is made from this description: the plain loop, machine code, kernels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from deeprnn.cells.expressions import LEAVES, Expression, from_data, in_order, leaf, leaves_of, to_data
from deeprnn.cells.functions import FUNCTIONS


class Vector(NamedTuple):
    """What a product multiplies: state number `index` of the step before, or output (`stage`, `index`) of this one."""

    kind: str  # "state" or "output"
    index: int
    stage: int = 0

    @property
    def leaf(self) -> Expression:
        """The same as a leaf of pointwise code."""
        return leaf("state", self.index) if self.kind == "state" else leaf("output", self.stage, self.index)


class Rows(NamedTuple):
    """Every `step`-th row (or column) from `start` on, one for each unit."""

    start: int
    step: int = 1


class Product(NamedTuple):
    """Rows of a matrix times a vector; `column` is the first of the columns that multiply it."""

    matrix: int
    vector: Vector
    rows: Rows = Rows(0)
    column: int = 0


class Preactivation(NamedTuple):
    """A sum of products and, where there is one, of an entry: columns of A."""

    products: tuple[Product, ...]
    entry: Rows | None = None


class Stage(NamedTuple):
    """Units that are computed together."""

    size: int
    preactivations: tuple[Preactivation, ...]
    outputs: tuple[Expression, ...]

    @property
    def summed(self) -> tuple[int, ...]:
        """The pre-activations that products are added up in."""
        return tuple(i for i, a in enumerate(self.preactivations) if a.products)


class Output(NamedTuple):
    """An output by its stage and its number there."""

    stage: int
    index: int


@dataclass(frozen=True, eq=False)
class CellDescription:
    """One step of a recurrence, without its numbers. Frozen and hashable: compiled code is kept by it."""

    states: tuple[int, ...]
    """size of each state"""
    stages: tuple[Stage, ...]
    new_states: tuple[Output, ...]
    """the output that each state becomes"""
    matrices: tuple[tuple[int, int], ...]
    """shapes (rows, columns)"""
    entry_width: int
    """columns of A"""
    vectors: tuple[int, ...] = ()
    """sizes of parameters with one number a unit"""
    masks: tuple[int, ...] = ()
    """sizes of inputs that take no gradient, such as dropout masks: one a step or one a sequence"""

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.states, self.stages, self.new_states, self.matrices, self.entry_width, self.vectors)
        )

    def __hash__(self) -> int:
        return self._hash  # computed once: every call of a layer looks plans up by its cell

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, CellDescription):
            return self is other
        return hash(self) == hash(other) and all(getattr(self, n) == getattr(other, n) for n in _FIELDS)

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """Every output, stage by stage."""
        return tuple(Output(s, k) for s, stage in enumerate(self.stages) for k in range(len(stage.outputs)))

    def size_of(self, vector: Vector) -> int:
        """How long a vector is."""
        return self.states[vector.index] if vector.kind == "state" else self.stages[vector.stage].size

    @cached_property
    def products(self) -> tuple[tuple[int, int, Product], ...]:
        """Every product with its stage and pre-activation."""
        return tuple(
            (s, i, product)
            for s, stage in enumerate(self.stages)
            for i, a in enumerate(stage.preactivations)
            for product in a.products
        )

    @cached_property
    def travelling(self) -> frozenset[Output]:
        """Outputs that some product multiplies, in this step or as a state in the next."""
        outputs = set()
        for _, _, product in self.products:
            v = product.vector
            outputs.add(self.new_states[v.index] if v.kind == "state" else Output(v.stage, v.index))
        return frozenset(outputs)

    @cached_property
    def text(self) -> str:
        """As JSON: the form in which torch operators take it."""
        stages = [
            {
                "size": stage.size,
                "preactivations": stage.preactivations,
                "outputs": to_data(stage.outputs),
            }
            for stage in self.stages
        ]
        others = ("states", "new_states", "matrices", "entry_width", "vectors", "masks")
        text = json.dumps({"stages": stages, **{name: getattr(self, name) for name in others}})
        _BY_TEXT.setdefault(text, self)
        return text


_FIELDS = tuple(field.name for field in fields(CellDescription))
_BY_TEXT: WeakValueDictionary[str, CellDescription] = WeakValueDictionary()
"""descriptions whose text is known: reading it gives the same object, which compares at once"""


@lru_cache(maxsize=1024)
def from_text(text: str) -> CellDescription:
    """Read what `CellDescription.text` wrote."""
    if (known := _BY_TEXT.get(text)) is not None:
        return known
    data: dict[str, Any] = json.loads(text)
    stages = tuple(
        Stage(
            stage["size"],
            tuple(_preactivation(*a) for a in stage["preactivations"]),
            from_data(stage["outputs"]),
        )
        for stage in data["stages"]
    )
    return CellDescription(
        states=tuple(data["states"]),
        stages=stages,
        new_states=tuple(Output(*o) for o in data["new_states"]),
        matrices=tuple((rows, columns) for rows, columns in data["matrices"]),
        entry_width=data["entry_width"],
        vectors=tuple(data["vectors"]),
        masks=tuple(data["masks"]),
    )


def _preactivation(products: list, entry: list | None) -> Preactivation:
    read = tuple(Product(m, Vector(*v), Rows(*rows), column) for m, v, rows, column in products)
    return Preactivation(read, None if entry is None else Rows(*entry))


def _check(cell: CellDescription) -> None:
    """Refuse a description whose parts do not fit: a kernel would read beyond an end."""
    if len(cell.states) != len(cell.new_states):
        raise ValueError(f"{len(cell.states)} states need as many new ones, got {len(cell.new_states)}")
    for size, output in zip(cell.states, cell.new_states, strict=True):
        if cell.stages[output.stage].size != size or output.index >= len(cell.stages[output.stage].outputs):
            raise ValueError(f"a state of {size} units cannot become output {tuple(output)}")
    for s, stage in enumerate(cell.stages):
        _check_functions(stage, s)
        for a in stage.preactivations:
            if a.entry is not None and a.entry.start + (stage.size - 1) * a.entry.step >= cell.entry_width:
                raise ValueError(f"stage {s} reads beyond the {cell.entry_width} columns of A")
            for product in a.products:
                _check_product(cell, s, product)
        _check_leaves(cell, s)


def _check_functions(stage: Stage, s: int) -> None:
    for node in in_order(stage.outputs):
        known = LEAVES if node.is_leaf else FUNCTIONS
        if node.op not in known:
            kind = "leaf" if node.is_leaf else "function"
            raise ValueError(f"stage {s} has an unknown {kind} {node.op!r}: known are {', '.join(known)}")
        count = None if node.is_leaf else FUNCTIONS[node.op].arity
        if count not in (None, len(node.args)):
            raise ValueError(f"stage {s} gives {node.op} {len(node.args)} arguments, it takes {count}")


def _check_product(cell: CellDescription, s: int, product: Product) -> None:
    rows, columns = cell.matrices[product.matrix]
    if product.vector.kind == "output" and product.vector.stage >= s:
        raise ValueError(f"stage {s} multiplies an output of stage {product.vector.stage}, which comes later")
    if product.rows.start + (cell.stages[s].size - 1) * product.rows.step >= rows:
        raise ValueError(f"stage {s} reads beyond the {rows} rows of matrix {product.matrix}")
    if product.column + cell.size_of(product.vector) > columns:
        raise ValueError(f"stage {s} reads beyond the {columns} columns of matrix {product.matrix}")


def _check_leaves(cell: CellDescription, s: int) -> None:
    stage = cell.stages[s]
    sizes = {"state": cell.states, "vector": cell.vectors, "mask": cell.masks}
    for kind, known in sizes.items():
        for node in leaves_of(stage.outputs, kind):
            (index,) = node.value  # type: ignore[misc]
            if known[index] != stage.size:
                raise ValueError(f"stage {s} of {stage.size} units uses {kind} {index} of {known[index]}")
    for node in leaves_of(stage.outputs, "output"):
        other, index = node.value  # type: ignore[misc]
        if other >= s or cell.stages[other].size != stage.size or index >= len(cell.stages[other].outputs):
            raise ValueError(f"stage {s} uses output {index} of stage {other}, which it cannot see")
    for node in leaves_of(stage.outputs, "preactivation"):
        (index,) = node.value  # type: ignore[misc]
        if index >= len(stage.preactivations):
            raise ValueError(f"stage {s} has no pre-activation {index}")
