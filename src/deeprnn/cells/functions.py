"""The one table of elementary functions: how each is computed, differentiated and bounded, on every backend.

A row gives a function's name, torch's way to compute it, its partial derivatives as expressions (of the arguments and
of the result y), its text in CUDA C, how LLVM instructions for it are written, and its range; for a unit φ also how
numpy computes it. Every backend, the emulation of the kernels, sampling's quick step and the tests take functions from
here; a new row adds one to all of them.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeprnn.cells.expressions import Expression, apply, constant

Partials = Callable[[Sequence[Expression], Expression], Sequence[Expression]]
Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class Function:
    """An elementary function."""

    name: str
    torch: Callable[..., Any]
    partials: Partials
    """∂y/∂argument for each argument, from the arguments and y"""
    cuda: str | Callable[[int], str]
    """the body of a device function of x0, x1, … as text; of any number of arguments: the text from their number"""
    llvm: Callable[..., Any]
    """writes instructions: from an `Emitter` and the arguments' values to the result's"""
    bounds: Callable[..., Interval]
    """the range of y from the ranges of the arguments"""
    steepest: float = math.inf
    """the largest magnitude of a unit's slope"""
    unit: bool = False
    """whether it serves as a unit φ by its name"""
    numpy: Callable[[np.ndarray], np.ndarray] | None = None
    """a unit's way in numpy, which may overwrite its argument"""
    cheap: bool = False
    """whether it costs less to compute again than to read from memory"""

    @cached_property
    def arity(self) -> int | None:
        """How many arguments it takes; None: one or more."""
        parameters = inspect.signature(self.bounds).parameters.values()
        return None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(parameters)

    def cuda_body(self, count: int) -> str:
        """The body of the device function of so many arguments."""
        return self.cuda(count) if callable(self.cuda) else self.cuda


def _products(a: Interval, b: Interval) -> list[float]:
    return [0.0 if x == 0.0 or y == 0.0 else x * y for x in a for y in b]


