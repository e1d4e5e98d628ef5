"""Torch's element-wise operations as expressions of the table of elementary functions.

`EXPRESSIONS` gives, by the name of an operation, a function of the same arguments that returns an expression.
Truth values are 0 and 1. What is not here has no entry in the table of functions and cannot be described.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from deeprnn.cells.expressions import Expression, apply, as_expression, constant
from deeprnn.cells.functions import truncated

E = Expression | float


def _f(name: str) -> Callable[..., Expression]:
    return lambda *a: apply(name, *a)


def _plus(a: E, b: E, alpha: float = 1) -> Expression:
    return as_expression(a) + as_expression(b) * alpha


def _minus(a: E, b: E, alpha: float = 1) -> Expression:
    return as_expression(a) - as_expression(b) * alpha


def _times(a: E, b: E) -> Expression:
    return as_expression(a) * b


def _over(a: E, b: E, rounding_mode: str | None = None) -> Expression:
    if rounding_mode == "trunc":
        return truncated(as_expression(a) / b)
    if rounding_mode == "floor":
        return _floored_quotient(as_expression(a), as_expression(b))
    return as_expression(a) / b if isinstance(b, Expression) else as_expression(a) * (1.0 / b)


def _greater(a: E, b: E) -> Expression:
    return apply("greater", a, b)


def _not(a: Expression) -> Expression:
    return 1.0 - a


def _at_least(a: E, b: E) -> Expression:
    return _not(_greater(b, a))


def _equal(a: E, b: E) -> Expression:
    return apply("equal", a, b)


def _select(condition: Expression, a: E, b: E) -> Expression:
    return apply("select", condition, a, b)


def _or(a: Expression, b: Expression) -> Expression:
    return a + b - a * b


def _truth(a: E) -> Expression:
    """1 where a number is not 0."""
    a = as_expression(a)
    return a if _is_truth(a) else _not(_equal(a, 0.0))


def _is_truth(e: Expression) -> bool:
    """Whether an expression is 0 or 1 by the way it is made."""
    waiting, seen = [e], set()
    while waiting:
        if (part := waiting.pop()) in seen or part.op in ("greater", "equal", "step"):
            continue
        seen.add(part)
        complement = part.op == "subtract" and part.args[0] == constant(1.0)
        if complement or part.op == "multiply":
            waiting += part.args
        elif part.op != "constant" or part.value not in (0.0, 1.0):
            return False
    return True


def _on_the_other_side(a: Expression, b: Expression) -> Expression:
    """Whether one of two numbers is above zero and the other below."""
    return _greater(a, 0.0) * _greater(0.0, b) + _greater(0.0, a) * _greater(b, 0.0)


def _remainder(a: E, b: E) -> Expression:
    if not isinstance(a, Expression):
        raise NotImplementedError("the remainder of a number, which torch does not differentiate")
    return apply("remainder", a, b)


def _floored_quotient(a: Expression, b: Expression) -> Expression:
    """The whole number of b in a that the remainder leaves: a / b is rounded, and its floor may be one too many."""
    left = apply("fmod", a, b)
    quotient = (a - left) / b
    quotient = _select(_on_the_other_side(left, b), quotient - 1.0, quotient)
    whole = apply("floor", quotient)
    whole = _select(_greater(quotient - whole, 0.5), whole + 1.0, whole)
    return _select(_equal(b, 0.0), apply("detach", a / b), whole)


def _round(x: Expression, decimals: int = 0) -> Expression:
    power = 10.0 ** abs(decimals)
    if decimals < 0:
        return apply("round", x / constant(power)) * power
    return apply("round", x * power) / constant(power)


def _extreme(first: E, second: E, a: E, b: E) -> Expression:
    """a where `first` is at least `second` or b is NaN, else b: at a tie the gradient is a's alone."""
    kept = _or(_greater(first, second), _equal(first, second))
    return _select(_or(kept, _is_nan(as_expression(b))), a, b)


def _is_nan(x: Expression) -> Expression:
    return _not(_equal(x, x))


def _clamp(x: Expression, low: E | None = None, high: E | None = None) -> Expression:
    """At a bound the gradient is 1, as torch has it: not the shared one of a maximum."""
    if low is not None:
        x = _select(_greater(low, x), low, x)
    return x if high is None else _select(_greater(x, high), high, x)


