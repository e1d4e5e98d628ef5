"""Shapes of cluster.cu: one thread-block cluster holds a model, fp32 products by FFMA; for small batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from deeprnn.backends.cuda.device import Device
from deeprnn.backends.cuda.recurrence.plans import KernelPlan, ceil_div, listed, waves
from deeprnn.backends.cuda.recurrence.schedule import Schedule

REGISTERS = {128: 255, 256: 255, 384: 168, 512: 128}  # what a thread may hold when the block has the SM alone
EXCHANGE = ((2, 450), (4, 520), (8, 560), (12, 600), (16, 760))  # cycles to pass a vector round a cluster


@dataclass(frozen=True)
class ClusterPlan(KernelPlan):
    """A shape of the cluster kernel."""

    klanes: int = 1
    """lanes that share the inner dimension of a sum"""
    vec: int = 1
    """inner elements that a lane takes at once"""
    in_registers: tuple[int, ...] = ()
    """for each matrix: rounds of the lanes whose weights lie in registers"""

    source = "recurrence/cluster.cu"

    def macros(self) -> dict[str, int | str]:
        """The #defines of cluster.cu."""
        return {
            "CLUSTER": self.cluster, "THREADS": self.threads, "ROWS": self.rows, "KLANES": self.klanes,
            "VEC": self.vec, "BF16": int(self.bf16), "MAT_REGS": listed(self.in_registers),
        }  # fmt: skip

    def describe(self) -> str:
        """One line for a person."""
        return f"cluster of {self.cluster} x {self.threads} threads, {self._rows()} each, {self._weights()}"


def cluster_plans(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device
) -> Iterator[ClusterPlan]:
    """All shapes that fit the chip."""
    lanes = [(8, 2), (8, 4), (16, 2), (32, 2)] + ([] if bf16 else [(32, 1)])
    for cluster, threads, (klanes, vec), rows in product(
        device.clusters, (128, 256, 384, 512), lanes, range(1, 9)
    ):
        if cluster > min(schedule.sizes) or rows > batch:
            continue
        plan = cluster_plan(schedule, batch, members, bf16, device, cluster, threads, klanes, vec, rows)
        if plan is not None:
            yield plan


def cluster_plan(
    schedule: Schedule, batch: int, members: int, bf16: bool, device: Device,
    cluster: int, threads: int, klanes: int, vec: int, rows: int,
) -> ClusterPlan | None:  # fmt: skip
    """One shape: weights go to registers, those on the critical path first, the rest to shared memory."""
    stages, matrices = schedule.stages, schedule.matrices
    chunk, words, groups = klanes * vec, vec // 2 if bf16 else vec, threads // klanes
    units = [ceil_div(ceil_div(stage.size, cluster), groups) for stage in stages]
    sums = [n * stage.gates for n, stage in zip(units, stages, strict=True)]  # of a group and batch row
    if max(sums) * rows > 32 or max(sums) * rows * vec > 64:
        return None
    rounds = [ceil_div(schedule.lengths[m.source], chunk) for m in matrices]
    resident = _in_registers(schedule, threads, klanes, vec, rows, bf16, units, sums, rounds)
    shared = ceil_div(16 * len(stages), 128) * 128
    shared += sum(8 * rows * ceil_div(n, chunk) * chunk for n in schedule.lengths)
    shared = ceil_div(shared, 128) * 128
    shared += sum(
        (all_ - kept) * sums[m.stage] * threads * words * 4
        for m, all_, kept in zip(matrices, rounds, resident, strict=True)
    )
    if shared > device.shared_limit:
        return None
    cost = _cycles(schedule, cluster, klanes, vec, rows, units, sums, rounds, resident, words)
    cost *= waves(batch, members, rows, cluster, device)
    return ClusterPlan(
        cluster=cluster, threads=threads, rows=rows, shared=shared, bf16=bf16, cost=cost, klanes=klanes, vec=vec,
        in_registers=tuple(resident),
    )  # fmt: skip


def _in_registers(
    schedule: Schedule, threads: int, klanes: int, vec: int, rows: int, bf16: bool, units: Sequence[int],
    sums: Sequence[int], rounds: Sequence[int],
) -> list[int]:  # fmt: skip
    """For each matrix the rounds whose weights registers can hold."""
    words = vec // 2 if bf16 else vec
    owned = [max(1, n * rows // klanes) for n in units]
    budget = REGISTERS[threads] - 52 - (8 if bf16 else 0) - max(sums) * rows * vec // 2
    budget -= max(0, max(units) * rows // klanes - 1) * 3
    # A unit has two numbers beside its sum in the simplest cell: what is more needs registers of its own.
    budget -= sum(
        2 * n * (stage.gates + stage.sent - 2) for n, stage in zip(owned, schedule.stages, strict=True)
    )
    resident = [0] * len(rounds)
    for j in sorted(range(len(rounds)), key=lambda j: not schedule.critical[j]):
        each = sums[schedule.matrices[j].stage] * words
        resident[j] = max(0, min(rounds[j], budget // each))
        budget -= resident[j] * each
    return resident


def exchange_cycles(cluster: int) -> float:
    """Cycles to pass a vector round a cluster; between measured sizes, in proportion."""
    for (low, least), (high, most) in pairwise(EXCHANGE):
        if cluster <= high:
            return least + (most - least) * (cluster - low) / (high - low)
    return EXCHANGE[-1][1]


def _cycles(
    schedule: Schedule, cluster: int, klanes: int, vec: int, rows: int, units: Sequence[int], sums: Sequence[int],
    rounds: Sequence[int], resident: Sequence[int], words: int,
) -> float:  # fmt: skip
    """Cycles per step: exchange, reduction and epilogue of each stage, and the products where they show.

    A small model fitted to measurements on an H200; it only ranks shapes.
    """
    broadcast = 1.0 if klanes == 32 or vec == 4 else 0.7  # lanes that read one address share little
    crowd = (1.0, 1.5, 2.6)[min(rows, 3) - 1]  # registers are too few to keep several rows in flight
    total = 0.0
    for s, stage in enumerate(schedule.stages):
        exchange = exchange_cycles(cluster) + rows * stage.sent * 12 * cluster // 8
        warps = ceil_div(ceil_div(ceil_div(stage.size, cluster), units[s]), 32 // klanes)
        work = {True: 0.0, False: 0.0}
        for j, matrix in enumerate(schedule.matrices):
            if matrix.stage != s:
                continue
            fmas = rounds[j] * sums[s] * rows * vec
            loads = rounds[j] * rows
            reloaded = (rounds[j] - resident[j]) * sums[s]
            issue = ceil_div(warps, 4) * (fmas + loads + reloaded)
            memory = warps * (loads * vec * broadcast + reloaded * words)
            work[schedule.critical[j]] += crowd * max(issue, memory, fmas // vec * 4) + 0.2 * min(
                issue, memory
            )
        reduction = 28 * (klanes.bit_length() - 1) + 8 * sums[s] * rows + 40 * max(0, warps - 5)
        epilogue = 30 * (stage.gates + stage.sent - 2)
        total += 260 + epilogue + exchange + reduction + work[True] + max(0.0, work[False] - 0.7 * exchange)
    return total
