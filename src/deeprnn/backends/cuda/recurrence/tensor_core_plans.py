"""Shapes of tensor_core.cu: one thread-block cluster holds a model, products on the tensor cores; for batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.cluster_plans import REGISTERS
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, ceil_div, listed, waves
from deeprnn.backends.cuda.recurrence.schedule import Schedule, inline_stages
from deeprnn.cells.bounds import within_first_states, within_one
from deeprnn.cells.deep_transition import DeepTransition, recognise
from deeprnn.cells.description import Output
from deeprnn.cells.functions import ANY, FUNCTIONS

MOST_SCANS = 40  # matrices and stages that max_abs_scan.cu goes through in one launch
SPARE = (32, 24)  # registers of a multiplying thread that hold no weights or sums, without and with scalers
SCALERS, SCALER_REGISTERS = 4, 32  # the warps that compute scales where they change
SCALED_COST = 1.12  # of a kernel whose scales change, beside one whose scales do not
NARROW_COST = 1.1  # of such a kernel, or one in bf16, with few warps side by side over the inner dimension


class Sending(NamedTuple):
    """How finished tiles reach the other blocks, and how many warps finish them."""

    through_l2: bool
    finishers: int


# Eight finishing warps leave the multiplying ones fewer registers for the weights: worth it where tiles take long to
# finish. Stores by every lane are slower where scales travel too, and where several groups of rows take turns.
ONE_ROW_GROUP = (Sending(True, 4), Sending(False, 4))
SEVERAL_ROW_GROUPS = (Sending(True, 4),)
ONE_ROW_GROUP_OF_TILES = (Sending(True, 4),)
SEVERAL_ROW_GROUPS_OF_TILES = (Sending(True, 4), Sending(True, 8))


class Ranges(NamedTuple):
    """What is known beforehand of the numbers that travel, stage by stage."""

    bounded: tuple[bool, ...]
    """whether they stay within ±1"""
    slopes: tuple[float, ...]
    """the largest slope"""
    by_first_state: bool = False
    """whether they stay within ±1 only where the first state does, and else within its largest number"""


@lru_cache(maxsize=512)
def known_ranges(schedule: Schedule) -> Ranges | None:
    """For stages whose batch rows two fp16 parts with one scale can hold; None for others.

    These are units φ(a) with slopes of at most 1 in either direction, and forward all cells whose states cannot grow.
    """
    plus = recognise(schedule.cell)
    if plus is not None and plus.is_plain:
        return _ranges_of_units(plus)
    # Several vectors of one step in one sum would need a scale in common.
    several = any(not m.delayed and not c for m, c in zip(schedule.matrices, schedule.critical, strict=True))
    if schedule.backward or several or inline_stages(schedule.cell).inlined:
        return None
    cell, depth = schedule.cell, len(schedule.stages)
    travelling = tuple(
        cell.new_states[v.index] if v.kind == "state" else Output(v.stage, v.index)
        for v in (product.vector for _, _, product in cell.products)
    )
    steady = all(within_one(cell, output) for output in travelling)
    if not steady and not within_first_states(cell, travelling):
        return None
    return Ranges((True,) * depth, (1.0,) * depth, not steady)


def _ranges_of_units(plus: DeepTransition) -> Ranges | None:
    bounded, slopes = [], []
    for name in plus.units:
        row = FUNCTIONS[name]
        inlining, high = row.bounds(ANY)
        within = inlining >= -1.0 and high <= 1.0
        if row.steepest > 1.0 or not (within or float(row.torch(torch.zeros(()))) == 0.0):
            return None
        bounded.append(within)
        slopes.append(row.steepest)
    return Ranges(tuple(bounded), tuple(slopes))


@dataclass(frozen=True)
class TensorCorePlan(KernelPlan):
    """A shape of the kernel; `rows` are those of all row groups."""

    mgroups: int = 1
    """warps side by side over the units"""
    kgroups: int = 1
    """warps that share the inner dimension"""
    row_groups: int = 1
    """parts of the rows that take turns, so that one computes while another travels"""
    through_l2: bool = True
    """whether finished tiles go to L2 and from there to all blocks at once"""
    finishers: int = 4
    """warps that finish tiles"""
    finisher_registers: int = 56
    in_registers: tuple[int, ...] = ()
    """for each matrix: rounds over the inner dimension whose weights lie in registers"""
    words: int = 0
    """of 4 bytes in global memory that a cluster exchanges through"""
    ranges: Ranges | None = None
    """None: numbers may be of any size, and every 16 of a batch row have a scale of their own"""
    depth: int = 1
    """stages"""
    backward: bool = False

    source = "recurrence/tensor_core.cu"
    keeps_locals_in_memory = True

    @property
    def exchange_words(self) -> int:
        """Of a cluster."""
        return self.words

    def arch(self, device: Device) -> str:
        """That warps lend each other registers is a feature of one architecture."""
        return f"{device.arch}a"

    def macros(self) -> dict[str, int | str]:
        """The #defines of tensor_core.cu."""
        rows = self.rows // self.row_groups
        ranges = self.ranges or Ranges((False,) * self.depth, (1.0,) * self.depth)
        order = slice(None, None, -1) if self.backward else slice(None)
        return {
            "CLUSTER": self.cluster, "MGROUPS": self.mgroups, "KGROUPS": self.kgroups, "ROWS": rows,
            "ROW_GROUPS": self.row_groups, "NTILES": ceil_div(rows, 8), "FINISHERS": self.finishers,
            "FINISHER_REGS": self.finisher_registers, "THROUGH_L2": int(self.through_l2),
            "TILE_SCALES": int(self.ranges is None), "BY_FIRST_STATE": int(ranges.by_first_state),
            "BOUNDED": listed(ranges.bounded[order]),
            "SLOPES": ",".join(f"{x:.6g}f" if "." in f"{x:.6g}" else f"{x:.6g}.0f" for x in ranges.slopes[order]),
            "BF16": int(self.bf16), "MAT_REGS": listed(self.in_registers),
        }  # fmt: skip

    def describe(self) -> str:
        """One line for a person."""
        how = "bf16" if self.bf16 else "three fp16 products"
        return (
            f"cluster of {self.cluster} x {self.threads} threads, {self._rows()} each on the tensor cores in {how}, "
            f"{self.shared // 1024} KiB shared memory a block"
        )


