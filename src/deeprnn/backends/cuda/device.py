"""The properties of a GPU that decide which kernel runs, and in which shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

SHARED_LIMIT = 227 * 1024  # bytes of shared memory a block may ask for on Hopper
# Clusters of each size that 132 processors hold at once (measured on an H200): a cluster lies in one group of
# processors, and those groups are of unequal size, so that nine is hardly better than sixteen.
RESIDENT = (66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)  # for 2, 3, ... 16 blocks


@dataclass(frozen=True)
class Device:
    """A GPU; by default an H200."""

    capability: tuple[int, int] = (9, 0)
    shared_limit: int = SHARED_LIMIT
    sm_count: int = 132

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
        return max(1, RESIDENT[cluster - 2] * self.sm_count // 132)

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def nvidia(device: torch.device) -> bool:
    """Whether kernels of ours can run there: torch calls AMD's GPUs "cuda" too."""
    return device.type == "cuda" and torch.version.cuda is not None


@lru_cache(maxsize=16)
def device_of(index: int) -> Device:
    """A GPU by its number."""
    properties = torch.cuda.get_device_properties(index)
    shared = int(getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT))
    return Device((properties.major, properties.minor), shared, properties.multi_processor_count)


def index_of(device: torch.device) -> int:
    """A GPU's number; "cuda" alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def hopper(device: torch.device) -> bool:
    """Whether kernels that are written for Hopper's products of warpgroups can run."""
    return nvidia(device) and device_of(index_of(device)).capability == (9, 0)
