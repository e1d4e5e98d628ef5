"""Shapes of whole_card_tensor_core.cu: teams of blocks on the tensor cores, vectors through L2, weights of any size.

For batches of models that fit no thread-block cluster. A team serves some batch rows of one model; weights that do not
fit its blocks' shared memory are read from L2 at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, ceil_div, listed
from deeprnn.backends.cuda.recurrence.schedule import Schedule

WARPS = 8  # that multiply; one more starts copies
TILE_BYTES = 1088  # of 16 batch rows x 16 units of a vector
MOST_SUMS = 48  # a thread may hold
MOST_EPILOGUES = 4  # of a thread and stage: more take more registers than there are
CHUNK_BYTES = 17408  # of a buffer, about
FEWEST_BUFFERS, MOST_BUFFERS = 3, 8
# batch rows of a team -> warps over tiles of 16 rows, warps over the inner dimension
SPLITS = {16: (1, 8), 32: (2, 4), 64: (4, 2)}


@dataclass(frozen=True)
class WholeCardTensorCorePlan(KernelPlan):
    """A shape of the kernel; `rows` are those of a team, `cluster` is 1."""

    team: int = 1
    """blocks that hold one model together"""
    teams: int = 1
    """how many teams run side by side"""
    passes: int = 1
    """row groups that a team serves one after the other"""
    groups: int = 1
    """groups of 16 units of a stage that a block owns, at most"""
    chunk: int = 1
    """inner tiles of a buffer"""
    buffers: int = FEWEST_BUFFERS
    resident: tuple[bool, ...] = ()
    """which matrices stay in shared memory"""
    words: int = 0
    spilled_words: int = 0

    source = "recurrence/whole_card_tensor_core.cu"
    cooperative = True

    def arch(self, device: Device) -> str:
        """With the instructions of Hopper alone where that is what it is compiled for."""
        return device.arch

    def describe(self) -> str:
        """One line for a person."""
        teams = "" if self.teams == 1 else f"{self.teams} teams of "
        weights = (
            "all weights" if all(self.resident) else "some weights" if any(self.resident) else "no weights"
        )
        return (
            f"{teams}{self.team} blocks multiply on the tensor cores, {self._rows()} a team"
            f"{f' in {self.passes} passes' * (self.passes > 1)}, vectors through L2, {weights} in shared memory, "
            f"{self.shared // 1024} KiB a block"
        )

    @property
    def exchange_words(self) -> int:
        """Of a team: its counter and vectors."""
        return self.words

    @property
    def common_words(self) -> int:
        """Weights that do not stay in shared memory."""
        return self.spilled_words

    def macros(self) -> dict[str, int | str]:
        """The #defines of the kernel."""
        over_rows, over_inner = SPLITS[self.rows]
        return {
            "ROWS": self.rows, "TEAM": self.team, "GROUPS": self.groups, "MWARPS": over_rows, "KWARPS": over_inner,
            "CHUNK": self.chunk, "BUFFERS": self.buffers, "RESIDENT": listed(self.resident),
        }  # fmt: skip


def whole_card_tensor_core_plans(
    schedule: Schedule, batch: int, members: int, device: Device
) -> Iterator[WholeCardTensorCorePlan]:
    """All shapes that fit."""
    if device.capability[0] < 9:
        return
    for rows in SPLITS:
        if rows >= 2 * batch and rows > 16:
            continue
        for groups in (1, 2, 3, 4):
            plan = whole_card_tensor_core_shape(schedule, batch, members, device, rows, groups)
            if plan is not None:
                yield plan


