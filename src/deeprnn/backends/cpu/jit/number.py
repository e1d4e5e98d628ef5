"""The two floating point types of machine code, and what exp and log need to know of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from llvmlite import ir


@dataclass(frozen=True)
class Number:
    """A floating point type."""

    type: ir.Type
    bits: ir.IntType
    size: int
    """bytes"""
    mantissa: int
    bias: int
    ln2_high: float
    """ln 2 in two parts, so that n · ln2_high is exact for every exponent n"""
    ln2_low: float
    exp_degree: int
    """of the Taylor polynomial of exp on |r| ≤ ln(2)/2"""
    exp_normal: float
    """exp(±exp_normal) is a normal number"""
    exp_range: tuple[float, float]
    """exp is 0 below, it and its half are infinite above"""
    log_terms: int
    """of the series of artanh on |s| ≤ 0.172, with room for a power's error to grow by the exponent"""
    root_half_bits: int
    """√½ as bits"""
    two_thirds: tuple[float, float]
    """2/3 in two parts"""


FLOAT = Number(
    ir.FloatType(), ir.IntType(32), 4, 23, 127, 0.693359375, -2.12194440054690583e-4, 7, 87.0, (-104.0, 90.0), 6,
    0x3F3504F3, (0.66666668653488159, -1.98682149251e-08),
)  # fmt: skip
DOUBLE = Number(
    ir.DoubleType(), ir.IntType(64), 8, 52, 1023, 6.93145751953125e-1, 1.42860682030941723212e-6, 13, 708.0,
    (-746.0, 711.0), 12, 0x3FE6A09E667F3BCD, (0.66666666666666663, 3.7007434154171886e-17),
)  # fmt: skip
NUMBERS = {torch.float32: FLOAT, torch.float64: DOUBLE}
