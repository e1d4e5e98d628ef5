"""An existing Ray cluster: work as Ray tasks with declared CPUs or a GPU, tried elsewhere when a node dies."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from deeprnn.errors import UserError, need
from deeprnn.sweeps.engines import Board, WorkerLost

RETRIES = 20
"""times that Ray tries a task again whose node or worker died"""
CONNECT = 5.0
"""seconds for an address to answer"""
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""a frame of HTTP/2: no settings, whose kind is the fourth byte"""
PASSED_ON = ("DEEPRNN_DATA", "DEEPRNN_IMPORT")
"""variables of the environment that workers have too"""


class RayEngine:
    """Tasks on a Ray cluster; without an address on one of this machine's own."""

    def __init__(self, address: str, device: str, jobs: int | None = None) -> None:
        self.ray = need("ray", extra="ray")
        self.address, self.device, self.jobs = address, device, jobs
        self.slots = jobs or 1
        self.board: Any = None

    def __enter__(self) -> RayEngine:
        ray = self.ray
        self.owns_cluster = not ray.is_initialized()
        if self.owns_cluster:
            self._connect()
        gpu = self.device.startswith("cuda")
        kind = "GPU" if gpu else "CPU"
        available = int(ray.cluster_resources().get(kind, 0))
        if not available and not self.jobs:
            raise UserError(
                f"the Ray cluster has no {kind} to give: start a node that has, or choose another --device"
            )
        self.slots = self.jobs or available
        self.resources = {"num_cpus": 0 if gpu else 1, "num_gpus": 1 if gpu else 0, "max_retries": RETRIES}
        on_this_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor = (
            ray.remote(Board)
            .options(num_cpus=0, scheduling_strategy=on_this_node, max_concurrency=8)
            .remote()
        )
        self.board = _BoardProxy(actor)
        return self

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        settings: dict[str, Any] = {"log_to_driver": False}
        if self.address:
            settings["address"] = _checked_address(self.address)
        try:
            self.ray.init(**settings, configure_logging=True, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"--address {self.address or 'local'}: no Ray cluster answers ({error})"
            ) from None

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit a Ray task; its future has one result, whichever attempt ended."""
        remote = self.ray.remote(_with_variables).options(**self.resources)
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        inner = remote.remote(variables, work, self.board, self.device, *arguments).future()
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()
        lost = (self.ray.exceptions.WorkerCrashedError, self.ray.exceptions.NodeDiedError,
                self.ray.exceptions.ObjectLostError, self.ray.exceptions.ActorDiedError)  # fmt: skip

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, lost):
                outer.set_exception(WorkerLost(str(error).splitlines()[0]))
            elif error is not None:
                outer.set_exception(getattr(error, "cause", None) or error)
            else:
                outer.set_result(done.result())

        inner.add_done_callback(pass_on)
        return outer

    def __exit__(self, *error: object) -> None:
        if self.owns_cluster:
            self.ray.shutdown()


def _with_variables(variables: dict[str, str], work: Callable[..., Any], *arguments: Any) -> Any:
    """In a worker: with the driver's variables, where the node has none of its own."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return work(*arguments)


class _BoardProxy:
    """The board as an actor: calls wait for their answer; `WorkerLost` where its node, or the cluster, is gone."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "actor":
            raise AttributeError(name)
        ray = need("ray", extra="ray")

        def call(*arguments: Any) -> Any:
            try:
                return ray.get(getattr(self.actor, name).remote(*arguments))
            except ray.exceptions.RayError as error:
                first = str(error).strip().splitlines()[0][:200]
                raise WorkerLost(f"the Ray cluster answers no more ({first})") from error

        return call


def _checked_address(address: str) -> str:
    """An address that answers; Ray itself would try for a minute."""
    plain = address.partition("://")[2] or address
    if address == "auto":
        return address
    host, colon, port = plain.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--address {address}: give host:port, ray://host:port, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT) as connection:
            speaks = "RAY_USE_TLS" in os.environ or _speaks_grpc(connection)
    except OSError as error:
        raise UserError(
            f"--address {address}: nothing answers there ({error.strerror or error}); `ray status` on the cluster "
            "says its address"
        ) from None
    if not speaks:
        raise UserError(
            f"--address {address}: something other than Ray answers there, perhaps its dashboard; `ray status` on the "
            "cluster says its address"
        )
    return address


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a server greets with the settings of HTTP/2, as Ray's do and its dashboard does not."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    greeting = b""
    while len(greeting) < 4 and (more := connection.recv(16)):
        greeting += more
    return greeting[3:4] == SETTINGS[3:4]