def whole_card_tensor_core_shape(
    schedule: Schedule,
    batch: int,
    members: int,
    device: Device,
    rows: int,
    groups: int,
    limit: int | None = None,
) -> WholeCardTensorCorePlan | None:
    """One shape, sizes as in the kernel. `groups`: of units that a block owns of the widest stage."""
    stages, tiles, (over_rows, over_inner) = schedule.stages, rows // 16, SPLITS[rows]
    if not all(
        any(m.stage == s and schedule.is_critical(m) for m in schedule.matrices) for s in range(len(stages))
    ):
        return None  # a stage that waits for no vector could overtake the others
    of_stage = [ceil_div(stage.size, 16) for stage in stages]
    if groups > max(of_stage):
        return None
    team = max(ceil_div(n, groups) for n in of_stage)
    if team > device.sm_count:
        return None
    of_block = [ceil_div(n, team) for n in of_stage]
    columns = [2 * stage.gates * n for stage, n in zip(stages, of_block, strict=True)]
    if max(columns) * 4 * (tiles // over_rows) > MOST_SUMS or tiles * max(of_block) > MOST_EPILOGUES:
        return None
    inner = [n * stage.sent for n, stage in zip(of_stage, stages, strict=True)]
    fixed = 256 + over_inner * tiles * max(columns) * 512
    fixed += sum(n * stage.gates * 64 for n, stage in zip(of_block, stages, strict=True))
    room = (device.shared_limit if limit is None else limit) - ceil_div(fixed, 128) * 128
    sizes = [inner[m.source] * columns[m.stage] * 512 for m in schedule.matrices]
    chunk, buffer = _buffer(tiles, 0, over_inner)
    resident = _fitting(sizes, room - FEWEST_BUFFERS * buffer)
    if not all(resident):  # buffers hold weights too
        chunk, buffer = _buffer(tiles, max(columns), over_inner)
        resident = _fitting(sizes, room - FEWEST_BUFFERS * buffer)
        copied = [m.stage for m, stays in zip(schedule.matrices, resident, strict=True) if not stays]
        buffer = chunk * (tiles * TILE_BYTES + max((columns[s] for s in copied), default=0) * 512)
    free = room - sum(n for n, stays in zip(sizes, resident, strict=True) if stays)
    if free < FEWEST_BUFFERS * buffer:
        return None
    if members > 1 and not all(resident):
        return None  # weights outside of shared memory have one place
    buffers = min(MOST_BUFFERS, free // buffer)
    shared = ceil_div(fixed + buffers * buffer, 128) * 128 + sum(
        n for n, stays in zip(sizes, resident, strict=True) if stays
    )
    items = ceil_div(batch, rows) * members
    teams = min(device.sm_count // team, items)
    passes = ceil_div(items, teams)
    cost = passes * _cycles(schedule, rows, teams * team, of_block, columns, inner, sizes, resident)
    vectors = 128 + sum(2 * n * tiles * TILE_BYTES for n in inner)
    spilled = sum(n * team for n, stays in zip(sizes, resident, strict=True) if not stays)
    return WholeCardTensorCorePlan(
        cluster=1, threads=32 * (WARPS + 1), rows=rows, shared=shared, bf16=False, cost=cost, team=team, teams=teams,
        passes=passes, groups=max(of_block), chunk=chunk, buffers=buffers, resident=tuple(resident), words=vectors // 4,
        spilled_words=spilled // 4,
    )  # fmt: skip


def _buffer(tiles: int, columns: int, over_inner: int) -> tuple[int, int]:
    """Inner tiles and bytes of a buffer with vectors and, of so many columns, weights."""
    each = over_inner * (tiles * TILE_BYTES + columns * 512)
    times = max(1, CHUNK_BYTES // each)
    return times * over_inner, times * each


def _fitting(sizes: list[int], room: int) -> list[bool]:
    """Which matrices fit, the first ones first."""
    fits = []
    for size in sizes:
        fits.append(size <= room)
        room -= size if fits[-1] else 0
    return fits


def _cycles(
    schedule: Schedule, rows: int, blocks: int, of_block: list[int], columns: list[int], inner: list[int],
    sizes: list[int], resident: list[bool],
) -> float:  # fmt: skip
    """Cycles per step; least squares over results/bench/h200-whole-card-tensor-core.jsonl, within 24 % of each shape.

    A stage is its latency, its epilogues with the sums they gather, its products and what is copied for them.
    """
    tiles, (over_rows, over_inner), total = rows // 16, SPLITS[rows], 0.0
    for s, stage in enumerate(schedule.stages):
        products = copied = 0.0
        for j, matrix in enumerate(schedule.matrices):
            if matrix.stage == s:
                turns = ceil_div(inner[matrix.source], over_inner) * (tiles // over_rows)
                products += turns * (325 + 70.3 * columns[s])
                copied += inner[matrix.source] * tiles * TILE_BYTES + (0 if resident[j] else sizes[j])
        epilogues = tiles * of_block[s] * (99 + 55.8 * (stage.gates * over_inner + 4 * stage.sent))
        total += 2206 + epilogues + products + copied * (0.00315 + 0.0000169 * blocks)
    return total
