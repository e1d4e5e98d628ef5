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
    ring: Ring, cluster: int, mgroups: int, kgroups: int, finishers: int, rows: int, streams: int,
    through_l2: bool, kept: Sequence[int],
) -> float:  # fmt: skip
    """Cycles per step, before the factors of `planning.mma_plan`: 72 of 75 shapes are then within 12 %, all within 18.

    Least squares over the rows "bf16 parts" of results/bench/h200-sweep-before.jsonl; factors over h200-sweep.jsonl.

    One stream is a chain: product, sums, unit, and the way to the other blocks, which hides the shortcut's
    product. Several streams overlap until the multiplying warps or the finishers are always busy; which of the
    three it is shows gradually, hence the fourth powers. Weights of two parts and three products, for bf16 too: fewer
    hardly change which shape is best.
    """
    ntiles, chain, multiplying, finishing = _up(rows, 8), 0.0, 0.0, 0.0
    dealt = [_up(_up(n, 16), cluster) for n in ring.sizes]  # tiles of the busiest block
    at_once = min(finishers, max(dealt) * ntiles)
    used = at_once * min(streams, finishers // at_once)  # finishers that have something to do
    for s, (n, most) in enumerate(zip(ring.sizes, dealt, strict=True)):
        own, work = _up(most, mgroups) * mgroups, {True: 0.0, False: 0.0}
        for j, (stage, source) in enumerate(zip(ring.stages, ring.sources, strict=True)):
            if stage == s:  # 8.9 cycles an instruction; weights in shared memory, 128 bytes a cycle
                inner = _up(ring.sizes[source], 16)
                apart = max(0, inner - kept[j] * kgroups)
                critical = source == (s - 1) % len(ring.sizes)
                work[critical] += own * (8.94 * inner * ntiles * 3 / 4 + 4.75 * apart * 2)
        received = _up(n, 16) * rows * 64
        away = 304 + 0.031 * received if through_l2 else 0.0702 * received
        away += 44.4 * kgroups + 9.1 * (finishers - 4)
        link = 432 + (0 if ring.backward else 90) + work[True] + away + max(0.0, work[False] - away)
        more = _up(most * ntiles, finishers) - 1  # tiles after a finisher's first: not measured alone
        chain += max(link + 400 * more, 1325)  # nor are layers so small that only latency is left
        multiplying += 244 + (40 if ring.backward else 0) + 23 * (finishers - 4) + work[True] + work[False]
        finishing += most * ntiles / used * (1203 if through_l2 else 2103)
    if streams == 1:
        return chain
    return (chain**4 + (streams * multiplying) ** 4 + (streams * finishing) ** 4) ** 0.25


def _up(a: int, b: int) -> int:
    return -(-a // b)
