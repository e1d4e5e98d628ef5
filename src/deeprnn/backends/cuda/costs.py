"""What a step of a planned kernel costs, in clock cycles: two small models fitted to measurements on an H200.

They only rank shapes. tests/backends/test_planning.py holds them against results/bench/h200-sweep.jsonl.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeprnn.backends.cuda.planning import Ring

EXCHANGE = ((2, 450), (4, 520), (8, 560), (12, 600), (16, 760))  # cycles to pass a vector round a cluster


def exchange_cycles(cluster: int) -> float:
    """Cycles to pass a vector round a cluster; between measured sizes, in proportion."""
    for (low, least), (high, most) in pairwise(EXCHANGE):
        if cluster <= high:
            return least + (most - least) * (cluster - low) / (high - low)
    return EXCHANGE[-1][1]


def ffma_cost(
    ring: Ring, cluster: int, klanes: int, vec: int, rows: int, rpt: Sequence[int], rounds: Sequence[int],
    kept: Sequence[int], critical: Sequence[bool], words: int,
) -> float:  # fmt: skip
    """Cycles per step: exchange, reduction and unit of each stage, and the products where they show."""
    exchange = exchange_cycles(cluster) + rows * 12 * cluster // 8
    broadcast = 1.0 if klanes == 32 or vec == 4 else 0.7  # lanes that read one address share little
    crowd = (1.0, 1.5, 2.6)[min(rows, 3) - 1]  # registers are too few to keep several rows in flight
    total = 0.0
    for s, n in enumerate(ring.sizes):
        warps = _up(_up(_up(n, cluster), rpt[s]), 32 // klanes)
        work = {True: 0.0, False: 0.0}
        for j, stage in enumerate(ring.stages):
            if stage != s:
                continue
            fmas = rounds[j] * rpt[s] * rows * vec
            loads = rounds[j] * rows
            apart = (rounds[j] - kept[j]) * rpt[s]
            issue = _up(warps, 4) * (fmas + loads + apart)
            memory = warps * (loads * vec * broadcast + apart * words)
            work[critical[j]] += crowd * max(issue, memory, fmas // vec * 4) + 0.2 * min(issue, memory)
        reduction = 28 * (klanes.bit_length() - 1) + 8 * rpt[s] * rows + 40 * max(0, warps - 5)
        total += 260 + exchange + reduction + work[True] + max(0.0, work[False] - 0.7 * exchange)
    return total


def mma_cost(
    ring: Ring, cluster: int, warps: int, kgroups: int, rows: int, streams: int, parts: int,
    mine: Sequence[int], rounds: Sequence[int], kept: Sequence[int],
) -> float:  # fmt: skip
    """Cycles per step; least squares over results/bench/h200-sweep.jsonl, most shapes within 6 %, all within 14.

    One stream is a chain: products, partial sums (which every finishing warp reads of all its group), unit,
    sending, receiving. Several streams overlap, and what one warp sends for its group is the longest part.
    """
    ntiles, alone, turns = _up(rows, 8), 0.0, 0.0
    for s, n in enumerate(ring.sizes):
        own = [j for j, stage in enumerate(ring.stages) if stage == s]
        state = sum(rounds[j] for j in own) * ntiles * 4
        weights = sum(rounds[j] - kept[j] for j in own) * mine[s] * parts * 4
        issue = _up(warps, 4) * state // 4 * mine[s] * (1 + parts)
        received = _up(n, 16) * rows * 64
        full, rest = divmod(mine[s] * ntiles, kgroups)
        share = kgroups // rest if rest else 0  # warps that finish one tile of the last round
        added = (
            warps // kgroups * (full * kgroups + share * rest)
        )  # tiles, once for each warp that adds them up
        sums = 4 * (added * kgroups + mine[s] * warps * ntiles)
        sends = full * cluster + (_up(cluster, share) if rest else 0)
        chain = max(2.4 * issue, warps * (0.97 * state + 1.2 * weights)) + (0 if ring.backward else 85)
        chain += 627 * (full + (rest > 0)) + 0.065 * received + 1.81 * sums + 16.3 * sends
        alone += max(chain, exchange_cycles(cluster) + 650)  # small layers: latency, as timed in the kernel
        turns += 1040 + streams * (1.16 * warps * (state + weights) + 0.0325 * received)
        turns += streams * 107 * mine[s] * ntiles * cluster / kgroups
    return alone if streams == 1 else turns


def _up(a: int, b: int) -> int:
    return -(-a // b)