def _power(a: Expression, b: E) -> Expression:
    if isinstance(b, Expression):
        return apply("power", a, b)
    if b == 0.5:
        return apply("sqrt", a)
    if b == int(b) and 1 <= abs(b) <= 8:
        y = a if b % 2 else constant(1.0)
        for _ in range(int(abs(b)) // 2):
            y = y * apply("square", a)
        return y if b > 0 else 1.0 / y
    return apply("power", a, b)


def _exp_below_zero(x: Expression) -> Expression:
    """eˣ − 1 for x ≤ 0, and 0 elsewhere: nothing overflows in a branch that is not taken."""
    return apply("expm1", _select(_greater(x, 0.0), 0.0, x))


def _elu(x: Expression, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Expression:
    return _select(_greater(x, 0.0), x * scale, _exp_below_zero(x * input_scale) * (alpha * scale))


def _softplus(x: Expression, beta: float = 1, threshold: float = 20) -> Expression:
    y = apply("softplus", x * beta) * (1 / beta)
    return y if threshold >= 20 else _select(_greater(x * beta, threshold), x, y)


def _gelu(x: Expression, approximate: str = "none") -> Expression:
    if approximate != "tanh":
        return x * 0.5 * (apply("erf", x * math.sqrt(0.5)) + 1.0)
    inner = (x + x * apply("square", x) * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (apply("tanh", inner) + 1.0)


def _tan(x: Expression) -> Expression:
    return apply("sine", x) / apply("cosine", x)


def _leg(x: Expression) -> Expression:
    """√(1 − x²), the other leg of a right triangle of hypotenuse 1; in factors, which lose nothing near ±1."""
    return apply("sqrt", 1.0 - x) * apply("sqrt", 1.0 + x)


def _sinc(x: Expression) -> Expression:
    """sin(πx) / (πx), 1 at 0, where its slope is 0."""
    at_zero = _equal(x, 0.0)
    turned = _select(at_zero, 1.0, x * math.pi)
    return _select(at_zero, 1.0, apply("sine", turned) / turned)


def _logaddexp(a: Expression, b: Expression) -> Expression:
    """max + log1p(e^−|a − b|), where two infinities are at no distance."""
    distance = apply("absolute", _select(_equal(a, b), 0.0, a - b))
    return apply("maximum", a, b) + apply("log1p", apply("exp", -distance))


def _logit(x: Expression, eps: float | None = None) -> Expression:
    x = x if eps is None or eps < 0.0 else _clamp(x, eps, 1.0 - eps)
    return apply("log", x) - apply("log1p", -x)


def _xlogy(a: E, b: E) -> Expression:
    """a log b, 0 where a is and b is not above 0."""
    no_log = _equal(a, 0.0) * _or(_greater(0.0, b), _equal(b, 0.0))
    return as_expression(a) * apply("log", _select(no_log, 1.0, b))


def _silu(x: Expression) -> Expression:
    return x * apply("sigmoid", x)


def _hardsigmoid(x: Expression) -> Expression:
    return _clamp(x + 3.0, 0.0, 6.0) * (1 / 6)


def _shrink(x: Expression, width: float, towards_zero: float) -> Expression:
    inside = _select(_greater(-width, x), x + towards_zero, 0.0)
    return _select(_greater(x, width), x - towards_zero, inside)


def _leaky(x: Expression, slope: E = 0.01) -> Expression:
    return _select(_greater(x, 0.0), x, x * slope)


def _cast(x: Expression, **kw: Any) -> Expression:
    return _truth(x) if kw.get("dtype") is torch.bool else x


def _same(x: Expression, *_: Any, **__: Any) -> Expression:
    return x


def _mix(a: E, b: E, weight: E) -> Expression:
    return apply("mix", weight, a, b)


EXPRESSIONS: dict[str, Callable[..., Expression]] = {
    "add": _plus,
    "sub": _minus,
    "rsub": lambda a, b, alpha=1: _minus(b, a, alpha),
    "mul": _times,
    "div": _over,
    "neg": lambda a: -a,
    "reciprocal": lambda a: 1.0 / a,
    "square": _f("square"),
    "sqrt": _f("sqrt"),
    "rsqrt": lambda a: 1.0 / apply("sqrt", a),
    "pow": lambda a, b: _power(a, b) if isinstance(a, Expression) else apply("exp", b * math.log(a)),
    "exp": _f("exp"),
    "exp2": lambda a: apply("exp", a * math.log(2)),
    "expm1": _f("expm1"),
    "log": _f("log"),
    "log1p": _f("log1p"),
    "log2": lambda a: apply("log", a) * (1 / math.log(2)),
    "log10": lambda a: apply("log", a) * (1 / math.log(10)),
    "logaddexp": _logaddexp,
    "logit": _logit,
    "xlogy": _xlogy,
    "sin": _f("sine"),
    "cos": _f("cosine"),
    "tan": _tan,
    "sinc": _sinc,
    "asin": lambda a: apply("arctan2", a, _leg(a)),
    "acos": lambda a: apply("arctan2", _leg(a), a),
    "atan": lambda a: apply("arctan2", a, 1.0),
    "atan2": _f("arctan2"),
    "hypot": _f("hypot"),
    "deg2rad": lambda a: a * (math.pi / 180),
    "rad2deg": lambda a: a * (180 / math.pi),
    "sinh": _f("sinh"),
    "cosh": _f("cosh"),
    "asinh": _f("arcsinh"),
    "acosh": lambda a: apply("arcsinh", apply("sqrt", (a - 1.0) * 0.5)) * 2.0,
    "atanh": lambda a: (apply("log1p", a) - apply("log1p", -a)) * 0.5,
    "erf": _f("erf"),
    "erfc": _f("erfc"),
    "floor": _f("floor"),
    "ceil": lambda a: -apply("floor", -a),
    "trunc": truncated,
    "frac": lambda a: a - truncated(a),
    "round": _round,
    "fmod": _f("fmod"),
    "remainder": _remainder,
    "sigmoid": _f("sigmoid"),
    "tanh": _f("tanh"),
    "relu": _f("relu"),
    "abs": _f("absolute"),
    "sign": _f("sign"),
    "sgn": _f("sign"),
    "softplus": _softplus,
    "silu": _silu,
    "mish": lambda a: a * apply("tanh", apply("softplus", a)),
    "gelu": _gelu,
    "elu": _elu,
    "celu": lambda a, alpha=1: _elu(a, alpha, 1, 1 / alpha),
    "leaky_relu": _leaky,
    "_prelu_kernel": _leaky,
    "hardtanh": lambda a, low=-1.0, high=1.0: _clamp(a, low, high),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda a: a * _hardsigmoid(a),
    "softshrink": lambda a, width=0.5: _shrink(a, width, width),
    "hardshrink": lambda a, width=0.5: _shrink(a, width, 0.0),
    "threshold": lambda a, at, value: _select(_greater(a, at), a, value),
    "log_sigmoid_forward": lambda a: -apply("softplus", -a),
    "lerp": _mix,
    "addcmul": lambda a, b, c, value=1: a + as_expression(b) * c * value,
    "addcdiv": lambda a, b, c, value=1: a + as_expression(b) / c * value,
    "where": _select,
    "masked_fill": lambda a, mask, value: _select(mask, value, a),
    "clamp": _clamp,
    "clamp_min": lambda a, low: _clamp(a, low),
    "clamp_max": lambda a, high: _clamp(a, None, high),
    "maximum": _f("maximum"),
    "minimum": _f("minimum"),
    "fmax": lambda a, b: _extreme(a, b, a, b),
    "fmin": lambda a, b: _extreme(b, a, a, b),
    "isnan": _is_nan,
    "gt": _greater,
    "lt": lambda a, b: _greater(b, a),
    "ge": _at_least,
    "le": lambda a, b: _at_least(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "heaviside": lambda a, value: _select(_equal(a, 0.0), value, apply("step", a)),
    "logical_and": lambda a, b: _truth(a) * _truth(b),
    "bitwise_and": _times,
    "logical_or": lambda a, b: _or(_truth(a), _truth(b)),
    "bitwise_or": _or,
    "logical_not": lambda a: _not(_truth(a)),
    "bitwise_not": _not,
    "logical_xor": lambda a, b: _not(_equal(_truth(a), _truth(b))),
    "bitwise_xor": lambda a, b: _not(_equal(a, b)),
    "detach": _f("detach"),
    "_to_copy": _cast,
    "clone": _same,
}
OF_TRUTH_VALUES: dict[str, Callable[..., Expression]] = {"add": lambda a, b, alpha=1: _or(a, b)}
"""operations that mean something else where their results are truth values"""
