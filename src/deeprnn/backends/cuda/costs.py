"""What a step of a planned kernel costs, in clock cycles: two small models fitted to measurements on an H200.

They only rank shapes. tests/backends/test_planning.py holds them against results/bench/h200-sweep.jsonl.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deeprnn.backends.cuda.planning import Ring

EXCHANGE = ((2, 450), (4, 520), (8, 560), (16, 700))  # cycles to pass a vector round a cluster (measured)


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
        reduction = 28 * (klanes.bit_length() - 1) + 8 * rpt[s] * rows + 40 * max(0, warps - 7)
        total += 260 + exchange + reduction + work[True] + max(0.0, work[False] - 0.7 * exchange)
    return total


def mma_cost(
    ring: Ring, cluster: int, warps: int, kgroups: int, rows: int, streams: int, parts: int,
    mine: Sequence[int], rounds: Sequence[int], kept: Sequence[int], critical: Sequence[bool], per_warp: Sequence[int],
) -> float:  # fmt: skip
    """Cycles per step; least squares over results/bench/h200-sweep.jsonl, within 6 % of each of its shapes.

    What counts is shared memory: operands read for the products, then partial sums, which every finishing
    warp reads of all its group. The tensor cores wait for it in all shapes measured.
    """
    ntiles, alone, busy, arriving = _up(rows, 8), 0.0, 0.0, 0.0
    for s, n in enumerate(ring.sizes):
        work = {True: 0.0, False: 0.0}
        for j, stage in enumerate(ring.stages):
            if stage == s:
                issue = _up(warps, 4) * rounds[j] * mine[s] * ntiles * (1 + parts)
                memory = warps * (rounds[j] * ntiles * 4 + (rounds[j] - kept[j]) * mine[s] * parts * 4)
                work[critical[j]] += max(6 * issue, 2.03 * memory)
        finished = (
            max(mine[s] * ntiles, kgroups) * warps // kgroups
        )  # tiles, counted for each warp that adds one up
        sums = 4 * (finished * kgroups + mine[s] * warps * ntiles)
        received = _up(n, 16) * rows * 64 / 18
        unit = 55 if ring.backward else 277
        common = 433 * per_warp[s] + 1.72 * sums + work[True]
        alone += unit + 21 * rows + received + common + 0.26 * work[False]
        busy += 0.6 * common + 0.6 * work[False]
        arriving += received
    return alone if streams == 1 else max(alone, streams * max(busy, arriving))


def _up(a: int, b: int) -> int:
    return -(-a // b)
