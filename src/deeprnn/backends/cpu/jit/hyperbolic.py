"""Hyperbolic functions and the hypotenuse as vector instructions."""

from __future__ import annotations

import math
from typing import Any

from deeprnn.backends.cpu.jit.number import FLOAT
from deeprnn.backends.cpu.jit.vector_math import VectorMath

FAR = 2.0**60
"""where 1 + x² is x² and its square still a number"""


class HyperbolicMath(VectorMath):
    """sinh, cosh, arcsinh and √(x² + y²)."""

    def sinh(self, x: Any) -> Any:
        """(e^x − e^-x) / 2: below 1 its series, for the difference would lose small arguments."""
        return self.shared("sinh", self._sinh, x)

    def cosh(self, x: Any) -> Any:
        """(e^x + e^-x) / 2."""
        return self.shared("cosh", self._cosh, x)

    def _sinh(self, x: Any) -> Any:
        z = self.b.fmul(x, x)
        terms = 6 if self.number is FLOAT else 9
        series = [1.0 / math.factorial(2 * k + 1) for k in range(1, terms)]
        near = self.fma(self.b.fmul(x, z), self.polynomial(z, series), x)
        rising, falling = self._halves(x)
        far = self.with_sign(self.b.fsub(rising, falling), x)
        return self.b.select(self.b.fcmp_ordered("<", self.absolute(x), self.splat(1.0)), near, far)

    def _cosh(self, x: Any) -> Any:
        return self.b.fadd(*self._halves(x))

    def _halves(self, x: Any) -> tuple[Any, Any]:
        """e^|x| / 2, which may be a number where e^|x| is none, and e^-|x| / 2."""
        rising = self._exp_of_sum(self.absolute(x), self.zero(), half=True)
        return rising, self.b.fdiv(self.splat(0.25), rising)

    def arcsinh(self, x: Any) -> Any:
        """The number whose sinh is x: log1p(|x| + x² / (1 + √(1 + x²))), which loses neither end."""
        return self.shared("arcsinh", self._arcsinh, x)

    def _arcsinh(self, x: Any) -> Any:
        b, one = self.b, self.splat(1.0)
        size = self.absolute(x)
        far = b.fcmp_ordered(">", size, self.splat(FAR))
        z = b.fmul(size, size)
        root = self.sqrt(b.fadd(one, z))
        inner = b.fadd(size, b.fdiv(z, b.fadd(one, root)))
        y = self.log1p(b.select(far, size, inner))
        y = b.fadd(y, b.select(far, self.splat(math.log(2.0)), self.zero()))
        return self.with_sign(y, x)

    def hypot(self, x: Any, y: Any) -> Any:
        """√(x² + y²) without overflow: the larger is taken out; ∞ where one is infinite, as in C."""
        return self.shared("hypot", self._hypot, x, y)

    def _hypot(self, x: Any, y: Any) -> Any:
        b = self.b
        x, y = self.absolute(x), self.absolute(y)
        wide = b.fcmp_ordered(">", x, y)
        most, least = b.select(wide, x, y), b.select(wide, y, x)
        empty = b.fcmp_ordered("==", most, self.zero())
        q = b.fdiv(least, b.select(empty, self.splat(1.0), most))
        length = b.fmul(most, self.sqrt(self.fma(q, q, self.splat(1.0))))
        length = b.select(b.fcmp_unordered("uno", x, y), b.fadd(x, y), length)
        first, second = (b.fcmp_ordered("==", side, self.splat(math.inf)) for side in (x, y))
        return b.select(b.or_(first, second), self.splat(math.inf), length)
