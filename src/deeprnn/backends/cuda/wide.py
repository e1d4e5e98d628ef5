"""Shapes of `wide.cu`: one model over a team of blocks, up to the whole card, the state exchanged through L2.

For models that fit no thread-block cluster and for GPUs without clusters. Teams serve row groups and members
side by side where the card has room for several; what is left over follows in further passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from deeprnn.backends.cuda.planning import Device, Plan

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

    def extra_macros(self) -> dict[str, int]:
        """The #defines of wide.cu beyond the common ones."""
        return {
            "TEAM": self.team, "MGROUPS": self.mgroups, "NGROUPS": self.ngroups, "KGROUPS": self.kgroups,
            "BF16": int(self.bf16),
        }  # fmt: skip


def wide_plan(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> WidePlan | None:
    """The cheapest shape of the wide kernel; None where not even the whole card holds the weights."""
    return min(wide_plans(ring, batch, members, bf16, device), key=lambda plan: plan.cost, default=None)


def wide_plans(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> Iterator[WidePlan]:
    """All shapes that fit: teams, rows of a pass, and how the warps of a block divide the work."""
    for teams in range(1, device.processors + 1):
        team = team_of(ring, device.processors // teams)
        if wide_shape(ring, batch, members, bf16, device, team, teams, 1, 256, (1, 1, 8)) is None:
            break  # smaller teams have still less room
        for rows in rows_of(batch, members, teams):
            for threads, groups in GROUPS.items():
                for warps in groups:
                    plan = wide_shape(ring, batch, members, bf16, device, team, teams, rows, threads, warps)
                    if plan is not None:
                        yield plan
        if teams >= members * batch:
            break


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
    shared = sum(4 * tile_n * ngroups * k for k in padded) + 4 * kgroups * rows * max(mine) + 8 * rows
    shared = _up(shared, 128) * 128
    for s, q in zip(ring.stages, ring.sources, strict=True):
        shared += tile_m[s] * mgroups * padded[q] * (2 if bf16 else 4)
    if shared > device.shared_limit:
        return None
    items = _up(batch, rows) * members
    used = min(teams, items)
    passes = _up(items, used)
    cost = passes * _cost(ring, bf16, team * used, mine, tile_m, tile_n, rows, threads, warps)
    return WidePlan(
        "wide", 1, threads, rows, shared=shared, bf16=bf16, cost=cost, mgroups=mgroups, kgroups=kgroups,
        team=team, teams=used, passes=passes, ngroups=ngroups, words=sum(8 * rows * _up(n, 4) for n in ring.sizes),
    )  # fmt: skip


EXCHANGE = 1500  # cycles from a sum to the vector in every block: two trips to L2, barriers
CARD_BYTES, BLOCK_BYTES = 2500, 40  # bytes a cycle that L2 gives to all blocks, and to one


def _cost(
    ring: Ring, bf16: bool, blocks: int, mine: list[int], tile_m: list[int], tile_n: int, rows: int,
    threads: int, warps: tuple[int, int, int],
) -> float:  # fmt: skip
    """Estimated cycles per step: each stage's exchange, L2 traffic, products and sums."""
    mgroups, ngroups, kgroups = warps
    depth, total = len(ring.sizes), 0.0
    for s in range(depth):
        busy = min(mgroups, _up(mine[s], tile_m[s])) * ngroups * kgroups
        work = {True: 0.0, False: 0.0}
        for stage, q in zip(ring.stages, ring.sources, strict=True):
            if stage == s:
                rounds = _up(_up(ring.sizes[q], 128), kgroups)
                memory = busy * rounds * (tile_m[s] * (2 if bf16 else 4) + tile_n * 4)
                issue = (
                    _up(busy, 4) * rounds * (tile_m[s] * tile_n * 4 + tile_m[s] * (5 if bf16 else 1) + tile_n)
                )
                work[q == (s - 1) % depth] += max(memory, issue) + 0.4 * min(memory, issue) + 20 * rounds
        received = rows * ring.sizes[(s - 1) % depth] * 4
        travel = max(received / BLOCK_BYTES, received * blocks / CARD_BYTES)
        sums = _up(busy, 4) * 4 * tile_m[s] * tile_n + 30 * kgroups + 60 * _up(mine[s] * rows, threads)
        total += EXCHANGE + travel + work[True] + sums + max(0.0, work[False] - 0.5 * EXCHANGE)
    return total


def _padded(n: int, bf16: bool) -> int:
    """A vector's length in shared memory: rounds of 128, the rest in rounds of 32 (64 in bf16)."""
    chunk = 64 if bf16 else 32
    rest = n % 128
    return n - rest + (128 if rest > 128 - chunk else _up(rest, chunk) * chunk)


def _up(a: int, b: int) -> int:
    return -(-a // b)
