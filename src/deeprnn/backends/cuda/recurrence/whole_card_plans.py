"""Shapes of whole_card.cu: one model over a team of blocks, up to the whole card, vectors exchanged through L2.

For models that fit no thread-block cluster and for GPUs without clusters. Teams serve row groups and members
side by side where the card has room for several; what is left over follows in further passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, ceil_div, listed
from deeprnn.backends.cuda.recurrence.schedule import Schedule

MOST_ROWS = 48
# Sums that a warp may hold, and sums with a round's weights: what 255 and 128 registers a thread leave.
TILES = {256: (64, 120), 512: (32, 60)}
POWERS = (1, 2, 4, 8, 16)
GROUPS = {
    threads: [(m, n, k) for m, n, k in product(POWERS, POWERS, POWERS) if m * n * k == threads // 32]
    for threads in TILES
}


@dataclass(frozen=True)
class WholeCardPlan(KernelPlan):
    """A shape of the kernel; `rows` are those of a pass, `cluster` is 1."""

    team: int = 1
    """blocks that hold one model together"""
    teams: int = 1
    """how many teams the card holds side by side"""
    passes: int = 1
    """row groups that a team serves one after the other"""
    mgroups: int = 1
    """warps side by side over the units"""
    ngroups: int = 1
    """warps side by side over the batch rows"""
    kgroups: int = 1
    """warps that share the inner dimension"""
    words: int = 0
    """32-bit words that a team exchanges through"""
    places: tuple[int, ...] = ()
    """where each stage's vector lies in shared memory, per row"""
    strides: tuple[int, ...] = ()
    """and how far its rows are apart"""

    source = "recurrence/whole_card.cu"
    cooperative = True

    def describe(self) -> str:
        """One line for a person."""
        teams = "" if self.teams == 1 else f"{self.teams} teams of "
        return (
            f"{teams}{self.team} blocks x {self.threads} threads hold one model{' each' * (self.teams > 1)}, "
            f"{self._rows()} at a time{f' in {self.passes} passes' * (self.passes > 1)}, vectors through L2, "
            f"{self._weights()}"
        )

    @property
    def exchange_words(self) -> int:
        """Of a team."""
        return self.words

    def macros(self) -> dict[str, int | str]:
        """The #defines of whole_card.cu."""
        return {
            "THREADS": self.threads, "ROWS": self.rows, "TEAM": self.team, "MGROUPS": self.mgroups,
            "NGROUPS": self.ngroups, "KGROUPS": self.kgroups, "BF16": int(self.bf16),
            "PLACES": listed(self.places), "STRIDES": listed(self.strides),
        }  # fmt: skip


def whole_card_plan(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device
) -> WholeCardPlan | None:
    """The cheapest shape; None where the card cannot hold the weights."""
    return min(
        whole_card_plans(schedule, batch, members, bf16, device), key=lambda plan: plan.cost, default=None
    )


