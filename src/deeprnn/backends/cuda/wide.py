"""Shapes of `wide.cu`: one model over a team of blocks, up to the whole card, the state exchanged through L2.

For models that fit no thread-block cluster and for GPUs without clusters. Teams serve row groups and members
side by side where the card has room for several; what is left over follows in further passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING

from deeprnn.backends.cuda.planning import Device, Plan, generic_plan

if TYPE_CHECKING:
    from deeprnn.backends.cuda.planning import Ring

MOST_ROWS = 48
# Sums that a warp may hold, and sums with a round's weights: what 255 and 128 registers a thread leave.
TILES = {256: (64, 120), 512: (32, 60)}
POWERS = (1, 2, 4, 8, 16)
GROUPS = {
    threads: [(m, n, k) for m, n, k in product(POWERS, POWERS, POWERS) if m * n * k == threads // 32]
    for threads in TILES
}


@dataclass(frozen=True)
class WidePlan(Plan):
    """A plan of the wide kernel. `rows` are those of a pass, `cluster` is 1."""

    team: int = 1  # blocks that hold one model together
    teams: int = 1  # how many teams the card holds side by side
    passes: int = 1  # row groups that a team serves one after the other
    ngroups: int = 1  # warps side by side over the batch rows
    words: int = 0  # 32-bit words that a team exchanges through
    places: tuple[int, ...] = ()  # where each stage's vector lies in shared memory, per row
    strides: tuple[int, ...] = ()  # and how far its rows are apart

    def describe(self) -> str:
        """One line for a person."""
        teams = "" if self.teams == 1 else f"{self.teams} teams of "
        rows = f"{self.rows} batch row{'s' * (self.rows > 1)} at a time"
        return (
            f"wide: {teams}{self.team} blocks x {self.threads} threads hold one model"
            f"{' each' * (self.teams > 1)}, {rows}{f' in {self.passes} passes' * (self.passes > 1)}, state "
            f"through L2, weights on chip in {'bf16' if self.bf16 else 'fp32'}, "
            f"{self.shared // 1024} KiB shared memory a block"
        )

    def extra_macros(self) -> dict[str, int | str]:
        """The #defines of wide.cu beyond the common ones."""
        return {
            "TEAM": self.team, "MGROUPS": self.mgroups, "NGROUPS": self.ngroups, "KGROUPS": self.kgroups,
            "BF16": int(self.bf16), "PLACES": ",".join(map(str, self.places)),
            "STRIDES": ",".join(map(str, self.strides)),
        }  # fmt: skip