def tensor_core_plans(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device
) -> Iterator[TensorCorePlan]:
    """All shapes that fit the chip."""
    tiles = [ceil_div(n, 16) for n in schedule.sizes]
    by_rows = known_ranges(schedule) is not None
    ways = (
        (ONE_ROW_GROUP, SEVERAL_ROW_GROUPS)
        if by_rows
        else (ONE_ROW_GROUP_OF_TILES, SEVERAL_ROW_GROUPS_OF_TILES)
    )
    # Of cluster sizes that leave the busiest block the same number of tiles only the smallest is worth trying.
    dealt = {tuple(ceil_div(n, c) for n in tiles): c for c in device.clusters if c <= min(tiles)}
    for cluster, mgroups, kgroups in product(dealt.values(), (1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 8)):
        if mgroups > ceil_div(max(tiles), cluster) or mgroups * kgroups not in (
            4,
            5,
            6,
            8,
            9,
            10,
            12,
            15,
            16,
        ):
            continue
        groups = max(1, device.resident(cluster) // members)
        even = {ceil_div(batch, groups * n) for n in (1, 2, 3, 4)}  # no wave nearly empty
        for rows in sorted(even | {min(batch, 8), min(batch, 16), min(batch, 32)}):
            for row_groups in sorted({1, *range(ceil_div(rows, 16), ceil_div(rows, 5) + 1)}):
                each = ceil_div(rows, row_groups)
                if each > 48 or (row_groups > 1 and each <= 4):
                    continue
                shape = (cluster, mgroups, kgroups, each * row_groups, row_groups)
                for sending in ways[row_groups > 1]:
                    plan = tensor_core_plan(schedule, batch, members, bf16, device, *shape, *sending)
                    if plan is not None:
                        yield plan


def tensor_core_plan(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device,
    cluster: int, mgroups: int, kgroups: int, rows: int, row_groups: int = 1, through_l2: bool = True,
    finishers: int = 4,
) -> TensorCorePlan | None:  # fmt: skip
    """One shape, sizes as in the kernel. `rows` are those of all row groups."""
    if any(m.delayed and schedule.backward and m.stage > 0 for m in schedule.matrices):
        return None  # states that are sent by an earlier stage than the last
    stages, matrices, depth = schedule.stages, schedule.matrices, len(schedule.stages)
    ranges = known_ranges(schedule)
    ntiles, warps = ceil_div(rows // row_groups, 8), mgroups * kgroups
    changing = ranges is not None and (schedule.backward or not all(ranges.bounded))
    scalers = SCALERS if changing else 0
    threads = 32 * (warps + finishers + scalers)
    if ntiles * row_groups > 16 or threads > 1024:  # a lane's reset marks fill a word
        return None
    if depth + sum(len(m.pieces) for m in matrices) > MOST_SCANS:
        return None
    tiles = [ceil_div(n, 16) for n in schedule.sizes]
    vector_tiles = [n * stage.sent for n, stage in zip(tiles, stages, strict=True)]
    if min(tiles) < cluster:
        return None
    sums = [
        ceil_div(ceil_div(n, cluster), mgroups) * stage.gates for n, stage in zip(tiles, stages, strict=True)
    ]
    # Registers are lent from finishers to multiplying warps, never the other way.
    per_finisher = min(_finisher_registers(schedule, ranges, finishers, bool(scalers)), _equal_share(threads))
    resident, rounds = _in_registers(
        schedule, ranges, bf16, sums, vector_tiles, ntiles, warps, kgroups, finishers, per_finisher, scalers
    )
    words_of_weight = 1 if bf16 else 2
    shared = _tables(schedule, ranges, row_groups, ntiles, kgroups)
    for s, n in enumerate(vector_tiles):
        again = any(m.source == s and not c for m, c in zip(matrices, schedule.critical, strict=True))
        shared += row_groups * (2 if depth == 1 or again else 1) * n * ntiles * tile_bytes(ranges)
    for j, n in enumerate(rounds):
        if resident[j] < n:  # in the last round perhaps not every warp has a tile
            inner = (n - 1 - resident[j]) * kgroups + vector_tiles[matrices[j].source] - (n - 1) * kgroups
            shared += inner * sums[matrices[j].stage] * mgroups * words_of_weight * 512
    shared += row_groups * max(sums) * warps * ntiles * 512  # sums
    if through_l2:
        own_tiles = [_tiles_of_a_finisher(n, cluster, ntiles, finishers, max(tiles)) for n in tiles]
        leaving = max(n * stage.sent for n, stage in zip(own_tiles, stages, strict=True))
        shared += finishers * leaving * tile_bytes(ranges)  # on their way
    if shared > device.shared_limit:
        return None
    cost = _cycles(
        schedule,
        ranges,
        cluster,
        mgroups,
        kgroups,
        finishers,
        rows // row_groups,
        row_groups,
        through_l2,
        resident,
    )
    cost *= SCALED_COST if scalers else 1.0
    if kgroups < 4 and (bf16 or scalers or ranges is None):
        cost *= NARROW_COST
    # Weights in shared memory are in the way of everything else there.
    cost *= 1 + (0.25 if row_groups > 1 else 0.1) * (1 - sum(resident) / sum(rounds))
    cost *= waves(batch, members, rows, cluster, device)
    words = row_groups * sum(vector_tiles) * ntiles * tile_bytes(ranges) // 4 if through_l2 else 0
    return TensorCorePlan(
        cluster=cluster, threads=threads, rows=rows, shared=shared, bf16=bf16, cost=cost, mgroups=mgroups,
        kgroups=kgroups, row_groups=row_groups, through_l2=through_l2, finishers=finishers,
        finisher_registers=per_finisher, in_registers=tuple(resident), words=words, ranges=ranges, depth=depth,
        backward=schedule.backward,
    )  # fmt: skip


def tile_bytes(ranges: Ranges | None) -> int:
    """Of 16 units of 8 batch rows: two fp16 parts, and where no range is known a scale for each row."""
    return 512 + (32 if ranges is None else 0)


def _tiles_of_a_finisher(tiles: int, cluster: int, ntiles: int, finishers: int, most_tiles: int) -> int:
    """As `per_warp` in tensor_core_layout.cuh."""
    most_work = ceil_div(most_tiles, cluster) * ntiles
    at_once = finishers if most_work > finishers else most_work
    return ceil_div(ceil_div(tiles, cluster) * ntiles, at_once)


def _equal_share(threads: int) -> int:
    """Registers of a thread where all have as many."""
    return 65536 // (ceil_div(threads, 128) * 128) // 8 * 8


def _finisher_registers(schedule: Schedule, ranges: Ranges | None, finishers: int, scaled: bool) -> int:
    """What a thread of the finishing warps needs; cells of one sum and one unit a stage need little."""
    most = max(stage.gates + stage.sent for stage in schedule.stages)
    if most == 2 and ranges is not None:
        return 48 if finishers > 4 or scaled else 56
    return min(64 + 16 * most, 144) // 8 * 8


def _multiplier_registers(warps: int, finishers: int, per_finisher: int, scalers: int) -> int:
    """What a multiplying thread may hold; whole warpgroups are lent what the others do not need."""
    threads = 32 * (warps + finishers + scalers)
    most = _equal_share(threads)
    if threads > 256 and warps % 4 == 0:
        pool = most * (threads // 128) - per_finisher * (finishers // 4) - SCALER_REGISTERS * (scalers // 4)
        most = min(pool // (warps // 4) // 8 * 8, 248)
    return min(most, REGISTERS[256])


def _in_registers(
    schedule: Schedule, ranges: Ranges | None, bf16: bool, sums: Sequence[int], vector_tiles: Sequence[int],
    ntiles: int, warps: int, kgroups: int, finishers: int, per_finisher: int, scalers: int,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """For each matrix the rounds whose weights registers can hold, and all its rounds."""
    matrices = schedule.matrices
    rounds = [ceil_div(vector_tiles[m.source], kgroups) for m in matrices]
    # Sums of each kind of product, or of the tiles under way, beside those of all.
    separate = ranges is not None and ntiles <= 2 and max(stage.gates for stage in schedule.stages) == 1
    held = max(sums) * ntiles * (12 if separate else 4)
    spare = SPARE[bool(scalers)] if ranges is not None else 56
    budget = _multiplier_registers(warps, finishers, per_finisher, scalers) - spare - max(held, 24)
    words = (1 if bf16 else 2) * 4
    resident = [0] * len(rounds)
    whole = [
        vector_tiles[m.source] // kgroups for m in matrices
    ]  # rounds in which every warp has a tile: those first
    for most in (whole, rounds):
        for j in sorted(range(len(rounds)), key=lambda j: not schedule.critical[j]):
            each = sums[matrices[j].stage] * words
            more = max(0, min(most[j] - resident[j], budget // each))
            resident[j] += more
            budget -= more * each
    return resident, rounds


def _tables(schedule: Schedule, ranges: Ranges | None, row_groups: int, ntiles: int, kgroups: int) -> int:
    """Bytes of barriers and of tables of scales."""
    depth = len(schedule.stages)
    shared = ceil_div((16 * depth + 8) * row_groups, 128) * 128
    shared += ceil_div(depth + len(schedule.matrices), 4) * 16
    if ranges is not None:
        shared += row_groups * ntiles * (8 * depth * 10 * 4 + kgroups * 128)
    return ceil_div(shared, 128) * 128


def _cycles(
    schedule: Schedule, ranges: Ranges | None, cluster: int, mgroups: int, kgroups: int, finishers: int, rows: int,
    row_groups: int, through_l2: bool, resident: Sequence[int],
) -> float:  # fmt: skip
    """Cycles per step, before the factors of `tensor_core_plan`; it only ranks shapes.

    Least squares over measurements on an H200: of cells of one sum and one unit a stage whose scales are known
    (results/bench/h200-sweep.jsonl) 72 of 75 shapes are within 12 %, all within 18; of kernels that scale by tiles
    (h200-gates-and-deep-cells.jsonl) the one it ranks first takes at most 13 % longer than the best.

    One group of rows is a chain: product, sums, epilogue, and the way to the other blocks, which hides products with
    vectors that are there. Several groups overlap until the multiplying warps or the finishers are always busy; which
    of the three it is shows gradually, hence the fourth powers.
    """
    ntiles, chain, multiplying, finishing = ceil_div(rows, 8), 0.0, 0.0, 0.0
    dealt = [
        ceil_div(ceil_div(stage.size, 16), cluster) for stage in schedule.stages
    ]  # unit tiles of the busiest block
    at_once = min(finishers, max(dealt) * ntiles)
    used = at_once * min(row_groups, finishers // at_once)  # finishers that have something to do
    for s, (stage, most) in enumerate(zip(schedule.stages, dealt, strict=True)):
        sums, work = ceil_div(most, mgroups) * mgroups * stage.gates, {True: 0.0, False: 0.0}
        for j, matrix in enumerate(schedule.matrices):
            if matrix.stage == s:  # 8.9 cycles an instruction; weights in shared memory, 128 bytes a cycle
                source = schedule.stages[matrix.source]
                inner = ceil_div(source.size, 16) * source.sent
                reloaded = max(0, inner - resident[j] * kgroups)
                work[schedule.critical[j]] += sums * (8.94 * inner * ntiles * 3 / 4 + 4.75 * reloaded * 2)
        received = ceil_div(stage.size, 16) * stage.sent * rows * 64
        away = 304 + 0.031 * received if through_l2 else 0.0702 * received
        away += 44.4 * kgroups + 9.1 * (finishers - 4)
        link = 432 + (0 if schedule.backward else 90) + work[True] + away + max(0.0, work[False] - away)
        more = ceil_div(most * ntiles, finishers) - 1  # tiles after a finisher's first
        extra = stage.gates + stage.sent - 2
        epilogue = 120 * extra if ranges is not None else 546 + 297 * extra
        chain += max(
            link + (400 if ranges is not None else 4835) * more + epilogue, 1325
        )  # 1325: latency alone
        multiplying += (
            244 + (40 if schedule.backward else 0) + 23 * (finishers - 4) + work[True] + work[False]
        )
        task: float = (1203 if through_l2 else 2103) + 2 * epilogue
        if ranges is None:
            task = (3130 + 382 * extra) * (1.3 if finishers > 4 else 1.0)
        finishing += most * ntiles / used * task
    if row_groups == 1:
        return chain
    return (chain**4 + (row_groups * multiplying) ** 4 + (row_groups * finishing) ** 4) ** 0.25
