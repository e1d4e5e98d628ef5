"""What a plan is: one kernel, the values of its macros and its launch shape."""

from __future__ import annotations

from dataclasses import dataclass

from deeprnn.backends.cuda.device import Device


@dataclass(frozen=True)
class KernelPlan:
    """A shape of a kernel that unrolls a cell over time."""

    cluster: int
    """blocks of a thread-block cluster"""
    threads: int
    rows: int
    """batch rows that one cluster (or one block) serves"""
    shared: int
    """bytes of shared memory of a block"""
    bf16: bool
    """whether weights are held in bf16"""
    cost: float
    """estimated cycles per step"""

    source = ""
    """the kernel's file, from the folder of the sources"""
    cooperative = False
    """whether blocks wait for each other across the whole grid"""
    keeps_locals_in_memory = False
    """whether what a unit carries from step to step lies in global memory instead of registers"""

    def arch(self, device: Device) -> str:
        """What the kernel is compiled for."""
        return device.arch

    def macros(self) -> dict[str, int | str]:
        """The #defines that specialise the source."""
        raise NotImplementedError

    def describe(self) -> str:
        """One line for a person."""
        raise NotImplementedError

    @property
    def exchange_words(self) -> int:
        """Words of 4 bytes in global memory that a cluster (or team) exchanges through."""
        return 0

    @property
    def common_words(self) -> int:
        """Words before those: what all teams share."""
        return 0

    def _rows(self) -> str:
        return f"{self.rows} batch row{'s' * (self.rows > 1)}"

    def _weights(self) -> str:
        return f"weights on chip in {'bf16' if self.bf16 else 'fp32'}, {self.shared // 1024} KiB shared memory a block"


def listed(values) -> str:
    """Numbers as a C list."""
    return ",".join(str(int(v)) for v in values)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def waves(batch: int, members: int, rows: int, cluster: int, device: Device) -> int:
    """How often the card is filled: 16 clusters where 15 fit take twice the time of 15."""
    return ceil_div(ceil_div(batch, rows) * members, device.resident(cluster))