def whole_card_plans(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device
) -> Iterator[WholeCardPlan]:
    """All shapes that fit: teams, rows of a pass, and how the warps of a block divide the work."""
    if any(m.delayed != (m.source >= m.stage) for m in schedule.matrices):
        return  # a vector of the step before is wanted when its successor is there: it has one place
    blocks = [(threads, warps) for threads, groups in GROUPS.items() for warps in groups]
    for teams in range(1, min(device.sm_count, members * batch) + 1):
        team = team_size(schedule, device.sm_count // teams)
        common = schedule, batch, members, bf16, device, team, teams
        if not any(whole_card_shape(*common, 1, *block) for block in blocks):
            break  # smaller teams have still less room
        for rows, block in product(rows_of_a_pass(batch, members, teams), blocks):
            plan = whole_card_shape(*common, rows, *block)
            if plan is not None:
                yield plan


def team_size(schedule: Schedule, blocks: int) -> int:
    """How many of the blocks get anything when every block takes equally many units: 115 of 132 at 800."""
    return max(ceil_div(n, ceil_div(n, blocks)) for n in schedule.sizes)


def rows_of_a_pass(batch: int, members: int, teams: int) -> list[int]:
    """Rows of a pass worth trying: those that fill one, two, ... passes of all teams evenly."""
    rows = {ceil_div(batch, max(1, teams * n // members)) for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)}
    rows |= {min(batch, n) for n in (1, 2, 4, 8, 12, 16, 24, 32, MOST_ROWS)}
    return sorted(n for n in rows if n <= MOST_ROWS)


def whole_card_shape(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device,
    team: int, teams: int, rows: int, threads: int, warps: tuple[int, int, int],
) -> WholeCardPlan | None:  # fmt: skip
    """One shape, sizes as in the kernel; `warps` = those over units, over batch rows, over the inner dimension."""
    if team > team_size(schedule, team):
        return None  # a block without units sends nothing, so that nobody would wait until it has read
    mgroups, ngroups, kgroups = warps
    stages = schedule.stages
    mine = [ceil_div(n, team) for n in schedule.sizes]
    tile_m = [
        ceil_div(m, mgroups) * stage.gates for m, stage in zip(mine, stages, strict=True)
    ]  # sums of a warp
    tile_n = ceil_div(rows, ngroups)
    most, most_with_weights = TILES[threads]
    widest = max(tile_m)
    if widest * tile_n > most or widest * tile_n + 4 * widest > most_with_weights:
        return None
    if mgroups > max(mine) or ngroups > rows:
        return None
    padded = [_padded(n, bf16) for n in schedule.lengths]
    weights = sum(
        tile_m[m.stage] * mgroups * padded[m.source] * (2 if bf16 else 4) for m in schedule.matrices
    )
    block_sums = max(m * stage.gates for m, stage in zip(mine, stages, strict=True))
    for homes in (
        tuple(range(len(mine))),
        shared_places(schedule),
    ):  # places are shared only where room is short
        strides = [max(k for k, home in zip(padded, homes, strict=True) if home == h) for h in homes]
        first = {h: strides[homes.index(h)] for h in sorted(set(homes))}
        starts = dict(zip(first, accumulate(first.values(), initial=0), strict=False))
        vectors = 4 * tile_n * ngroups * sum(first.values())
        shared = ceil_div(vectors + 4 * kgroups * rows * block_sums + 8 * rows, 128) * 128 + weights
        if shared <= device.shared_limit:
            break
    else:
        return None
    items = ceil_div(batch, rows) * members
    used = min(teams, items)
    passes = ceil_div(items, used)
    cost = passes * _cycles(schedule, bf16, team * used, mine, tile_m, tile_n, rows, threads, warps)
    words = sum(8 * rows * ceil_div(n, 4) for n in schedule.lengths)
    return WholeCardPlan(
        cluster=1, threads=threads, rows=rows, shared=shared, bf16=bf16, cost=cost, team=team, teams=used,
        passes=passes, mgroups=mgroups, ngroups=ngroups, kgroups=kgroups, words=words,
        places=tuple(starts[h] for h in homes), strides=tuple(strides),
    )  # fmt: skip


@lru_cache(maxsize=256)
def shared_places(schedule: Schedule) -> tuple[int, ...]:
    """A place for each stage's vector, shared where one is not needed any more when the other arrives.

    Vector q arrives at the start of stage q + 1 and serves it; it may be read once more, just before the start of a
    later stage. A vector that arrives at that very moment may take its place.
    """
    depth = len(schedule.stages)

    def needed(q: int) -> int:  # stages that pass until the last products with q
        return max((m.stage - q - 1) % depth for m in schedule.matrices if m.source == q)

    def conflict(p: int, q: int) -> bool:
        return (p - q) % depth < needed(q) or (q - p) % depth < needed(p)

    homes: list[int] = []
    for q in range(depth):
        taken = {homes[p] for p in range(q) if conflict(p, q)}
        homes.append(next(h for h in range(depth) if h not in taken))
    return tuple(homes)


def _cycles(
    schedule: Schedule, bf16: bool, blocks: int, mine: list[int], tile_m: list[int], tile_n: int, rows: int,
    threads: int, warps: tuple[int, int, int],
) -> float:  # fmt: skip
    """Cycles per step; least squares over results/bench/h200-wide.jsonl, within 22 % of each of its shapes.

    An exchange costs 1,310 cycles, and more than as much again for every further eight loads of a thread.
    """
    mgroups, ngroups, kgroups = warps
    depth, total = len(schedule.stages), 0.0
    for s, stage in enumerate(schedule.stages):
        before = schedule.lengths[(s - 1) % depth]
        busy = min(mgroups, ceil_div(mine[s] * stage.gates, tile_m[s])) * ngroups * kgroups
        loads = ceil_div(rows * ceil_div(before, 4), threads)
        total += 1310 + 1620 * (ceil_div(loads, 8) - 1) + 0.075 * rows * before * 4 * blocks / 132
        total += 5.7 * ceil_div(busy, 4) * tile_m[s] * tile_n + 26 * kgroups  # sums over lanes and over warps
        for matrix in schedule.matrices:
            if matrix.stage == s:
                length = schedule.lengths[matrix.source]
                rounds = length / 128 if kgroups == 1 else ceil_div(ceil_div(length, 128), kgroups)
                memory = busy * rounds * (tile_m[s] * (2 if bf16 else 4) + tile_n * 4)
                each = tile_m[s] * tile_n * 4 + tile_m[s] * (5 if bf16 else 1) + tile_n
                issue = ceil_div(busy, 4) * rounds * each
                critical = 0.29 * memory + 0.91 * issue + 160 * rounds
                total += critical if schedule.is_critical(matrix) else 0.68 * max(memory, issue)
    return total


def _padded(n: int, bf16: bool) -> int:
    """A vector's length in shared memory: rounds of 128, the rest in rounds of 32 (64 in bf16)."""
    chunk = 64 if bf16 else 32
    rest = n % 128
    return n - rest + (128 if rest > 128 - chunk else ceil_div(rest, chunk) * chunk)
