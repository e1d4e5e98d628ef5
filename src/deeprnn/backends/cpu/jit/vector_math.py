"""Elementary functions as vector instructions, without calls of a library: NaN stays NaN, infinities are respected.

exp is a Taylor polynomial on |r| ≤ ln(2)/2 with the exponent added as bits. log is the series of artanh in
s = (m-1)/(m+1), carried in two parts, because a power multiplies its error by the exponent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from deeprnn.backends.cpu.jit.builder import I1
from deeprnn.backends.cpu.jit.number import Number


class VectorMath:
    """What `Emitter` adds to plain instructions; x, y, … are values of one vector each."""

    b: ir.IRBuilder
    number: Number
    lanes: int
    vector: ir.VectorType
    words: ir.VectorType
    suffix: str
    splat: Any
    splat_of: Any
    shared: Any
    zero: Any
    fma: Any
    intrinsic: Any

    # ---- choices

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition holds, else y."""
        return self.b.select(condition, x, y)

    def any_lane(self, condition: Any) -> Any:
        """Whether the condition holds in some lane."""
        return self.intrinsic(f"llvm.vector.reduce.or.v{self.lanes}i1", I1, condition)

    def maximum(self, *values: Any) -> Any:
        """The largest; NaN where any is NaN."""
        return self._extreme(">", values)

    def minimum(self, *values: Any) -> Any:
        """The smallest; NaN where any is NaN."""
        return self._extreme("<", values)

    def _extreme(self, order: str, values: tuple[Any, ...]) -> Any:
        best, *rest = values
        for x in rest:
            better = self.b.select(self.b.fcmp_ordered(order, best, x), best, x)
            best = self.b.select(self._is_nan(best), best, better)
        return best

    def relu(self, x: Any) -> Any:
        """max(x, 0)."""
        return self.b.select(self.b.fcmp_ordered("<", x, self.zero()), self.zero(), x)

    def sign(self, x: Any) -> Any:
        """1, -1 or 0."""
        above = self.b.fcmp_ordered(">", x, self.zero())
        below = self.b.fcmp_ordered("<", x, self.zero())
        return self.b.select(above, self.splat(1.0), self.b.select(below, self.splat(-1.0), self.zero()))

    def absolute(self, x: Any) -> Any:
        """|x|."""
        return self.intrinsic(f"llvm.fabs.{self.suffix}", self.vector, x)

    def with_sign(self, size: Any, of: Any) -> Any:
        """A number with the sign of another, also of zero."""
        return self.intrinsic(f"llvm.copysign.{self.suffix}", self.vector, size, of)

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """Σ c_k x^k, the coefficients from the constant on."""
        y = self.splat(coefficients[-1])
        for c in coefficients[-2::-1]:
            y = self.fma(y, x, self.splat(c))
        return y

    def sqrt(self, x: Any) -> Any:
        """√x."""
        return self.intrinsic(f"llvm.sqrt.{self.suffix}", self.vector, x)

    def _floor(self, x: Any) -> Any:
        return self.intrinsic(f"llvm.floor.{self.suffix}", self.vector, x)

    def _is_nan(self, x: Any) -> Any:
        return self.b.fcmp_unordered("uno", x, x)

    def _bits(self, value: int) -> Any:
        return self.splat_of(self.words, ir.Constant(self.number.bits, value))

    # ---- exp and its kin

    def exp(self, x: Any) -> Any:
        """e^x over the whole range, denormal results included."""
        return self.shared("exp", self._exp, x)

    def _exp(self, x: Any) -> Any:
        return self._exp_of_sum(x, self.zero())

    def expm1(self, x: Any) -> Any:
        """e^x - 1, relatively precise near 0; from 1 on nothing cancels."""
        one = self.splat(1.0)
        scale, rest = self._exp_parts(self._clipped(x, 1.0))
        near = self.fma(scale, rest, self.b.fsub(scale, one))
        is_near = self.b.fcmp_ordered("<", self.absolute(x), one)
        return self.b.select(is_near, near, self.b.fsub(self.exp(x), one))

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e^-x); arguments are clipped where the result is no longer a normal number."""
        scale, rest = self._exp_parts(self._clipped(self.b.fneg(x), self.number.exp_normal))
        one = self.splat(1.0)
        return self.b.fdiv(one, self.b.fadd(one, self.fma(scale, rest, scale)))

    def tanh(self, x: Any) -> Any:
        """e / (e + 2) with e = exp(2x) - 1, which keeps the precision of small arguments."""
        scale, rest = self._exp_parts(self._clipped(self.b.fadd(x, x), 40.0))
        e = self.fma(scale, rest, self.b.fsub(scale, self.splat(1.0)))
        return self.b.fdiv(e, self.b.fadd(e, self.splat(2.0)))

    def softplus(self, x: Any) -> Any:
        """log(1 + e^x), x itself above 20 as in torch."""
        return self.shared("softplus", self._softplus, x)

    def _softplus(self, x: Any) -> Any:
        u = self.exp(x)
        w = self.b.fadd(self.splat(1.0), u)
        lost, remainder = self._two_sum_error(self.splat(1.0), u, w), self._log_parts(w)
        small = self.b.fadd(remainder[1], self.b.fdiv(lost, w))
        return self.b.select(
            self.b.fcmp_ordered(">", x, self.splat(20.0)), x, self.b.fadd(remainder[0], small)
        )

    def _clipped(self, x: Any, limit: float) -> Any:
        x = self.b.select(self.b.fcmp_ordered(">", x, self.splat(limit)), self.splat(limit), x)
        return self.b.select(self.b.fcmp_ordered("<", x, self.splat(-limit)), self.splat(-limit), x)

    def _reduced(self, x: Any) -> tuple[Any, Any]:
        """(n + the bits of a constant, r) with x = n ln 2 + r."""
        n = self.number
        # Adding 1.5 · 2^mantissa rounds to a whole number and leaves it in the low bits.
        magic = self.splat(1.5 * 2.0**n.mantissa)
        shifted = self.fma(x, self.splat(1.0 / math.log(2.0)), magic)
        whole = self.b.fsub(shifted, magic)
        r = self.fma(whole, self.splat(-n.ln2_high), x)
        return self.b.bitcast(shifted, self.words), self.fma(whole, self.splat(-n.ln2_low), r)

    def _exp_minus_one(self, r: Any) -> Any:
        """exp(r) - 1 for |r| ≤ ln(2)/2, relatively precise near 0."""
        degree = self.number.exp_degree
        p = self.splat(1.0 / math.factorial(degree))
        for k in range(degree - 1, 0, -1):
            p = self.fma(p, r, self.splat(1.0 / math.factorial(k)))
        return self.b.fmul(p, r)

    def _exp_parts(self, x: Any) -> tuple[Any, Any]:
        """2ⁿ and p with exp(x) = 2ⁿ (1 + p), where 2ⁿ is a normal number."""
        whole, r = self._reduced(x)
        return self._power_of_two(whole), self._exp_minus_one(r)

    def _power_of_two(self, n: Any) -> Any:
        """2ⁿ of whole numbers; bits above the exponent's are shifted out."""
        shifted = self.b.shl(self.b.add(n, self._bits(self.number.bias)), self._bits(self.number.mantissa))
        return self.b.bitcast(shifted, self.vector)

    def _exp_of_sum(self, high: Any, low: Any, half: bool = False) -> Any:
        """exp(high + low) or half of it, low being small; 2ⁿ in two factors: n may leave a normal number's range."""
        least, most = self.number.exp_range
        below = self.b.fcmp_ordered("<", high, self.splat(least))
        above = self.b.fcmp_ordered(">", high, self.splat(most))
        clipped = self.b.select(above, self.splat(most), self.b.select(below, self.splat(least), high))
        low = self.b.select(self.b.or_(below, above), self.zero(), low)
        whole, r = self._reduced(clipped)
        p = self._exp_minus_one(self.b.fadd(r, low))
        magic = self.b.bitcast(self.splat(1.5 * 2.0**self.number.mantissa), self.words)
        n = self.b.sub(whole, magic)
        n = self.b.sub(n, self._bits(1)) if half else n
        first = self.b.ashr(n, self._bits(1))
        scale = self._power_of_two(first)
        return self.b.fmul(self.fma(p, scale, scale), self._power_of_two(self.b.sub(n, first)))

    # ---- log and powers

    def log(self, x: Any) -> Any:
        """ln x: -∞ at 0, NaN below."""
        return self.shared("log", self._log, x)

    def _log(self, x: Any) -> Any:
        high, low = self._log_parts(x)
        return self.b.select(
            self.b.fcmp_ordered("<", x, self.zero()), self.splat(math.nan), self.b.fadd(high, low)
        )

    def log1p(self, x: Any) -> Any:
        """ln(1 + x), relatively precise near 0: what is lost in the sum is added to first order."""
        one = self.splat(1.0)
        w = self.b.fadd(one, x)
        high, low = self._log_parts(w)
        lost = self.b.fdiv(self._two_sum_error(one, x, w), w)
        y = self.b.fadd(high, self.b.fadd(low, lost))
        edge = self.b.or_(
            self.b.fcmp_ordered("==", w, self.zero()), self.b.fcmp_ordered("==", w, self.splat(math.inf))
        )
        y = self.b.select(edge, high, y)
        return self.b.select(self.b.fcmp_ordered("<", w, self.zero()), self.splat(math.nan), y)

    def power(self, a: Any, b: Any) -> Any:
        """a^b with the special cases of C's pow."""
        return self.shared("power", self._power, a, b)

    def _power(self, a: Any, b: Any) -> Any:
        one, zero = self.splat(1.0), self.zero()
        size = self.absolute(a)
        log, log_low = self._log_parts(size)
        high = self.b.fmul(b, log)
        low = self.fma(b, log_low, self.fma(b, log, self.b.fneg(high)))
        y = self._exp_of_sum(high, low)
        y = self.b.select(self.b.fcmp_ordered("==", size, one), self.b.select(self._is_nan(b), b, one), y)
        is_whole = self.b.fcmp_ordered("==", self._floor(b), b)
        half = self.b.fmul(b, self.splat(0.5))
        is_odd = self.b.and_(is_whole, self.b.fcmp_ordered("!=", self._floor(half), half))
        negative = self.b.icmp_signed("<", self.b.bitcast(a, self.words), self._bits(0))
        y = self.b.select(self.b.and_(negative, is_odd), self.b.fneg(y), y)
        finite_below = self.b.and_(
            self.b.fcmp_ordered("<", a, zero), self.b.fcmp_ordered(">", a, self.splat(-math.inf))
        )
        y = self.b.select(self.b.and_(finite_below, self.b.not_(is_whole)), self.splat(math.nan), y)
        trivial = self.b.or_(self.b.fcmp_ordered("==", b, zero), self.b.fcmp_ordered("==", a, one))
        return self.b.select(trivial, one, y)

    def power_log(self, a: Any, b: Any) -> Any:
        """a^b ln a, 0 at a = 0."""
        return self.shared("power_log", self._power_log, a, b)

    def _power_log(self, a: Any, b: Any) -> Any:
        product = self.b.fmul(self.power(a, b), self.log(a))
        return self.b.select(self.b.fcmp_ordered("==", a, self.zero()), self.zero(), product)

    def lp(self, p: Any, *values: Any) -> Any:
        """((1/N) Σ |a|^p)^(1/p); the largest |a| is taken out and put back, so that nothing overflows."""
        return self.shared(f"lp{len(values)}", self._lp, p, *values)

    def _lp(self, p: Any, *values: Any) -> Any:
        sizes = [self.absolute(x) for x in values]
        largest = self.maximum(*sizes)
        empty = self.b.fcmp_ordered("==", largest, self.zero())
        divisor = self.b.select(empty, self.splat(1.0), largest)
        total = self.zero()
        for x in sizes:
            total = self.b.fadd(total, self.power(self.b.fdiv(x, divisor), p))
        mean = self.b.fdiv(total, self.splat(float(len(values))))
        root = self.power(mean, self.b.fdiv(self.splat(1.0), p))
        return self.b.select(empty, self.zero(), self.b.fmul(divisor, root))

    def _two_sum_error(self, a: Any, b: Any, total: Any) -> Any:
        """What was lost in total = a + b."""
        part = self.b.fsub(total, a)
        return self.b.fadd(self.b.fsub(a, self.b.fsub(total, part)), self.b.fsub(b, part))

    def _log_parts(self, x: Any) -> tuple[Any, Any]:
        """ln x for x ≥ 0 as a sum of two; (-∞, 0) at 0, (∞, 0) at ∞."""
        n, b = self.number, self.b
        tiny = b.fcmp_ordered("<", x, self.splat(2.0 ** (1 - n.bias)))
        lift = n.mantissa + 1  # makes every denormal number a normal one
        bits = b.bitcast(b.select(tiny, b.fmul(x, self.splat(2.0**lift)), x), self.words)
        exponent = b.ashr(b.sub(bits, self._bits(n.root_half_bits)), self._bits(n.mantissa))
        m = b.bitcast(b.sub(bits, b.shl(exponent, self._bits(n.mantissa))), self.vector)  # in [√½, √2)
        e = b.sitofp(exponent, self.vector)
        e = b.select(tiny, b.fsub(e, self.splat(float(lift))), e)
        high, low = self._log_of_mantissa(m)
        scaled = b.fmul(e, self.splat(n.ln2_high))
        total = b.fadd(scaled, high)
        low = b.fadd(self._two_sum_error(scaled, high, total), self.fma(e, self.splat(n.ln2_low), low))
        for place, value in ((0.0, -math.inf), (math.inf, math.inf)):
            here = b.fcmp_ordered("==", x, self.splat(place))
            total, low = b.select(here, self.splat(value), total), b.select(here, self.zero(), low)
        return b.select(self._is_nan(x), x, total), low

    def _log_of_mantissa(self, m: Any) -> tuple[Any, Any]:
        """ln m = 2s + s³ (2/3 + 2/5 s² + …) with s = (m-1)/(m+1), as a sum of two."""
        n, b, one = self.number, self.b, self.splat(1.0)
        above, below = b.fsub(m, one), b.fadd(m, one)
        s = b.fdiv(above, below)
        rest = self.fma(b.fneg(s), below, above)
        rest = self.fma(b.fneg(s), b.fsub(m, b.fsub(below, one)), rest)  # what was lost in m + 1
        s_low = b.fdiv(rest, below)
        z = b.fmul(s, s)
        z_low = self.fma(b.fadd(s, s), s_low, self.fma(s, s, b.fneg(z)))
        tail = self.splat(2.0 / (2 * n.log_terms + 1))
        for k in range(n.log_terms - 1, 1, -1):
            tail = self.fma(tail, z, self.splat(2.0 / (2 * k + 1)))
        tail = b.fmul(tail, z)
        first, first_low = (self.splat(x) for x in n.two_thirds)
        q = b.fadd(first, tail)
        q_low = b.fadd(b.fsub(tail, b.fsub(q, first)), first_low)
        w = b.fmul(z, s)
        w_low = self.fma(z_low, s, self.fma(z, s_low, self.fma(z, s, b.fneg(w))))
        cube = b.fmul(w, q)
        cube_low = self.fma(w_low, q, self.fma(w, q_low, self.fma(w, q, b.fneg(cube))))
        high = b.fadd(s, s)
        total = b.fadd(high, cube)
        low = b.fadd(b.fadd(b.fsub(high, total), cube), b.fadd(cube_low, b.fadd(s_low, s_low)))
        return total, low