def _monotone(f: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return lambda a: (f(a[0]), f(a[1]))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def _softsign(x: float) -> float:
    return math.copysign(1.0, x) if math.isinf(x) else x / (1.0 + abs(x))


def sigmoid_in_place(a: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-a), without overflow: it is half a tanh."""
    a *= 0.5
    np.tanh(a, out=a)
    a += 1.0
    a *= 0.5
    return a


def _divided(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0.0 <= b[1]:
        return ANY
    inverse = (0.0 if math.isinf(b[1]) else 1 / b[1], 0.0 if math.isinf(b[0]) else 1 / b[0])
    return min(_products(a, inverse)), max(_products(a, inverse))


def _absolute(a: Interval) -> Interval:
    low = 0.0 if a[0] <= 0.0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return low, max(abs(a[0]), abs(a[1]))


def _wave_bounds(crest: float) -> Callable[[Interval], Interval]:
    """The range of a sine or cosine that is 1 at `crest` and every full turn from there."""

    def passes(a: Interval, place: float) -> bool:
        return math.floor((a[1] - place) / (2 * math.pi)) >= (a[0] - place) / (2 * math.pi)

    def bounds(a: Interval) -> Interval:
        if not a[1] - a[0] < 2 * math.pi:
            return -1.0, 1.0
        ends = [math.cos(x - crest) for x in a]
        return -1.0 if passes(a, crest + math.pi) else min(ends), 1.0 if passes(a, crest) else max(ends)

    return bounds


def _fmod_bounds(a: Interval, b: Interval) -> Interval:
    most = min(_absolute(a)[1], _absolute(b)[1])
    return 0.0 if a[0] >= 0.0 else -most, 0.0 if a[1] <= 0.0 else most


def _whole(f: Callable[[float], float]) -> Callable[[Interval], Interval]:
    return _monotone(lambda x: x if math.isinf(x) else float(f(x)))


def _cosh_bounds(a: Interval) -> Interval:
    low, high = _absolute(a)
    return _cosh(low), _cosh(high)


def _cosh(x: float) -> float:
    return math.cosh(x) if x < 700.0 else math.inf


def _sinh(x: float) -> float:
    return math.sinh(x) if abs(x) < 700.0 else math.copysign(math.inf, x)


def _step(x: Expression) -> Expression:
    return apply("step", x)


def step(a: Tensor) -> Tensor:
    """1 where a > 0, else 0."""
    return (a > 0).to(a.dtype)


def equal(a: Tensor | float, b: Tensor | float) -> Tensor:
    """1 where a = b, else 0."""
    return (a == b).to(_tensor_of(a, b).dtype)  # type: ignore[union-attr]


def greater(a: Tensor | float, b: Tensor | float) -> Tensor:
    """1 where a > b, else 0."""
    return (a > b).to(_tensor_of(a, b).dtype)  # type: ignore[union-attr]


def _tensor_of(*a: Tensor | float) -> Tensor:
    """The first argument that is no constant."""
    return next(x for x in a if not isinstance(x, (int, float)))


def _stacked(a: Sequence[Tensor | float]) -> Tensor:
    like = _tensor_of(*a)
    tensors = [torch.full_like(like, x) if isinstance(x, (int, float)) else x for x in a]
    return torch.stack(torch.broadcast_tensors(*tensors))


def select(condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """a where the condition is not 0, else b."""
    if isinstance(a, float) and isinstance(b, float):  # two numbers would give torch's default type
        a = torch.full_like(condition, a)
    return torch.where(condition != 0, a, b)


def maximum(*a: Tensor | float) -> Tensor:
    """The largest; a gradient is shared among equals."""
    return _stacked(a).amax(0)


def minimum(*a: Tensor | float) -> Tensor:
    """The smallest."""
    return _stacked(a).amin(0)


def _of_tensors(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A function of two tensors that takes a number in the place of one."""

    def applied(a: Tensor | float, b: Tensor | float) -> Tensor:
        like = _tensor_of(a, b)
        return function(*(torch.full_like(like, x) if isinstance(x, (int, float)) else x for x in (a, b)))

    return applied


def mix(weight: Tensor | float, a: Tensor, b: Tensor) -> Tensor:
    """a + weight (b − a): between a and b where the weight is between 0 and 1."""
    return a + weight * (b - a)


def detach(a: Tensor) -> Tensor:
    """a, through which no gradient flows."""
    return a.detach()


def ratio(a: Tensor | float, b: Tensor) -> Tensor:
    """a / b, 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def power_log(a: Tensor, b: Tensor) -> Tensor:
    """a^b ln a, 0 where a is 0."""
    return torch.where(a == 0, 0.0, a**b * torch.where(a == 0, 1.0, a).log())


def lp(p: Tensor, *a: Tensor) -> Tensor:
    """((1/N) Σ |a_i|^p)^(1/p), without overflow.

    It is homogeneous: dividing by a constant and multiplying it back changes neither value nor gradient. With the
    largest |a_i| as that constant no power overflows or vanishes.
    """
    d = torch.stack(torch.broadcast_tensors(*a)).abs()
    empty = d.amax(0) == 0  # the root has no slope there
    d = torch.where(empty, 1.0, d)
    m = d.amax(0).detach()
    return torch.where(empty, 0.0, m * ((d / m) ** p).mean(0) ** (1 / p))


def _lp_partials(args: Sequence[Expression], y: Expression) -> Sequence[Expression]:
    """With q_i = |a_i|/φ: ∂φ/∂a_i = sign(a_i) q_i^(p-1) / N and ∂φ/∂p = (φ/p) · mean of q_i^p ln q_i."""
    p, *a = args
    ratios = [apply("ratio", apply("absolute", x), y) for x in a]
    slopes = [
        apply("sign", x) * apply("power", q, p - 1.0) * (1.0 / len(a)) for x, q in zip(a, ratios, strict=True)
    ]
    mean = constant(0.0)
    for q in ratios:
        mean = mean + apply("power_log", q, p) * (1.0 / len(a))
    return [y / p * mean, *slopes]


def _shared_maximum(args: Sequence[Expression], y: Expression) -> Sequence[Expression]:
    """A gradient is shared among equals, as torch does it."""
    top = [apply("equal", a, y) for a in args]
    count = top[0]
    for one in top[1:]:
        count = count + one
    return [one / count for one in top]


def truncated(x: Expression) -> Expression:
    """The whole number next to x towards zero."""
    return apply("select", apply("greater", 0.0, x), -apply("floor", -x), apply("floor", x))


def _bell(x: Expression, factor: float) -> Expression:
    """factor · 2/√π e^(−x²), the slope of the error function."""
    return apply("exp", -apply("square", x)) * (factor * 2.0 / math.sqrt(math.pi))


def _arctan2_partials(a: Sequence[Expression], y: Expression) -> Sequence[Expression]:
    """0 at the origin, as torch has it."""
    square = apply("square", a[0]) + apply("square", a[1])
    return [apply("ratio", a[1], square), -apply("ratio", a[0], square)]


def _mix_bounds(weight: Interval, a: Interval, b: Interval) -> Interval:
    if weight[0] >= 0.0 and weight[1] <= 1.0:
        return min(a[0], b[0]), max(a[1], b[1])
    step = _products(weight, (b[0] - a[1], b[1] - a[0]))
    return a[0] + min(step), a[1] + max(step)


def float_literal(x: float) -> str:
    """A number in C that keeps every bit of a float32."""
    if x != x or x in (float("inf"), float("-inf")):
        raise ValueError(f"the constant {x} cannot stand in a kernel")
    text = f"{x:.9g}"
    return f"{text}f" if any(c in text for c in ".en") else f"{text}.0f"


def _extreme_in_cuda(sign: str) -> Callable[[int], str]:
    """The largest or smallest; NaN is kept."""

    def body(count: int) -> str:
        lines = ["float y = x0;"]
        lines += [f"y = x{i} {sign} y || x{i} != x{i} ? x{i} : y;" for i in range(1, count)]
        return " ".join([*lines, "return y;"])

    return body


def _lp_in_cuda(count: int) -> str:
    """x0 is the exponent; the largest magnitude is taken out and put back, so that no power overflows."""
    terms = range(1, count)
    lines = [f"float a{i} = fabsf(x{i});" for i in terms]
    lines += ["float m = a1;", *(f"m = fmaxf(m, a{i});" for i in list(terms)[1:])]
    total = " + ".join(f"powf(a{i} / m, x0)" for i in terms)
    lines.append("if (m == 0.0f) return 0.0f;")
    return " ".join([*lines, f"return m * powf(({total}) * {float_literal(1.0 / (count - 1))}, 1.0f / x0);"])


def _lp_bounds(p: Interval, *a: Interval) -> Interval:
    return 0.0, max(_absolute(x)[1] for x in a)


_ROWS = [
    Function(
        "add", operator.add, lambda a, y: [constant(1.0)] * 2, "return x0 + x1;",
        lambda e, a, b: e.b.fadd(a, b), lambda a, b: (a[0] + b[0], a[1] + b[1]), cheap=True,
    ),
    Function(
        "subtract", operator.sub, lambda a, y: [constant(1.0), constant(-1.0)], "return x0 - x1;",
        lambda e, a, b: e.b.fsub(a, b), lambda a, b: (a[0] - b[1], a[1] - b[0]), cheap=True,
    ),
    Function(
        "multiply", operator.mul, lambda a, y: [a[1], a[0]], "return x0 * x1;",
        lambda e, a, b: e.b.fmul(a, b), lambda a, b: (min(_products(a, b)), max(_products(a, b))), cheap=True,
    ),
    Function(
        "divide", operator.truediv, lambda a, y: [1.0 / a[1], -(y / a[1])], "return x0 / x1;",
        lambda e, a, b: e.b.fdiv(a, b), _divided, cheap=True,
    ),
    Function(
        "negative", operator.neg, lambda a, y: [constant(-1.0)], "return -x0;",
        lambda e, a: e.b.fneg(a), lambda a: (-a[1], -a[0]), cheap=True,
    ),
    Function(
        "sigmoid", torch.sigmoid, lambda a, y: [y * (1.0 - y)],
        """
#ifdef __CUDA_ARCH__   // 1 / (1 + 2^(-x log2 e)), without the steps that keep denormal numbers
  float y;
  asm("{.reg .f32 e;\\nmul.ftz.f32 e, %1, 0fBFB8AA3B;\\nex2.approx.ftz.f32 e, e;\\nadd.ftz.f32 e, e, 0f3F800000;\\n"
      "rcp.approx.ftz.f32 %0, e;}" : "=f"(y) : "f"(x0));
  return y;
#else
  return 1.0f / (1.0f + expf(-x0));
#endif""",
        lambda e, a: e.sigmoid(a), _monotone(_sigmoid), 0.25, unit=True, numpy=sigmoid_in_place,
    ),
    Function(
        # tanhf is the exact one: exp-based forms lose small arguments.
        "tanh", torch.tanh, lambda a, y: [1.0 - y * y], "return tanhf(x0);",
        lambda e, a: e.tanh(a), _monotone(math.tanh), 1.0, unit=True, numpy=lambda a: np.tanh(a, out=a),
    ),
    Function(
        "relu", torch.relu, lambda a, y: [_step(y)], "return x0 > 0.0f ? x0 : (x0 != x0 ? x0 : 0.0f);",
        lambda e, a: e.relu(a), _monotone(lambda x: max(x, 0.0)), 1.0, unit=True,
        numpy=lambda a: np.maximum(a, 0, out=a), cheap=True,
    ),
    Function(
        "identity", operator.pos, lambda a, y: [constant(1.0)], "return x0;",
        lambda e, a: a, lambda a: a, 1.0, unit=True, numpy=lambda a: a, cheap=True,
    ),
    Function(
        "softsign", torch.nn.functional.softsign,
        lambda a, y: [apply("square", 1.0 - apply("absolute", y))], "return x0 / (1.0f + fabsf(x0));",
        lambda e, a: e.b.fdiv(a, e.b.fadd(e.splat(1.0), e.absolute(a))), _monotone(_softsign), 1.0, unit=True,
        numpy=lambda a: a / (1 + np.abs(a)),
    ),
    Function(
        "softplus", torch.nn.functional.softplus, lambda a, y: [apply("sigmoid", a[0])],
        "return x0 > 20.0f ? x0 : log1pf(expf(x0));", lambda e, a: e.softplus(a),
        _monotone(lambda x: x if x > 30.0 else math.log1p(math.exp(x))),
    ),
    Function(
        "exp", torch.exp, lambda a, y: [y], "return expf(x0);", lambda e, a: e.exp(a),
        _monotone(lambda x: math.exp(x) if x < 700.0 else math.inf),
    ),
    Function(
        "log", torch.log, lambda a, y: [1.0 / a[0]], "return logf(x0);", lambda e, a: e.log(a),
        lambda a: (math.log(a[0]) if a[0] > 0.0 else -math.inf, math.log(a[1]) if 0.0 < a[1] < math.inf else math.inf),
    ),
    Function(  # exp(x) - 1 and log(1 + x) would lose small arguments
        "expm1", torch.expm1, lambda a, y: [y + 1.0], "return expm1f(x0);", lambda e, a: e.expm1(a),
        _monotone(lambda x: math.expm1(x) if x < 700.0 else math.inf),
    ),
    Function(
        "log1p", torch.log1p, lambda a, y: [1.0 / (1.0 + a[0])], "return log1pf(x0);", lambda e, a: e.log1p(a),
        lambda a: (
            math.log1p(a[0]) if a[0] > -1.0 else -math.inf, math.log1p(a[1]) if -1.0 < a[1] < math.inf else math.inf,
        ),
    ),
    Function(
        "sine", torch.sin, lambda a, y: [apply("cosine", a[0])], "return sinf(x0);", lambda e, a: e.sine(a),
        _wave_bounds(math.pi / 2),
    ),
    Function(
        "cosine", torch.cos, lambda a, y: [-apply("sine", a[0])], "return cosf(x0);", lambda e, a: e.cosine(a),
        _wave_bounds(0.0),
    ),
    Function(  # the angle of the point (x1, x0)
        "arctan2", _of_tensors(torch.atan2), _arctan2_partials, "return atan2f(x0, x1);",
        lambda e, a, b: e.arctan2(a, b), lambda a, b: (-math.pi, math.pi),
    ),
    Function(
        "hypot", _of_tensors(torch.hypot), lambda a, y: [a[0] / y, a[1] / y], "return hypotf(x0, x1);",
        lambda e, a, b: e.hypot(a, b),
        lambda a, b: (math.hypot(_absolute(a)[0], _absolute(b)[0]), math.hypot(_absolute(a)[1], _absolute(b)[1])),
    ),
    Function(
        "sinh", torch.sinh, lambda a, y: [apply("cosh", a[0])], "return sinhf(x0);", lambda e, a: e.sinh(a),
        _monotone(_sinh),
    ),
    Function(
        "cosh", torch.cosh, lambda a, y: [apply("sinh", a[0])], "return coshf(x0);", lambda e, a: e.cosh(a),
        _cosh_bounds,
    ),
    Function(
        "arcsinh", torch.asinh, lambda a, y: [1.0 / apply("sqrt", apply("square", a[0]) + 1.0)],
        "return asinhf(x0);", lambda e, a: e.arcsinh(a), _monotone(math.asinh),
    ),
    Function(
        "erf", torch.erf, lambda a, y: [_bell(a[0], 1.0)], "return erff(x0);", lambda e, a: e.erf(a),
        _monotone(math.erf),
    ),
    Function(  # 1 - erf(x) would lose what is small
        "erfc", torch.erfc, lambda a, y: [_bell(a[0], -1.0)], "return erfcf(x0);", lambda e, a: e.erfc(a),
        lambda a: (math.erfc(a[1]), math.erfc(a[0])),
    ),
    Function(
        "floor", torch.floor, lambda a, y: [constant(0.0)], "return floorf(x0);", lambda e, a: e.floor(a),
        _whole(math.floor), cheap=True,
    ),
    Function(  # to the even one of two that are as near
        "round", torch.round, lambda a, y: [constant(0.0)], "return rintf(x0);", lambda e, a: e.round(a),
        _whole(round), cheap=True,
    ),
    Function(  # what is left of x0 after whole numbers of x1, with the sign of x0
        "fmod", _of_tensors(torch.fmod), lambda a, y: [constant(1.0), -truncated(a[0] / a[1])],
        "return fmodf(x0, x1);", lambda e, a, b: e.fmod(a, b), _fmod_bounds,
    ),
    Function(  # the same with the sign of x1, as Python has it
        "remainder", _of_tensors(torch.remainder),
        lambda a, y: [constant(1.0), -apply("round", (a[0] - y) / a[1])],
        "float y = fmodf(x0, x1); return y != 0.0f && (y < 0.0f) != (x1 < 0.0f) ? y + x1 : y;",
        lambda e, a, b: e.remainder(a, b), lambda a, b: (min(b[0], 0.0), max(b[1], 0.0)),
    ),
    Function(
        "sqrt", torch.sqrt, lambda a, y: [0.5 / y], "return sqrtf(x0);", lambda e, a: e.sqrt(a),
        lambda a: (math.sqrt(max(a[0], 0.0)), math.sqrt(max(a[1], 0.0))),
    ),
    Function(
        "square", torch.square, lambda a, y: [2.0 * a[0]], "return x0 * x0;",
        lambda e, a: e.b.fmul(a, a), lambda a: (_absolute(a)[0] ** 2, _absolute(a)[1] ** 2), cheap=True,
    ),
    Function(
        "absolute", torch.abs, lambda a, y: [apply("sign", a[0])], "return fabsf(x0);",
        lambda e, a: e.absolute(a), _absolute, cheap=True,
    ),
    Function(
        "sign", torch.sign, lambda a, y: [constant(0.0)], "return x0 > 0.0f ? 1.0f : x0 < 0.0f ? -1.0f : 0.0f;",
        lambda e, a: e.sign(a), lambda a: (-1.0, 1.0), cheap=True,
    ),
    Function(
        "step", step, lambda a, y: [constant(0.0)], "return x0 > 0.0f ? 1.0f : 0.0f;",
        lambda e, a: e.select(e.b.fcmp_ordered(">", a, e.zero()), e.splat(1.0), e.zero()),
        lambda a: (0.0, 1.0), cheap=True,
    ),
    Function(
        "equal", equal, lambda a, y: [constant(0.0)] * 2,
        "return x0 == x1 ? 1.0f : 0.0f;",
        lambda e, a, b: e.select(e.b.fcmp_ordered("==", a, b), e.splat(1.0), e.zero()),
        lambda a, b: (0.0, 1.0), cheap=True,
    ),
    Function(
        "greater", greater, lambda a, y: [constant(0.0)] * 2,
        "return x0 > x1 ? 1.0f : 0.0f;",
        lambda e, a, b: e.select(e.b.fcmp_ordered(">", a, b), e.splat(1.0), e.zero()),
        lambda a, b: (0.0, 1.0), cheap=True,
    ),
    Function(
        "select", select,
        lambda a, y: [constant(0.0), apply("select", a[0], 1.0, 0.0), apply("select", a[0], 0.0, 1.0)],
        "return x0 != 0.0f ? x1 : x2;",
        lambda e, c, a, b: e.select(e.b.fcmp_unordered("!=", c, e.zero()), a, b),
        lambda c, a, b: (min(a[0], b[0]), max(a[1], b[1])), cheap=True,
    ),
    Function(
        "maximum", maximum, _shared_maximum, _extreme_in_cuda(">"),
        lambda e, *a: e.maximum(*a), lambda *a: (max(x[0] for x in a), max(x[1] for x in a)), cheap=True,
    ),
    Function(
        "minimum", minimum, _shared_maximum, _extreme_in_cuda("<"),
        lambda e, *a: e.minimum(*a), lambda *a: (min(x[0] for x in a), min(x[1] for x in a)), cheap=True,
    ),
    Function(
        "mix", mix, lambda a, y: [a[2] - a[1], 1.0 - a[0], a[0]], "return x1 + x0 * (x2 - x1);",
        lambda e, w, a, b: e.b.fadd(a, e.b.fmul(w, e.b.fsub(b, a))), _mix_bounds, cheap=True,
    ),
    Function(
        "detach", detach, lambda a, y: [constant(0.0)], "return x0;", lambda e, a: a, lambda a: a, cheap=True,
    ),
    Function(
        # a / b where a is at most some multiple of b; 0 where both are.
        "ratio", ratio,
        lambda a, y: [apply("ratio", 1.0, a[1]), -apply("ratio", y, a[1])],
        "return x1 == 0.0f ? 0.0f : x0 / x1;",
        lambda e, a, b: e.select(e.b.fcmp_ordered("==", b, e.zero()), e.zero(), e.b.fdiv(a, b)), lambda a, b: ANY,
        cheap=True,
    ),
    Function(
        "power", torch.pow,
        lambda a, y: [a[1] * apply("power", a[0], a[1] - 1.0), apply("power_log", a[0], a[1])],
        "return powf(x0, x1);", lambda e, a, b: e.power(a, b), lambda a, b: ANY if a[0] < 0.0 else (0.0, math.inf),
    ),
    Function(
        # a^b ln a, 0 at a = 0: the slope of a power in its exponent.
        "power_log", power_log,
        lambda a, y: [
            apply("ratio", apply("power", a[0], a[1]) + a[1] * y, a[0]),
            y * apply("log", apply("select", a[0], a[0], 1.0)),
        ],
        "return x0 == 0.0f ? 0.0f : powf(x0, x1) * logf(x0);", lambda e, a, b: e.power_log(a, b), lambda a, b: ANY,
    ),
    Function("lp", lp, _lp_partials, _lp_in_cuda, lambda e, p, *a: e.lp(p, *a), _lp_bounds),
]  # fmt: skip

FUNCTIONS: dict[str, Function] = {row.name: row for row in _ROWS}
UNITS: dict[str, Callable[[Tensor], Tensor]] = {row.name: row.torch for row in _ROWS if row.unit}
"""the functions that serve as a unit φ by their names"""
