"""Ray nodes on this machine, and somebody who kills them while a sweep runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from deeprnn.sweeps.study import Study
from tests.sweeps.toys import Quiet

MEMORY = 80 * 2**20
"""bytes of a node's object store: nothing of ours is kept there"""


class Cluster:
    """A head that runs no task, and nodes of one CPU."""

    def __init__(self, nodes: int) -> None:
        self.count = nodes
        self.nodes: list[Any] = []

    def __enter__(self) -> Cluster:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster as Ray

        head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
        self.ray = Ray(initialize_head=True, head_node_args=head)
        self.nodes = [self._node() for _ in range(self.count)]
        return self

    def _node(self) -> Any:
        return self.ray.add_node(num_cpus=1, object_store_memory=MEMORY, wait=False)

    @property
    def address(self) -> str:
        return self.ray.address

    def kill_oldest(self) -> None:
        """Kill a node as a loss of power would, and bring another one."""
        self.ray.remove_node(self.nodes.pop(0), allow_graceful=False)
        self.nodes.append(self._node())

    def kill_head(self) -> None:
        """Kill the head, and with it the cluster."""
        self.ray.remove_node(self.ray.head_node, allow_graceful=False)

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()


class Killer(Quiet):
    """A view that kills nodes, each when some pack has saved something since the last kill.

    A view is called in the main thread, where alone Ray can begin a node.
    """

    def __init__(self, cluster: Cluster, sweep: Path, kills: int) -> None:
        super().__init__()
        self.cluster, self.sweep, self.kills = cluster, sweep, kills
        self.killed = 0
        self.last = 0.0

    def changed(self, study: Study, running: int) -> None:
        saved = [_modified(path) for path in self.sweep.glob("packs/*/last.json")]
        if self.killed < self.kills and max(saved, default=0.0) > self.last:
            self.cluster.kill_oldest()
            self.killed += 1
            self.last = time.time()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # the pack ended meanwhile
        return 0.0
