"""Whole numbers and remainders as vector instructions, exact for every quotient."""

from __future__ import annotations

import math
from typing import Any

from deeprnn.backends.cpu.jit.vector_math import VectorMath


class RoundingMath(VectorMath):
    """floor, round and remainders."""

    repeat: Any

    def floor(self, x: Any) -> Any:
        """The largest whole number that is not above x."""
        return self._floor(x)

    def round(self, x: Any) -> Any:
        """The nearest whole number, the even one of two."""
        return self.intrinsic(f"llvm.rint.{self.suffix}", self.vector, x)

    def fmod(self, x: Any, y: Any) -> Any:
        """What is left of x after whole numbers of y, with the sign of x; NaN at y = 0 and infinite x."""
        return self.shared("fmod", self._fmod, x, y)

    def remainder(self, x: Any, y: Any) -> Any:
        """The same with the sign of y."""
        b, zero = self.b, self.zero()
        left = self.fmod(x, y)
        opposite = b.xor(b.fcmp_ordered("<", left, zero), b.fcmp_ordered("<", y, zero))
        opposite = b.and_(opposite, b.fcmp_ordered("!=", left, zero))
        return b.select(opposite, b.fadd(left, y), left)

    def _fmod(self, x: Any, y: Any) -> Any:
        b = self.b
        divisor = self.absolute(y)

        def left(rest: Any) -> Any:
            more = b.and_(
                b.fcmp_ordered(">=", rest, divisor), b.fcmp_ordered("<", rest, self.splat(math.inf))
            )
            return self.any_lane(b.and_(more, b.fcmp_ordered(">", divisor, self.zero())))

        def reduced(rest: Any) -> list[Any]:
            return [b.select(b.fcmp_ordered(">=", rest, divisor), self._less_multiples(rest, divisor), rest)]

        (rest,) = self.repeat([self.absolute(x)], left, reduced)
        invalid = b.or_(
            b.fcmp_unordered("==", divisor, self.zero()),
            b.fcmp_unordered("==", self.absolute(x), self.splat(math.inf)),
        )
        return b.select(invalid, self.splat(math.nan), self.with_sign(rest, x))

    def _less_multiples(self, rest: Any, divisor: Any) -> Any:
        """rest less a multiple of the divisor that leaves at most 2^-mantissa of it, or less than the divisor.

        A rounded quotient times the divisor differs from rest by what the type can hold: one fma is exact. Where the
        quotient is too large by its rounding, the number below it serves.
        """
        b, n = self.b, self.number
        quotient = b.fdiv(rest, divisor)
        for _ in range(
            2
        ):  # where the quotient would be infinite, of a multiple: the widest quotient has 2 bias bits
            huge = b.fcmp_ordered("==", quotient, self.splat(math.inf))
            divisor = b.select(huge, b.fmul(divisor, self.splat(2.0 ** (n.bias - 27))), divisor)
            quotient = b.fdiv(rest, divisor)
        quotient = self._floor(quotient)
        left = self.fma(b.fneg(quotient), divisor, rest)
        smaller = b.bitcast(b.sub(b.bitcast(quotient, self.words), self._bits(1)), self.vector)
        again = self.fma(b.fneg(self._floor(smaller)), divisor, rest)
        return b.select(b.fcmp_ordered("<", left, self.zero()), again, left)
