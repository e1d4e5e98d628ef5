"""Sine, cosine and the arc tangent as vector instructions, right for arguments of every size.

An argument x is n quarter turns and a rest r with |r| ≤ π/4. Below `LARGE`, r is x − n π/2 by a π/2 in parts, in double
precision. Beyond that its parts would have to be too many: x · 2/π is computed modulo 4 from those digits of 2/π that
matter for the exponent of x (after Payne and Hanek). That costs several times as much, and is left out where no lane
needs it. Sine and cosine of r are Taylor polynomials.

The arc tangent is its series on |u| ≤ tan(π/12), to which arguments up to 1 are brought by the addition theorem.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import Any

from llvmlite import ir

from deeprnn.backends.cpu.jit.builder import I64, POINTER
from deeprnn.backends.cpu.jit.number import FLOAT
from deeprnn.backends.cpu.jit.vector_math import VectorMath

LARGE = 2.0**20
"""up to here n fits the 20 bits that the parts of π/2 below leave for it in a product"""
FIRST_EXPONENT, SPACING = 20, 24
"""rows of the table of 2/π are for exponents of x from the first one on, each for as many"""
PARTS = 4
"""of 2/π in each row: its error times an x of 2^(53 + 24) is far below the least rest that a double can leave"""
ROWS = (1023 - FIRST_EXPONENT) // SPACING + 1
DIGITS = 1400
"""bits of π that the table needs"""


@cache
def _pi_in_bits() -> int:
    """π · 2^DIGITS by Machin's 16 arctan(1/5) − 4 arctan(1/239), rounded far below what the table shows."""
    spare = 64

    def arctan_of_inverse(n: int) -> int:
        power = total = (1 << (DIGITS + spare)) // n
        k = 1
        while power:
            power //= -n * n
            k += 2
            total += power // k
        return total

    return (16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)) >> spare


def in_parts(value: Fraction, bits: tuple[int, ...]) -> tuple[float, ...]:
    """A number as a sum of doubles that have so many bits each, the largest first."""
    parts = []
    for count in bits:
        if value == 0:
            parts.append(0.0)
            continue
        exponent = math.frexp(float(value))[1]
        unit = Fraction(2) ** (exponent - count)
        parts.append(float(round(value / unit) * unit))
        value -= Fraction(parts[-1])
    return tuple(parts)


def half_pi(*bits: int) -> tuple[float, ...]:
    """π/2 in parts of so many bits."""
    return in_parts(Fraction(_pi_in_bits(), 2 << DIGITS), bits)


@cache
def two_over_pi() -> tuple[float, ...]:
    """Row q holds 2^(24 q + 20 − 52) · 2/π modulo 4 in parts: x is a whole number times 2^(20 − 52) from 2^20 on."""
    table: list[float] = []
    for q in range(ROWS):
        turns = Fraction(2 << DIGITS, _pi_in_bits()) * Fraction(2) ** (SPACING * q + FIRST_EXPONENT - 52)
        table += in_parts(turns % 4, (53,) * PARTS)
    return tuple(table)


