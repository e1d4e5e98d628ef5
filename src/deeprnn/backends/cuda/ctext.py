"""Expressions as CUDA C: statements for a graph of functions, and the device functions they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from deeprnn.cells.expressions import Expression, in_order
from deeprnn.cells.functions import FUNCTIONS

INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def number(x: float) -> str:
    """A float literal that keeps every bit of a float32."""
    if x != x or x in (float("inf"), float("-inf")):
        raise ValueError(f"the constant {x} cannot stand in a kernel")
    text = f"{x:.9g}"
    return f"{text}f" if any(c in text for c in ".en") else f"{text}.0f"


def statements(
    roots: Sequence[Expression], value: Callable[[Expression], str], prefix: str = "v"
) -> tuple[list[str], list[str]]:
    """Lines that compute the roots, each shared part once, and the roots' names; `value` names a leaf."""
    names: dict[Expression, str] = {}
    lines: list[str] = []
    for node in in_order(roots):
        if node.op == "constant":
            names[node] = number(node.value)  # type: ignore[arg-type]
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
    return f"_{len(node.args)}" if not FUNCTIONS[node.op].cuda else ""


def device_functions(roots: Iterable[Expression]) -> str:
    """The text of every device function that the expressions call."""
    wanted: dict[str, str] = {}
    for node in in_order(list(roots)):
        if node.is_leaf or node.op in INFIX or node.op == "negative":
            continue
        count = len(node.args)
        name = f"fn_{node.op}{_arity(node)}"
        body = FUNCTIONS[node.op].cuda or MANY[node.op](count)
        parameters = ", ".join(f"float x{i}" for i in range(count))
        wanted[name] = f"INLINE float {name}({parameters}) {{ {body}\n}}"
    return "\n".join(wanted.values())


def _extreme(sign: str) -> Callable[[int], str]:
    """The largest or smallest; NaN is kept."""

    def body(count: int) -> str:
        lines = ["float y = x0;"]
        lines += [f"y = x{i} {sign} y || x{i} != x{i} ? x{i} : y;" for i in range(1, count)]
        return " ".join([*lines, "return y;"])

    return body


def _lp(count: int) -> str:
    """x0 is the exponent; the largest magnitude is taken out and put back, so that no power overflows."""
    terms = range(1, count)
    lines = [f"float a{i} = fabsf(x{i});" for i in terms]
    lines += ["float m = a1;", *(f"m = fmaxf(m, a{i});" for i in list(terms)[1:])]
    total = " + ".join(f"powf(a{i} / m, x0)" for i in terms)
    lines.append("if (m == 0.0f) return 0.0f;")
    return " ".join([*lines, f"return m * powf(({total}) * {number(1.0 / (count - 1))}, 1.0f / x0);"])


MANY = {"maximum": _extreme(">"), "minimum": _extreme("<"), "lp": _lp}
