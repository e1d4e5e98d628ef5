"""Which kernel serves a transition, and in which shape: cluster size, threads, rows, where weights lie.

A step is a ring of stages (see cluster.cu). `Ring` lists them for one direction; `make_plan` weighs the
kernel's possible shapes by a small cost model (costs.py), in cycles per step, and takes the cheapest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING

from deeprnn.backends.cuda.costs import ffma_cost, mma_cost

if TYPE_CHECKING:
    from deeprnn.backends import TransitionSpec

UNITS = ("sigmoid", "tanh", "relu", "identity")  # in the order of enum Unit
SHARED_LIMIT = 227 * 1024  # bytes of shared memory a block may ask for on Hopper
REGISTERS = {128: 255, 256: 255, 384: 168, 512: 128}  # what a thread may hold when the block has the SM alone
TENSOR_CORES = True  # whether "mma" may be chosen
MOST_JOBS = 40  # of largest.cu, which looks at a launch's numbers beforehand
SPARE = (32, 24)  # registers of a multiplying thread that hold no weights or sums, without and with scalers
# How tiles are sent (through L2 or not) and by how many warps: what can be the fastest for one stream, and for several.
# Eight warps are slower: they leave the multiplying ones too few registers for the weights.
MANNERS = (((True, 4), (False, 4)), ((True, 4),))
FINISHER_REGISTERS = {4: 56, 8: 48}  # of a thread of the warps that finish tiles, as in mma.cu
SCALED_COST = 1.12  # of a kernel whose scales change, beside one whose scales do not
NARROW_COST = 1.1  # of such a kernel, or one in bf16, with few warps side by side over the inner dimension
SCALERS, SCALER_REGISTERS = 4, 32  # the warps that compute scales where they change; finishers have 48 then
# Clusters of each size that 132 processors hold at once (measured on an H200): a cluster lies in one group of
# processors, and those groups are of unequal size, so that nine is hardly better than sixteen.
RESIDENT = (66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)  # for 2, 3, ... 16 blocks


@dataclass(frozen=True)
class Device:
    """What of a GPU bears on the choice."""

    capability: tuple[int, int] = (9, 0)
    shared_limit: int = SHARED_LIMIT
    processors: int = 132

    @property
    def widest_cluster(self) -> int:
        """16 blocks where the data-centre parts allow it, else the portable 8."""
        return 16 if self.capability in ((9, 0), (10, 0), (10, 3)) else 8

    @property
    def clusters(self) -> range:
        """Cluster sizes worth weighing, the widest first."""
        return range(self.widest_cluster, 1, -1)

    def resident(self, cluster: int) -> int:
        """How many clusters of this size run at once; the others wait for a whole sequence."""
        return max(1, RESIDENT[cluster - 2] * self.processors // 132)

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Ring:
    """The stages of a step in the order they run, and the matrices that feed them."""

    sizes: tuple[int, ...]  # width of each stage's vector
    units: tuple[int, ...]
    stages: tuple[int, ...]  # per matrix: the stage it feeds
    sources: tuple[int, ...]  # per matrix: the vector it multiplies
    names: tuple[tuple[str, int], ...]  # per matrix: ("W" or "S", layer)
    backward: bool


@lru_cache(maxsize=4096)
def ring(spec: TransitionSpec, backward: bool) -> Ring:
    """Forward, stage s is layer s; backward, the stages run from the top layer down."""
    depth = spec.depth
    order = range(depth - 1, -1, -1) if backward else range(depth)
    matrices: list[tuple[int, int, tuple[str, int]]] = []
    for stage in range(depth):
        critical = ("W", 0 if stage == 0 else depth - stage) if backward else ("W", stage)
        matrices.append((stage, (stage - 1) % depth, critical))
        for l in range(1, depth):
            if spec.shortcuts[l] and backward and stage == 0:
                matrices.append((0, depth - 1 - l, ("S", l)))
            if spec.shortcuts[l] and not backward and stage == l:
                matrices.append((l, depth - 1, ("S", l)))
    return Ring(
        tuple(spec.sizes[l] for l in order),
        tuple(UNITS.index(spec.units[l]) for l in order),
        tuple(m[0] for m in matrices),
        tuple(m[1] for m in matrices),
        tuple(m[2] for m in matrices),
        backward,
    )


@dataclass(frozen=True)
class Plan:
    """One kernel: its source, its macros' values and its launch shape."""

    path: str  # "cluster", "mma" or "generic"
    cluster: int
    threads: int
    rows: int  # batch rows of one cluster (or block)
    klanes: int = 1
    vec: int = 1
    kept: tuple[int, ...] = ()  # per matrix: rounds of the lanes whose weights lie in registers
    shared: int = 0  # bytes of shared memory of a block
    bf16: bool = False
    cost: float = 0.0  # estimated cycles per step
    mgroups: int = 1  # mma: warps side by side over the outputs
    kgroups: int = 1  # mma: warps that share the inner dimension
    through_l2: bool = False  # mma: finished tiles go to L2 and from there to all blocks at once
    finishers: int = 4  # mma: warps that finish tiles
    words: int = 0  # of 4 bytes in global memory that a cluster exchanges through
    streams: int = 1  # mma: parts of the rows that take turns, so that one computes while another travels

    def arch(self, device: Device) -> str:
        """What the kernel is compiled for; that warps lend each other registers is a feature of one architecture."""
        return device.arch + ("a" if self.path == "mma" else "")

    def extra_macros(self) -> dict[str, int | str]:
        """What a kind of plan with fields of its own adds."""
        return {}

    def describe(self) -> str:
        """One line for a person."""
        rows = f"{self.rows} batch row{'s' * (self.rows > 1)}"
        if self.path == "generic":
            return f"generic: a block of {self.threads} threads per {rows}, weights through L2"
        if self.path == "mma":
            return (
                f"cluster of {self.cluster} x {self.threads} threads, {rows} each on the tensor "
                f"cores in {'bf16' if self.bf16 else 'three fp16 products'}, {self.shared // 1024} KiB shared memory"
            )
        return (
            f"cluster of {self.cluster} x {self.threads} threads, {rows} each, "
            f"weights on chip in {'bf16' if self.bf16 else 'fp32'}, {self.shared // 1024} KiB shared memory a block"
        )