class CircularMath(VectorMath):
    """Sine, cosine and arc tangent."""

    module: ir.Module
    either: Any

    def sine(self, x: Any) -> Any:
        """sin x; NaN at ±∞."""
        return self.shared("sine", lambda x: self._wave(x, 0), x)

    def cosine(self, x: Any) -> Any:
        """cos x; NaN at ±∞."""
        return self.shared("cosine", lambda x: self._wave(x, 1), x)

    def _wave(self, x: Any, quarters: int) -> Any:
        """sin(x + quarters · π/2)."""
        turns, r, low = self._quarter_turns(x)
        turns = self.b.add(turns, self._bits(quarters))
        sine, cosine = self._sine_of_rest(r, low), self._cosine_of_rest(r, low)
        is_odd = self.b.icmp_unsigned("!=", self.b.and_(turns, self._bits(1)), self._bits(0))
        y = self.b.select(is_odd, cosine, sine)
        # The second bit of the turns becomes the sign's.
        sign = self.b.shl(self.b.lshr(turns, self._bits(1)), self._bits(self.number.bits.width - 1))
        y = self.b.bitcast(self.b.xor(self.b.bitcast(y, self.words), sign), self.vector)
        if quarters:
            return y
        return self.b.select(self.b.fcmp_ordered("==", x, self.zero()), x, y)  # keeps the sign of zero

    def _sine_of_rest(self, r: Any, low: Any) -> Any:
        """r − r³/3! + …, to which a sine changes by as much as its argument does."""
        z = self.b.fmul(r, r)
        terms = 4 if self.number is FLOAT else 8
        tail = self.polynomial(z, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(1, terms + 1)])
        tail = self.b.fmul(self.b.fmul(r, z), tail)
        return self.b.fadd(r, tail if low is None else self.b.fadd(low, tail))

    def _cosine_of_rest(self, r: Any, low: Any) -> Any:
        """1 − r²/2! + …."""
        z = self.b.fmul(r, r)
        terms = 5 if self.number is FLOAT else 8
        tail = self.polynomial(z, [(-1.0) ** k / math.factorial(2 * k) for k in range(1, terms + 1)])
        tail = self.b.fmul(z, tail)
        if low is not None:
            tail = self.fma(self.b.fneg(r), low, tail)
        return self.b.fadd(self.splat(1.0), tail)

    # ---- quarter turns

    def _quarter_turns(self, x: Any) -> tuple[Any, Any, Any]:
        """n modulo 4 in the low bits of words, and x − n π/2, in doubles as a sum of two; else the second is None."""
        wide = ir.VectorType(ir.DoubleType(), self.lanes)
        is_float = self.number is FLOAT
        x = self.b.fpext(x, wide) if is_float else x
        size = self._wide("fabs", x)
        large = self.b.fcmp_ordered(">", size, self._constant(LARGE))
        n, high, low = self._turns_of_moderate(x)

        def with_large() -> list[Any]:
            others = self._turns_of_large(x, size)
            return [self.b.select(large, a, b) for a, b in zip(others, (n, high, low), strict=True)]

        n, high, low = self.either(self.any_lane(large), with_large, lambda: [n, high, low])
        if is_float:
            return self.b.trunc(n, self.words), self.b.fptrunc(self.b.fadd(high, low), self.vector), None
        return n, *self._sum_and_error(high, low)

    def _constant(self, value: float) -> Any:
        kind = ir.VectorType(ir.DoubleType(), self.lanes)
        return self.splat_of(kind, ir.Constant(ir.DoubleType(), value))

    def _whole(self, value: int) -> Any:
        return self.splat_of(ir.VectorType(I64, self.lanes), ir.Constant(I64, value))

    def _wide(self, name: str, *arguments: Any) -> Any:
        """An operation on doubles, whatever the function's own type is."""
        return self.intrinsic(f"llvm.{name}.v{self.lanes}f64", arguments[0].type, *arguments)

    def _rounded(self, x: Any) -> tuple[Any, Any]:
        """(the whole number in the low bits, the whole number) nearest to x, which is below 2^51."""
        magic = self._constant(1.5 * 2.0**52)
        shifted = self.b.fadd(x, magic)
        bits = self.b.bitcast(shifted, ir.VectorType(I64, self.lanes))
        return bits, self.b.fsub(shifted, magic)

    def _turns_of_moderate(self, x: Any) -> tuple[Any, Any, Any]:
        """For doubles the products with the first two parts are exact, and so is the first difference."""
        b = self.b
        bits, whole = self._rounded(b.fmul(x, self._constant(2.0 / math.pi)))
        if self.number is FLOAT:  # of 24 bits: the rest is never so small that two parts would not do
            first, second = (self._constant(-part) for part in half_pi(53, 53))
            rest = self._wide("fma", whole, second, self._wide("fma", whole, first, x))
            return bits, rest, self._constant(0.0)
        first, second, third = (self._constant(-part) for part in half_pi(33, 33, 53))
        rest = self._wide("fma", whole, first, x)
        high, low = self._sum_and_error(rest, b.fmul(whole, second))
        return bits, high, self._wide("fma", whole, third, low)

    def _turns_of_large(self, x: Any, size: Any) -> tuple[Any, Any, Any]:
        """Of lanes beyond LARGE; NaN at ±∞."""
        b, words = self.b, ir.VectorType(I64, self.lanes)
        bits = b.bitcast(size, words)
        over = b.sub(b.lshr(bits, self._whole(52)), self._whole(1023 + FIRST_EXPONENT))
        over = b.select(b.icmp_signed("<", over, self._whole(0)), self._whole(0), over)
        row = b.lshr(b.mul(over, self._whole(2**20 // SPACING + 1)), self._whole(20))
        rest = b.sub(over, b.mul(row, self._whole(SPACING)))
        mantissa = b.and_(bits, self._whole(2**52 - 1))
        exponent = b.shl(b.add(rest, self._whole(1023 + 52)), self._whole(52))
        m = b.bitcast(b.or_(mantissa, exponent), size.type)  # a whole number of up to 77 bits
        parts = [self._from_table(row, k) for k in range(PARTS)]
        products = [b.fmul(m, part) for part in parts]
        errors = [
            self._wide("fma", m, part, b.fneg(product)) for part, product in zip(parts, products, strict=True)
        ]
        # What is 2^-28 and less needs no folding; four quarter turns change nothing.
        total, lost = self._folded(products[0]), []
        for term in (self._folded(errors[0]), self._folded(products[1])):
            total, error = self._sum_and_error(total, term)
            lost.append(error)
        turns, whole = self._rounded(total)
        total = b.fsub(total, whole)
        for term in (errors[1], products[2], *lost):
            total, error = self._sum_and_error(total, term)
            lost = [*lost[2:], error]
        return self._in_radians(x, turns, total, [*lost, errors[2], products[3]])

    def _in_radians(self, x: Any, turns: Any, total: Any, small: list[Any]) -> tuple[Any, Any, Any]:
        """A rest in quarter turns as an angle; turns and rest of a negative x are the opposite."""
        b = self.b
        *_, rest = accumulate(small, b.fadd)
        first, second = (self._constant(part) for part in half_pi(53, 53))
        high = b.fmul(total, first)
        low = self._wide("fma", total, first, b.fneg(high))
        low = self._wide("fma", total, second, self._wide("fma", rest, first, low))
        zero = b.fsub(x, x)  # NaN where x is infinite
        high = b.fadd(high, zero)
        below = b.fcmp_ordered("<", x, self._constant(0.0))
        return (
            b.select(below, b.sub(self._whole(0), turns), turns),
            b.select(below, b.fneg(high), high),
            b.select(below, b.fneg(low), low),
        )

    def _folded(self, x: Any) -> Any:
        """x modulo 4, exactly, between −2 and 2."""
        quarter = self.b.fmul(x, self._constant(0.25))
        return self._wide("fma", self._wide("rint", quarter), self._constant(-4.0), x)

    def _sum_and_error(self, x: Any, y: Any) -> tuple[Any, Any]:
        total = self.b.fadd(x, y)
        return total, self._two_sum_error(x, y, total)

    def _from_table(self, row: Any, part: int) -> Any:
        """That part of every lane's row of 2/π."""
        name = "two_over_pi"
        table = self.module.globals.get(name)
        if table is None:
            numbers = two_over_pi()
            kind = ir.ArrayType(ir.DoubleType(), len(numbers))
            table = ir.GlobalVariable(self.module, kind, name)
            table.global_constant, table.linkage = True, "internal"
            table.initializer = ir.Constant(kind, list(numbers))  # type: ignore[assignment]
        index = self.b.add(self.b.mul(row, self._whole(PARTS)), self._whole(part))
        places = self.b.gep(table, [index], source_etype=ir.DoubleType())
        places.type = ir.VectorType(POINTER, self.lanes)  # llvmlite takes it for one address
        kind = ir.VectorType(ir.DoubleType(), self.lanes)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(1), self.lanes), [1] * self.lanes)
        name = f"llvm.masked.gather.v{self.lanes}f64.v{self.lanes}p0"
        eight = ir.Constant(ir.IntType(32), 8)
        return self.intrinsic(name, kind, places, eight, everywhere, self._constant(0.0))

    # ---- arc tangent

    def arctan2(self, y: Any, x: Any) -> Any:
        """The angle of (x, y) from the x axis, between −π and π, with the special cases of C's atan2."""
        return self.shared("arctan2", self._arctan2, y, x)

    def _arctan2(self, y: Any, x: Any) -> Any:
        b = self.b
        height, width = self.absolute(y), self.absolute(x)
        steep = b.fcmp_ordered(">", height, width)
        least, most = b.select(steep, width, height), b.select(steep, height, width)
        t = b.fdiv(least, most)
        t = b.select(b.fcmp_ordered("==", most, self.zero()), self.zero(), t)
        t = b.select(b.fcmp_ordered("==", least, self.splat(math.inf)), self.splat(1.0), t)
        angle = self._arctan_to_one(t)
        angle = b.select(steep, self._taken_from(0.5, angle), angle)
        left = b.icmp_signed("<", b.bitcast(x, self.words), self._bits(0))
        angle = self.with_sign(b.select(left, self._taken_from(1.0, angle), angle), y)
        return b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), angle)

    def _taken_from(self, turn: float, angle: Any) -> Any:
        """π or π/2 less an angle; what the constant lacks is added to it."""
        high, low = (self.splat(part) for part in self._parts_of_pi(turn))
        return self.b.fadd(self.b.fsub(high, angle), low)

    def _parts_of_pi(self, factor: float) -> tuple[float, ...]:
        bits = self.number.mantissa + 1
        return tuple(2.0 * factor * part for part in half_pi(bits, bits))

    def _arctan_to_one(self, t: Any) -> Any:
        """For t between 0 and 1: from tan(π/12) on, π/6 + arctan((t √3 − 1) / (t + √3))."""
        b, root = self.b, math.sqrt(3.0)
        far = b.fcmp_ordered(">", t, self.splat(2.0 - root))
        root_high, root_low = in_parts(
            Fraction(math.isqrt(3 << 400), 1 << 200), (self.number.mantissa + 1, 53)
        )
        over = self.fma(t, self.splat(root_high), self.splat(-1.0))
        turned = b.fdiv(self.fma(t, self.splat(root_low), over), b.fadd(t, self.splat(root)))
        u = b.select(far, turned, t)
        z = b.fmul(u, u)
        terms = 7 if self.number is FLOAT else 13
        tail = self.polynomial(z, [(-1.0) ** k / (2 * k + 1) for k in range(1, terms + 1)])
        y = self.fma(b.fmul(u, z), tail, u)
        high, low = (self.splat(part) for part in self._sixth())
        return b.select(far, b.fadd(high, b.fadd(y, low)), y)

    def _sixth(self) -> tuple[float, ...]:
        """π/6 in two parts."""
        bits = self.number.mantissa + 1
        return in_parts(Fraction(_pi_in_bits(), 6 << DIGITS), (bits, bits))
