"""Expressions rewritten: convex combinations become `mix`, sums gather what one pre-activation can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deeprnn.cells.expressions import Expression, apply, constant, in_order, outline

ONE = constant(1.0)
SUMS = ("add", "subtract", "negative")
COMMUTATIVE = ("add", "multiply", "maximum", "minimum", "equal")
RANKS = ("preactivation", "state", "output", "vector", "mask", "constant")


def rewritten(
    roots: Sequence[Expression], rule: Callable[[Expression], Expression]
) -> dict[Expression, Expression]:
    """Every part of the roots with a rule applied to it, arguments first."""
    done: dict[Expression, Expression] = {}
    for node in in_order(roots):
        args = tuple(done[a] for a in node.args)
        done[node] = rule(node if args == node.args else Expression(node.op, args, node.value))
    return done


def plain(e: Expression) -> Expression:
    """Negations inside sums as differences, constants first in products."""
    if e.op == "add":
        a, b = e.args
        if b.op == "negative":
            return a - b.args[0]
        if a.op == "negative":
            return b - a.args[0]
    if e.op == "subtract" and e.args[1].op == "negative":
        return e.args[0] + e.args[1].args[0]
    if e.op == "negative" and e.args[0].op == "negative":
        return e.args[0].args[0]
    return e


def mixed(e: Expression) -> Expression:
    """A convex combination in any of its spellings as one function, `mix`."""
    if e.op not in ("add", "subtract"):
        return e
    found = _from_two_products(e) or _from_difference(e) or _from_three_terms(e)
    return found or e


def _factors(e: Expression) -> list[tuple[Expression, Expression]]:
    return [(e.args[0], e.args[1]), (e.args[1], e.args[0])] if e.op == "multiply" else []


def _complement(e: Expression) -> Expression | None:
    """z where e is 1 − z."""
    return e.args[1] if e.op == "subtract" and e.args[0] == ONE else None


def _from_two_products(e: Expression) -> Expression | None:
    """z b + (1 − z) a."""
    if e.op != "add":
        return None
    for left, right in (e.args, e.args[::-1]):
        for w, a in _factors(right):
            z = _complement(w)
            for v, b in _factors(left) if z is not None else ():
                if z is not None and v == z:
                    return apply("mix", z, a, b)
        for w, a in _factors(right):  # constants: p b + (1 − p) a
            for v, b in _factors(left):
                if v.op == w.op == "constant" and abs(v.value + w.value - 1.0) < 1e-12:  # type: ignore[operator]
                    return apply("mix", v, a, b) if v.value < w.value else apply("mix", w, b, a)  # type: ignore[operator]
    return None


def _from_difference(e: Expression) -> Expression | None:
    """a + z (b − a), and a − z (a − b)."""
    for a, scaled in (e.args, e.args[::-1]) if e.op == "add" else (e.args,):
        for z, difference in _factors(scaled):
            if difference.op != "subtract":
                continue
            b, subtracted = difference.args if e.op == "add" else difference.args[::-1]
            if subtracted == a:
                return apply("mix", z, a, b)
    return None


def _from_three_terms(e: Expression) -> Expression | None:
    """a − z a + z b in any order."""
    terms = flattened(e, lambda _: True, most=3)
    if len(terms) != 3:
        return None
    for i, minus in enumerate(terms):
        rest = terms[:i] + terms[i + 1 :]
        if minus.sign > 0 or any(t.sign < 0 for t in rest):
            continue
        for a, plus in (rest, rest[::-1]):
            for z, factor in _factors(minus.term):
                for v, b in _factors(plus.term):
                    if factor == a.term and v == z:
                        return apply("mix", z, factor, b)
    return None


class SignedTerm(NamedTuple):
    """A term of a sum."""

    sign: int
    term: Expression


def flattened(
    e: Expression, open_up: Callable[[Expression], bool], most: float = math.inf
) -> list[SignedTerm]:
    """The terms of a sum; inner sums are opened where `open_up` allows it, and no further beyond `most` terms."""
    found: list[SignedTerm] = []
    waiting = [SignedTerm(1, e)]
    while waiting:
        sign, inner = waiting.pop()
        opens = inner.op in SUMS and (inner is e or open_up(inner)) and len(found) + len(waiting) <= most
        if not opens:
            found.append(SignedTerm(sign, inner))
            continue
        signs = (-sign,) if inner.op == "negative" else (sign, sign if inner.op == "add" else -sign)
        waiting += [SignedTerm(*pair) for pair in zip(signs, inner.args, strict=True)][::-1]
    return found


def summed(terms: Sequence[SignedTerm]) -> Expression:
    """The sum of terms, those that are added first."""
    ordered = sorted(terms, key=lambda t: -t.sign)
    first = ordered[0]
    total = first.term if first.sign > 0 else -first.term
    for sign, term in ordered[1:]:
        total = total + term if sign > 0 else total - term
    return total


def uses(roots: Sequence[Expression]) -> dict[Expression, int]:
    """How many parts of the roots use each part; a root is used once more."""
    count: dict[Expression, int] = {}
    for node in in_order(roots):
        for arg in node.args:
            count[arg] = count.get(arg, 0) + 1
    for root in set(roots):
        count[root] = count.get(root, 0) + 1
    return count


def _rank(e: Expression) -> tuple[int, str, bytes]:
    """Functions first, by their names; what looks the same from above in some order that is always the same."""
    return RANKS.index(e.op) + 1 if e.op in RANKS else 0, outline(e, 4), e.digest


def ordered(e: Expression) -> Expression:
    """Arguments of commutative functions in one order, so that equal formulas are equal expressions."""
    if e.op not in COMMUTATIVE:
        return e
    args = tuple(sorted(e.args, key=_rank))
    return e if args == e.args else Expression(e.op, args)
