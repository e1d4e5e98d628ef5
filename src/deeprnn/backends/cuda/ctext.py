"""Expressions as CUDA C: statements for a graph of functions, and the device functions they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from deeprnn.cells.expressions import Expression, in_order
from deeprnn.cells.functions import FUNCTIONS, float_literal

INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def statements(
    roots: Sequence[Expression], value: Callable[[Expression], str], prefix: str = "v"
) -> tuple[list[str], list[str]]:
    """Lines that compute the roots, each shared part once, and the roots' names; `value` names a leaf."""
    names: dict[Expression, str] = {}
    lines: list[str] = []
    for node in in_order(roots):
        if node.op == "constant":
            names[node] = float_literal(node.value)  # type: ignore[arg-type]
        elif node.is_leaf:
            names[node] = value(node)
        else:
            name = f"{prefix}{len(lines)}"
            lines.append(f"float {name} = {_applied(node, [names[a] for a in node.args])};")
            names[node] = name
    return lines, [names[root] for root in roots]


def _applied(node: Expression, args: list[str]) -> str:
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    if node.op == "negative":
        return f"-{args[0]}"
    return f"fn_{node.op}{_arity(node)}({', '.join(args)})"


def _arity(node: Expression) -> str:
    """Functions of any number of arguments have a device function for each number."""
    return f"_{len(node.args)}" if FUNCTIONS[node.op].arity is None else ""


def device_functions(roots: Iterable[Expression]) -> str:
    """The text of every device function that the expressions call."""
    wanted: dict[str, str] = {}
    for node in in_order(list(roots)):
        if node.is_leaf or node.op in INFIX or node.op == "negative":
            continue
        count = len(node.args)
        name = f"fn_{node.op}{_arity(node)}"
        body = FUNCTIONS[node.op].cuda_body(count)
        parameters = ", ".join(f"float x{i}" for i in range(count))
        wanted[name] = f"INLINE float {name}({parameters}) {{ {body}\n}}"
    return "\n".join(wanted.values())