def make_plan(
    spec: TransitionSpec, batch: int, members: int, bf16: bool, backward: bool, device: Device
) -> Plan:
    """The cheapest shape that fits; the generic kernel where no cluster can hold the weights."""
    return _make_plan(ring(spec, backward), max(batch, 1), max(members, 1) * _company.size, bf16, device)


@dataclass
class Company:
    """How many kernels are expected to share the GPU."""

    size: int = 1


_company = Company()


def expect_company(kernels: int) -> None:
    """Say that so many kernels run side by side (threads, each on its stream): each then spreads less widely.

    A cluster of 16 is the fastest for a kernel alone, but only seven of them fit the card at once; with
    three populations of five side by side, the fifteen clusters of 8 all run, at five sixths of the speed.
    """
    _company.size = max(1, kernels)


@lru_cache(maxsize=4096)
def _make_plan(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> Plan:
    """The cheapest shape. For FFMA weights in bf16 have to be unpacked at every use, which takes twice the time
    (h200-measure.json): where they fit in fp32, they are rounded beforehand and kept so."""
    from deeprnn.backends.cuda.wide import wide_plan  # it builds on this module

    clusters = device.capability[0] >= 9
    many = (
        tuple(mma_plans(ring, batch, members, bf16, device))
        if clusters and TENSOR_CORES and batch > 1
        else ()
    )
    for packed in (False, True) if bf16 else (False,):
        few = cluster_plans(ring, batch, members, packed, device) if clusters else ()
        best = min(chain(few, many), key=lambda plan: plan.cost, default=None)
        if best is None or (best.path == "cluster" and batch * members > 1):  # perhaps in many waves
            whole = wide_plan(ring, batch, members, packed, device)
            best = min(filter(None, (best, whole)), key=lambda plan: plan.cost, default=None)
        if best is not None:
            return best
    return generic_plan(ring, batch, members, bf16, device)


def unbounded(ring: Ring) -> bool:
    """Whether some layer's outputs can be of any size."""
    return any(UNITS[u] in ("relu", "identity") for u in ring.units)


def cluster_plans(ring: Ring, batch: int, members: int, bf16: bool, device: Device):
    """All shapes of the cluster kernel that fit the chip."""
    lanes = [(8, 2), (8, 4), (16, 2), (32, 2)] + ([] if bf16 else [(32, 1)])
    for cluster, threads, (klanes, vec), rows in product(
        device.clusters, (128, 256, 384, 512), lanes, range(1, 9)
    ):
        if cluster > min(ring.sizes) or rows > batch:
            continue
        plan = cluster_plan(ring, batch, members, bf16, device, cluster, threads, klanes, vec, rows)
        if plan is not None:
            yield plan


def cluster_plan(
    ring: Ring, batch: int, members: int, bf16: bool, device: Device,
    cluster: int, threads: int, klanes: int, vec: int, rows: int,
) -> Plan | None:  # fmt: skip
    """One shape: weights go to registers, those on the critical path first, the rest to shared memory."""
    chunk, words, slots = klanes * vec, vec // 2 if bf16 else vec, threads // klanes
    rpt = [_up(_up(n, cluster), slots) for n in ring.sizes]
    if max(rpt) * rows > 32 or max(rpt) * rows * vec > 64:
        return None
    rounds = [_up(ring.sizes[q], chunk) for q in ring.sources]
    sums = max(rpt) * rows * vec
    budget = (
        REGISTERS[threads] - 52 - (8 if bf16 else 0) - sums // 2 - max(0, max(rpt) * rows // klanes - 1) * 3
    )
    kept = [0] * len(rounds)
    critical = [q == (s - 1) % len(ring.sizes) for s, q in zip(ring.stages, ring.sources, strict=True)]
    for j in sorted(range(len(rounds)), key=lambda j: not critical[j]):
        kept[j] = max(0, min(rounds[j], budget // (rpt[ring.stages[j]] * words)))
        budget -= kept[j] * rpt[ring.stages[j]] * words
    shared = _up(16 * len(ring.sizes), 128) * 128
    shared += sum(8 * rows * _up(n, chunk) * chunk for n in ring.sizes)
    shared = _up(shared, 128) * 128
    shared += sum(
        (rounds[j] - kept[j]) * rpt[ring.stages[j]] * threads * words * 4 for j in range(len(rounds))
    )
    if shared > device.shared_limit:
        return None
    cost = ffma_cost(ring, cluster, klanes, vec, rows, rpt, rounds, kept, critical, words)
    cost *= _waves(batch, members, rows, cluster, device)
    return Plan("cluster", cluster, threads, rows, klanes, vec, tuple(kept), shared, bf16, cost)


def _waves(batch: int, members: int, rows: int, cluster: int, device: Device) -> int:
    """How often the card is filled: 16 clusters where 15 fit take twice the time of 15."""
    return _up(_up(batch, rows) * members, device.resident(cluster))


def mma_plans(ring: Ring, batch: int, members: int, bf16: bool, device: Device):
    """All shapes of the tensor-core kernel that fit the chip."""
    tiles = [_up(n, 16) for n in ring.sizes]
    # Of cluster sizes that leave the busiest block the same number of tiles only the smallest is worth trying.
    dealt = {tuple(_up(n, c) for n in tiles): c for c in device.clusters if c <= min(tiles)}
    for cluster, mgroups, kgroups in product(dealt.values(), (1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 8)):
        if mgroups > _up(max(tiles), cluster) or mgroups * kgroups not in (4, 5, 6, 8, 9, 10, 12, 15, 16):
            continue
        groups = max(1, device.resident(cluster) // members)
        even = {_up(batch, groups * waves) for waves in (1, 2, 3, 4)}  # no wave nearly empty
        for rows in sorted(even | {min(batch, 8), min(batch, 16), min(batch, 32)}):
            for streams in sorted({1, *range(_up(rows, 16), _up(rows, 5) + 1)}):
                each = _up(rows, streams)
                if each > 48 or (streams > 1 and each <= 4):
                    continue
                shape = (cluster, mgroups, kgroups, each * streams, streams)
                for manner in MANNERS[streams > 1]:
                    plan = mma_plan(ring, batch, members, bf16, device, *shape, *manner)
                    if plan is not None:
                        yield plan


def mma_plan(
    ring: Ring, batch: int, members: int, bf16: bool, device: Device,
    cluster: int, mgroups: int, kgroups: int, rows: int, streams: int = 1, through_l2: bool = True,
    finishers: int = 4,
) -> Plan | None:  # fmt: skip
    """One shape of the tensor-core kernel; sizes as in mma.cu. `rows` are those of all streams."""
    depth, parts, ntiles, warps = (
        len(ring.sizes),
        1 if bf16 else 2,
        _up(rows // streams, 8),
        mgroups * kgroups,
    )
    scalers = SCALERS if ring.backward or unbounded(ring) else 0
    threads = 32 * (warps + finishers + scalers)
    if ntiles * streams > 16 or threads > 1024:  # a lane's reset marks fill a word
        return None
    if depth + len(ring.stages) > MOST_JOBS:
        return None
    tiles = [_up(n, 16) for n in ring.sizes]
    mine = [_up(_up(n, cluster), mgroups) for n in tiles]
    rounds = [_up(tiles[q], kgroups) for q in ring.sources]
    critical = [q == (s - 1) % depth for s, q in zip(ring.stages, ring.sources, strict=True)]
    sums = max(mine) * ntiles * (4 if ntiles > 2 else 12)
    budget = _multiplier_registers(warps, finishers, scalers) - SPARE[bool(scalers)] - max(sums, 24)
    kept = [0] * len(rounds)
    whole = [tiles[q] // kgroups for q in ring.sources]  # rounds in which every warp has a tile: those first
    for most in (whole, rounds):
        for j in sorted(range(len(rounds)), key=lambda j: not critical[j]):
            each = mine[ring.stages[j]] * parts * 4
            more = max(0, min(most[j] - kept[j], budget // each))
            kept[j] += more
            budget -= more * each
    shared = _up((16 * depth + 8) * streams, 128) * 128  # barriers, and tables of scales
    shared += _up(depth + len(ring.stages), 4) * 16
    shared += streams * ntiles * (8 * depth * 10 * 4 + kgroups * 128)
    shared = _up(shared, 128) * 128
    for s, n in enumerate(tiles):
        doubled = depth == 1 or any(
            q == s and not c for q, c in zip(ring.sources, critical, strict=True)
        )  # read as a shortcut
        shared += streams * (2 if doubled else 1) * n * ntiles * 512
    for j, n in enumerate(rounds):
        if kept[j] < n:  # in the last round perhaps not every warp has a tile
            inner = (n - 1 - kept[j]) * kgroups + tiles[ring.sources[j]] - (n - 1) * kgroups
            shared += inner * mine[ring.stages[j]] * mgroups * parts * 512
    shared += streams * max(mine) * warps * ntiles * 512  # sums
    if through_l2:
        shared += finishers * _up(_up(max(tiles), cluster) * ntiles, finishers) * 512  # tiles on their way
    if shared > device.shared_limit or min(tiles) < cluster:
        return None
    shape = (cluster, mgroups, kgroups, finishers, rows // streams, streams, through_l2)
    cost = mma_cost(ring, *shape, kept) * (SCALED_COST if scalers else 1.0)
    if kgroups < 4 and (bf16 or scalers):
        cost *= NARROW_COST
    # Weights in shared memory are in the way of everything else there.
    cost *= 1 + (0.25 if streams > 1 else 0.1) * (1 - sum(kept) / sum(rounds))
    cost *= _waves(batch, members, rows, cluster, device)
    return Plan(
        "mma", cluster, threads, rows, kept=tuple(kept), shared=shared, bf16=bf16, cost=cost,
        mgroups=mgroups, kgroups=kgroups, streams=streams,
        through_l2=through_l2, finishers=finishers, words=streams * sum(tiles) * ntiles * 128 if through_l2 else 0,
    )  # fmt: skip


def _multiplier_registers(warps: int, finishers: int, scalers: int) -> int:
    """What a multiplying thread may hold; whole warpgroups are lent what the others do not need."""
    threads = 32 * (warps + finishers + scalers)
    most = 65536 // (_up(threads, 128) * 128) // 8 * 8
    if threads > 256 and warps % 4 == 0:
        each = FINISHER_REGISTERS[8 if scalers else finishers]
        pool = most * (threads // 128) - each * (finishers // 4) - SCALER_REGISTERS * (scalers // 4)
        most = min(pool // (warps // 4) // 8 * 8, 248)
    return min(most, REGISTERS[256])


def generic_plan(ring: Ring, batch: int, members: int, bf16: bool, device: Device) -> Plan:
    """The kernel for every other case: as many rows a block as keep the card busy and fit its memory."""
    threads, rows = 1024, 8
    while rows > 1 and (
        _up(batch, rows) * members < device.processors
        or _generic_shared(ring, threads, rows) > device.shared_limit
    ):
        rows //= 2
    return Plan("generic", 1, threads, rows, shared=_generic_shared(ring, threads, rows), bf16=bf16)


def _generic_shared(ring: Ring, threads: int, rows: int) -> int:
    split = max(max(1, (threads // 32) // _up(n, 32)) * n for n in ring.sizes)
    return 4 * rows * (sum(ring.sizes) + split)


def macros(plan: Plan, ring: Ring, has_reset: bool, has_grad_mid: bool) -> dict[str, str]:
    """The #defines that specialise the source."""

    def listed(values) -> str:
        return ",".join(str(int(v)) for v in values)

    values = {
        "DEPTH": len(ring.sizes), "SIZES": listed(ring.sizes), "UNITS": listed(ring.units),
        "MATRICES": len(ring.stages), "MAT_STAGE": listed(ring.stages), "MAT_SOURCE": listed(ring.sources),
        "THREADS": plan.threads, "ROWS": plan.rows, "BACKWARD": int(ring.backward),
        "HAS_RESET": int(has_reset), "HAS_GRAD_MID": int(has_grad_mid),
    }  # fmt: skip
    if plan.path == "cluster":
        values |= {
            "CLUSTER": plan.cluster, "KLANES": plan.klanes, "VEC": plan.vec, "BF16": int(plan.bf16),
            "MAT_REGS": listed(plan.kept),
        }  # fmt: skip
    if plan.path == "mma":
        del values["THREADS"]
        values |= {
            "CLUSTER": plan.cluster, "MGROUPS": plan.mgroups, "KGROUPS": plan.kgroups,
            "ROWS": plan.rows // plan.streams, "STREAMS": plan.streams,
            "NTILES": _up(plan.rows // plan.streams, 8), "FINISHERS": plan.finishers,
            "THROUGH_L2": int(plan.through_l2), "BF16": int(plan.bf16), "MAT_REGS": listed(plan.kept),
        }  # fmt: skip
    values |= plan.extra_macros()
    return {name: str(value) for name, value in values.items()}


def _up(a: int, b: int) -> int:
    return -(-a // b)
