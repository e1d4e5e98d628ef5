"""Randomness without state: every draw is a function of (member's seed, purpose, update).

Resuming therefore needs no generator state, and a member of a population draws what it would draw alone.
On the CPU a triple seeds a Mersenne twister; on the GPU, and wherever a graph is captured, the triple and
the element's place are hashed, so that the update may be a tensor on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

INIT, ORDER, NOISE, DROPOUT, TRANSPOSE, DROPCONNECT = range(6)
_64 = (1 << 64) - 1


def mix(seed: int, purpose: int, update: int = 0) -> int:
    """Three numbers to 64 well-mixed bits (splitmix64's finaliser, chained)."""
    z = 0
    for part in (seed, purpose, update):
        z = (z ^ part) + 0x9E3779B97F4A7C15 & _64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _64
        z ^= z >> 31
    return z


def generator(seed: int, purpose: int, update: int = 0) -> torch.Generator:
    """A CPU generator for one draw."""
    return torch.Generator().manual_seed(mix(seed, purpose, update))


def _hash32(x: Tensor) -> Tensor:
    """32 mixed bits of each 32-bit value held in an int64 (lowbias32: two multiplications)."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def hashed_bits(seeds: Tensor, purpose: int, update: Tensor, count: int) -> Tensor:
    """(P, count) of 32 random bits in int64, from device tensors alone: seeds (P,), update ()."""
    key = _hash32((seeds & 0xFFFFFFFF) ^ _hash32(seeds >> 32 & 0xFFFFFFFF))
    key = _hash32(key + 0x9E3779B9 * (purpose + 1) & 0xFFFFFFFF)
    key = _hash32(key ^ _hash32(update + 0x85EBCA6B & 0xFFFFFFFF))
    place = torch.arange(count, device=seeds.device)
    return _hash32(_hash32(place)[None] ^ key[:, None])


def hashed_uniform(seeds: Tensor, purpose: int, update: Tensor, count: int) -> Tensor:
    """(P, count) uniform in [0, 1), 24 bits."""
    return (hashed_bits(seeds, purpose, update, count) >> 8).to(torch.float32) * 2.0**-24
