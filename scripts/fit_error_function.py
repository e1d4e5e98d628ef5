"""Fit the polynomials by which machine code computes erfc: prints the rows of `error_function.py` and their errors.

e^(x²) erfc(x) = t q(u) for x ≥ ½, where t = 1/(x + shift) falls from its largest to its least number as u = 1 − scale t
goes from −1 to 1. q is interpolated at Chebyshev's points in 60 digits, and its coefficients are then rounded.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np

START = mp.mpf("0.5")
TYPES = (("FLOAT", np.float32, 10.1, 2.0, 8), ("DOUBLE", np.float64, 27.3, 3.25, 20))
"""name, type, where erfc has become zero, the shift, and the polynomial's degree"""


def line(end: float, shift: float) -> tuple[mp.mpf, mp.mpf]:
    """(offset, scale) of u = offset − scale · t, which is −1 at the start and 1 at the end."""
    first, last = 1 / (START + shift), 1 / (mp.mpf(end) + shift)
    scale = 2 / (first - last)
    return scale * first - 1, scale


def fitted(kind: type, end: float, shift: float, degree: int) -> tuple[list[float], list[float], float]:
    """((offset, scale), coefficients from the constant on, the largest relative error)."""
    offset, scale = (mp.mpf(float(kind(float(v)))) for v in line(end, shift))

    def q(u: mp.mpf) -> mp.mpf:
        t = (offset - u) / scale
        x = 1 / t - shift
        return mp.exp(x * x) * mp.erfc(x) / t

    count = degree + 1
    angles = [mp.pi * (mp.mpf(j) + mp.mpf(1) / 2) / count for j in range(count)]
    values = [q(mp.cos(a)) for a in angles]
    weights = [
        2 * mp.fsum(v * mp.cos(i * a) for v, a in zip(values, angles, strict=True)) / count
        for i in range(count)
    ]
    weights[0] /= 2
    polynomials: list[list[mp.mpf]] = [[mp.mpf(1)], [mp.mpf(0), mp.mpf(1)]]
    while len(polynomials) < count:
        doubled = [mp.mpf(0), *(2 * c for c in polynomials[-1])]
        before = [*polynomials[-2], mp.mpf(0), mp.mpf(0)]
        polynomials.append([a - b for a, b in zip(doubled, before, strict=True)])
    exact = [
        mp.fsum(w * p[k] for w, p in zip(weights, polynomials, strict=True) if k < len(p))
        for k in range(count)
    ]
    rounded = [float(kind(float(c))) for c in exact]
    points = [mp.mpf(float(u)) for u in np.linspace(-1, 1, 1001)]
    error = max(abs(mp.polyval(rounded[::-1], u) / q(u) - 1) for u in points)
    return [float(offset), float(scale)], rounded, float(error)


def main() -> None:
    """Print both rows."""
    mp.mp.dps = 60
    for name, kind, end, shift, degree in TYPES:
        (offset, scale), coefficients, error = fitted(kind, end, shift, degree)
        print(f"{name}: shift {shift}, offset {offset!r}, scale {scale!r}, relative error {error:.1e}")
        print(", ".join(map(repr, coefficients)))


if __name__ == "__main__":
    main()
