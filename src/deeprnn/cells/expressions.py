"""Pointwise expressions: small graphs over numbers that belong to one unit of one batch row.

An expression is a leaf (a pre-activation, a state of the step before, an output of an earlier stage, a per-unit
parameter, a per-step input, a constant) or a function of `functions.FUNCTIONS` applied to expressions. Expressions
are plain frozen data: they compare and hash by what they compute, and can be written to text and read again.

Parts are shared: written out as a tree, a step of 30 squarings would have a billion leaves. Whatever goes through
expressions goes through `in_order`, and neither through all paths nor down Python's own stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

T = TypeVar("T")
LEAVES = ("preactivation", "state", "output", "vector", "mask", "saved", "gradient", "constant")
"""kinds of leaves in descriptions; code generators have more of their own"""


@dataclass(frozen=True, eq=False, repr=False)
class Expression:
    """A leaf, whose `value` says which one, or the function `op` of other expressions."""

    op: str
    args: tuple[Expression, ...] = ()
    value: tuple[int, ...] | float = ()
    digest: bytes = field(init=False)
    """what is computed, in 16 bytes that are the same in every process: so two expressions compare at once"""

    def __post_init__(self) -> None:
        digest = blake2b(f"{self.op} {self.value!r}".encode(), digest_size=16)
        for arg in self.args:
            digest.update(arg.digest)
        object.__setattr__(self, "digest", digest.digest())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expression) and self.digest == other.digest)

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is computed here."""
        return not self.args

    def __add__(self, other: Expression | float) -> Expression:
        return add(self, as_expression(other))

    def __radd__(self, other: float) -> Expression:
        return add(as_expression(other), self)

    def __sub__(self, other: Expression | float) -> Expression:
        return subtract(self, as_expression(other))

    def __rsub__(self, other: float) -> Expression:
        return subtract(as_expression(other), self)

    def __mul__(self, other: Expression | float) -> Expression:
        return multiply(self, as_expression(other))

    def __rmul__(self, other: float) -> Expression:
        return multiply(as_expression(other), self)

    def __truediv__(self, other: Expression | float) -> Expression:
        return divide(self, as_expression(other))

    def __rtruediv__(self, other: float) -> Expression:
        return divide(as_expression(other), self)

    def __neg__(self) -> Expression:
        return multiply(constant(-1.0), self) if self.op == "constant" else Expression("negative", (self,))

    def __str__(self) -> str:
        return outline(self, 8)

    __repr__ = __str__


def constant(value: float) -> Expression:
    """A number."""
    return Expression("constant", value=float(value))


def leaf(kind: str, *index: int) -> Expression:
    """A leaf by its kind and number."""
    return Expression(kind, value=index)


def as_expression(x: Expression | float) -> Expression:
    """An expression as it is, a number as a constant."""
    return x if isinstance(x, Expression) else constant(x)


def apply(name: str, *args: Expression | float) -> Expression:
    """The function of that name, of these arguments."""
    return Expression(name, tuple(as_expression(a) for a in args))


def _is(x: Expression, value: float) -> bool:
    return x.op == "constant" and x.value == value


def add(a: Expression, b: Expression) -> Expression:
    """a + b, simplified where one is zero."""
    if _is(a, 0.0):
        return b
    return a if _is(b, 0.0) else _folded("add", a, b)


def subtract(a: Expression, b: Expression) -> Expression:
    """a - b, simplified where b is zero."""
    return a if _is(b, 0.0) else _folded("subtract", a, b)


def multiply(a: Expression, b: Expression) -> Expression:
    """a · b, simplified where one is zero or one.

    Zero times anything is zero here: it stands for a gradient that does not flow.
    """
    if _is(a, 0.0) or _is(b, 0.0):
        return constant(0.0)
    if _is(a, 1.0):
        return b
    return a if _is(b, 1.0) else _folded("multiply", a, b)


def divide(a: Expression, b: Expression) -> Expression:
    """a / b, simplified where b is one."""
    return a if _is(b, 1.0) else _folded("divide", a, b)


_FOLD: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
}


def _folded(name: str, a: Expression, b: Expression) -> Expression:
    """Computed at once where both are constants."""
    if a.op == b.op == "constant" and not (name == "divide" and b.value == 0.0):
        return constant(_FOLD[name](a.value, b.value))  # type: ignore[arg-type]
    return Expression(name, (a, b))


def in_order(roots: Sequence[Expression]) -> list[Expression]:
    """Every expression that the roots are made of, each once, arguments before what uses them."""
    seen: dict[Expression, None] = {}
    stack: list[tuple[Expression, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in seen:
            continue
        if ready:
            seen[node] = None
        else:
            stack.append((node, True))
            stack += [(arg, False) for arg in reversed(node.args)]
    return list(seen)


def leaves_of(roots: Sequence[Expression], *kinds: str) -> list[Expression]:
    """The leaves of these kinds among what the roots are made of."""
    return [node for node in in_order(roots) if node.op in kinds]


def replace(root: Expression, what: dict[Expression, Expression]) -> Expression:
    """The expression with parts of it replaced by others; what is put in is not searched again."""
    return replace_all([root], what)[0]


def replace_all(roots: Sequence[Expression], what: dict[Expression, Expression]) -> list[Expression]:
    """As `replace`, of several that may share parts."""
    done = dict(what)
    for node in in_order(roots):
        if node not in done:
            args = tuple(done[a] for a in node.args)
            done[node] = node if args == node.args else Expression(node.op, args, node.value)
    return [done[root] for root in roots]


def fold(
    roots: Sequence[Expression], leaf_value: Callable[[Expression], T], applied: Callable[[str, list[T]], T]
) -> list[T]:
    """Evaluate: `leaf_value` of every leaf, `applied` for every function of values; shared parts once."""
    values: dict[Expression, T] = {}
    for node in in_order(roots):
        values[node] = leaf_value(node) if node.is_leaf else applied(node.op, [values[a] for a in node.args])
    return [values[root] for root in roots]


def outline(e: Expression, depth: int) -> str:
    """As text; what lies deeper than `depth` functions is "…"."""
    if e.op == "constant":
        return f"{e.value:g}"
    if e.is_leaf:
        return f"{e.op}{list(e.value)}"  # type: ignore[arg-type]
    return f"{e.op}({', '.join(outline(a, depth - 1) for a in e.args)})" if depth else "…"


def to_data(roots: Sequence[Expression]) -> dict[str, list]:
    """As plain data for JSON: every part once, its arguments by their numbers, and the numbers of the roots."""
    nodes = in_order(roots)
    number = {node: k for k, node in enumerate(nodes)}

    def row(node: Expression) -> Any:
        if node.op == "constant":
            return node.value
        return [node.op, *(node.value if node.is_leaf else (number[a] for a in node.args))]  # type: ignore[misc]

    return {"nodes": [row(node) for node in nodes], "roots": [number[root] for root in roots]}


def from_data(data: dict[str, list]) -> tuple[Expression, ...]:
    """Read what `to_data` wrote."""
    nodes: list[Expression] = []
    for row in data["nodes"]:
        if isinstance(row, (int, float)):
            nodes.append(constant(row))
        elif row[0] in LEAVES:
            nodes.append(leaf(*row))
        else:
            nodes.append(Expression(row[0], tuple(nodes[k] for k in row[1:])))
    return tuple(nodes[k] for k in data["roots"])