def wide_plan(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> WidePlan | None:
    """The cheapest shape; None where the card cannot hold the weights, or has rows enough to read them each step."""
    best = min(wide_plans(ring, batch, members, bf16, device), key=lambda plan: plan.cost, default=None)
    return None if best and _generic_cost(ring, batch, members, device) < 0.8 * best.cost else best


def wide_plans(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> Iterator[WidePlan]:
    """All shapes that fit: teams, rows of a pass, and how the warps of a block divide the work."""
    blocks = [(threads, warps) for threads, groups in GROUPS.items() for warps in groups]
    for teams in range(1, min(device.processors, members * batch) + 1):
        team = team_of(ring, device.processors // teams)
        common = ring, batch, members, bf16, device, team, teams
        if not any(wide_shape(*common, 1, *block) for block in blocks):
            break  # smaller teams have still less room
        for rows, block in product(rows_of(batch, members, teams), blocks):
            plan = wide_shape(*common, rows, *block)
            if plan is not None:
                yield plan


def team_of(ring: Ring, blocks: int) -> int:
    """How many of the blocks get anything when every block takes equally many outputs: 115 of 132 at 800."""
    return max(_up(n, _up(n, blocks)) for n in ring.sizes)


def rows_of(batch: int, members: int, teams: int) -> list[int]:
    """Rows of a pass worth trying: those that fill one, two, ... passes of all teams evenly."""
    found = set()
    for passes in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32):
        groups = max(1, teams * passes // members)
        found.add(_up(batch, groups))
    found |= {min(batch, rows) for rows in (1, 2, 4, 8, 12, 16, 24, 32, MOST_ROWS)}
    return sorted(rows for rows in found if rows <= MOST_ROWS)


def wide_shape(
    ring: Ring, batch: int, members: int, bf16: bool, device: Device,
    team: int, teams: int, rows: int, threads: int, warps: tuple[int, int, int],
) -> WidePlan | None:  # fmt: skip
    """One shape, sizes as in wide.cu; `warps` = those over outputs, over batch rows, over the inner dimension."""
    mgroups, ngroups, kgroups = warps
    mine = [_up(n, team) for n in ring.sizes]
    tile_m, tile_n = [_up(m, mgroups) for m in mine], _up(rows, ngroups)
    most, most_with_weights = TILES[threads]
    widest = max(tile_m)
    if widest * tile_n > most or widest * tile_n + 4 * widest > most_with_weights:
        return None
    if mgroups > max(mine) or ngroups > rows:
        return None
    padded = [_padded(n, bf16) for n in ring.sizes]
    weights = sum(
        tile_m[s] * mgroups * padded[q] * (2 if bf16 else 4)
        for s, q in zip(ring.stages, ring.sources, strict=True)
    )
    for homes in (tuple(range(len(mine))), homes_of(ring)):  # places are shared only where room is short
        strides = [max(k for k, home in zip(padded, homes, strict=True) if home == h) for h in homes]
        first = {h: strides[homes.index(h)] for h in sorted(set(homes))}
        starts = dict(zip(first, accumulate(first.values(), initial=0), strict=False))
        vectors = 4 * tile_n * ngroups * sum(first.values())
        shared = _up(vectors + 4 * kgroups * rows * max(mine) + 8 * rows, 128) * 128 + weights
        if shared <= device.shared_limit:
            break
    else:
        return None
    items = _up(batch, rows) * members
    used = min(teams, items)
    passes = _up(items, used)
    cost = passes * _cost(ring, bf16, team * used, mine, tile_m, tile_n, rows, threads, warps)
    return WidePlan(
        "wide", 1, threads, rows, shared=shared, bf16=bf16, cost=cost, mgroups=mgroups, kgroups=kgroups,
        team=team, teams=used, passes=passes, ngroups=ngroups, words=sum(8 * rows * _up(n, 4) for n in ring.sizes),
        places=tuple(starts[h] for h in homes), strides=tuple(strides),
    )  # fmt: skip


@lru_cache(maxsize=256)
def homes_of(ring: Ring) -> tuple[int, ...]:
    """A place for each stage's vector, shared where one is not needed any more when the other arrives.

    Vector q arrives at the start of stage q + 1 and serves it; as a shortcut it is read once more, just before
    the start of a later stage. A vector that arrives at that very moment may take its place.
    """
    depth = len(ring.sizes)

    def needed(q: int) -> int:  # stages that pass until the last products with q
        uses = [
            (s - q - 1) % depth for s, source in zip(ring.stages, ring.sources, strict=True) if source == q
        ]
        return max(uses)

    def apart(p: int, q: int) -> bool:
        return (p - q) % depth < needed(q) or (q - p) % depth < needed(p)

    homes: list[int] = []
    for q in range(depth):
        taken = {homes[p] for p in range(q) if apart(p, q)}
        homes.append(next(h for h in range(depth) if h not in taken))
    return tuple(homes)


def _cost(
    ring: Ring, bf16: bool, blocks: int, mine: list[int], tile_m: list[int], tile_n: int, rows: int,
    threads: int, warps: tuple[int, int, int],
) -> float:  # fmt: skip
    """Cycles per step; least squares over results/bench/h200-wide.jsonl, within 22 % of each of its shapes.

    An exchange costs 1,310 cycles, and more than as much again for every further eight loads of a thread.
    """
    mgroups, ngroups, kgroups = warps
    depth, total = len(ring.sizes), 0.0
    for s in range(depth):
        before = ring.sizes[(s - 1) % depth]
        busy = min(mgroups, _up(mine[s], tile_m[s])) * ngroups * kgroups
        loads = _up(rows * _up(before, 4), threads)
        total += 1310 + 1620 * (_up(loads, 8) - 1) + 0.075 * rows * before * 4 * blocks / 132
        total += 5.7 * _up(busy, 4) * tile_m[s] * tile_n + 26 * kgroups  # sums over lanes and over warps
        for stage, q in zip(ring.stages, ring.sources, strict=True):
            if stage == s:
                rounds = ring.sizes[q] / 128 if kgroups == 1 else _up(_up(ring.sizes[q], 128), kgroups)
                memory = busy * rounds * (tile_m[s] * (2 if bf16 else 4) + tile_n * 4)
                each = tile_m[s] * tile_n * 4 + tile_m[s] * (5 if bf16 else 1) + tile_n
                issue = _up(busy, 4) * rounds * each
                critical = q == (s - 1) % depth
                total += (
                    0.29 * memory + 0.91 * issue + 160 * rounds if critical else 0.68 * max(memory, issue)
                )
    return total


def _generic_cost(ring: Ring, batch: int, members: int, device: Device) -> float:
    """Roughly what a step of generic.cu takes: bytes that one processor and the card read, or the products."""
    plan = generic_plan(ring, batch, members, False, device)
    if plan.shared > device.shared_limit:
        return float("inf")
    weights = sum(ring.sizes[s] * ring.sizes[q] for s, q in zip(ring.stages, ring.sources, strict=True))
    blocks = _up(batch, plan.rows) * members
    at_once = min(blocks, device.processors)
    each = max(4 * weights / 55, 4 * weights * at_once / 5000, weights * (plan.rows + 1) / 100)
    return _up(blocks, device.processors) * (each + 1500 * len(ring.sizes))


def _padded(n: int, bf16: bool) -> int:
    """A vector's length in shared memory: rounds of 128, the rest in rounds of 32 (64 in bf16)."""
    chunk = 64 if bf16 else 32
    rest = n % 128
    return n - rest + (128 if rest > 128 - chunk else _up(rest, chunk) * chunk)


def _up(a: int, b: int) -> int:
    return -(-a // b)
