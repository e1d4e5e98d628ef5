"""The processes that train one model together, and what they do as one.

`torchrun` starts the same command several times. Each process, a *rank*, trains its own share of the lanes and carries
their states; gradients and losses are summed over all ranks, so that every rank makes the same update. Rank 0, the
*lead*, alone reads and writes the run folder and prints. `Ranks()` is the ordinary case of one process, in which
nothing here does anything.

What passes between ranks is tensors, JSON and safetensors: nothing that could run code.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from deeprnn import launcher
from deeprnn.errors import UserError

T = TypeVar("T")
PAUSE = 0.2
"""seconds between two meetings, at which ranks agree on the time and on signals"""


class LostRank(UserError):
    """Another process of the run has gone, or cannot be reached."""


class Ranks:
    """One process of `count` that train together: who it is, and what all do at the same time.

    Methods that speak of all ranks must be called by all of them, in the same order.
    """

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._ticks, self._interval = 0, 1

    @property
    def lead(self) -> bool:
        """Whether this process reads, writes and prints for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    def share(self, lanes: int) -> slice:
        """The lanes of this rank, of so many; the first ranks have one more where they do not divide evenly."""
        per_rank, over = divmod(lanes, self.count)
        first = self.rank * per_rank + min(self.rank, over)
        return slice(first, first + per_rank + (self.rank < over))

    # ---- over all ranks

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, in its place: the same bits on every rank."""
        if not self.alone:
            with _others_present():
                torch.distributed.all_reduce(tensor)
        return tensor

    def most(self, value: float) -> float:
        """The largest of the ranks' values."""
        if self.alone:
            return value
        largest = torch.tensor(value, dtype=torch.float64)
        with _others_present():
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest.item()

    def all_lanes(self, of_rank: Tensor, lanes: int) -> Tensor:
        """Every rank's lanes (P, lanes, H) from each one's own (P, share, H)."""
        if self.alone:
            return of_rank
        of_all = of_rank.new_zeros(of_rank.shape[0], lanes, *of_rank.shape[2:])
        of_all[:, self.share(lanes)] = of_rank
        return self.sum_(of_all)  # zeros elsewhere: the sum is exact

    def elapsed(self, seconds: float, now: bool = False) -> float | None:
        """The seconds since the last meeting that all ranks agree on, or None between two meetings.

        A decision by the clock must be the same on all ranks. Asking each other at every update would cost as much
        as a small update does, so ranks meet a few times a second: after a number of calls that all can compute.
        `now` asks for a meeting in any case.
        """
        if self.alone:
            return seconds
        self._ticks += 1
        if self._ticks < self._interval and not now:
            return None
        agreed = self.most(seconds)
        ideal = self._ticks * PAUSE / max(agreed, 1e-9)
        self._interval = max(1, min(int(ideal), 2 * self._interval))  # no leap: an update may become slower
        self._ticks = 0
        return agreed

    # ---- what the lead knows

    def same(self, value: Any) -> Any:
        """The lead's value, plain data, on every rank."""
        if self.alone:
            return value
        return json.loads(self._send(json.dumps(value).encode() if self.lead else b""))

    def on_lead(self, compute: Callable[[], T]) -> T:
        """Call a function on the lead alone and give its result, plain data, to every rank."""
        return self.same(compute() if self.lead else None)

    def same_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The lead's tensors on every rank; the others give anything."""
        if self.alone:
            return dict(tensors)
        packed = safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}) if self.lead else b""
        return safetensors.torch.load(self._send(packed))

    def _send(self, content: bytes) -> bytes:
        with _others_present():
            size = torch.tensor(len(content))
            torch.distributed.broadcast(size, 0)
            data = torch.zeros(int(size), dtype=torch.uint8)
            if self.lead:
                data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            torch.distributed.broadcast(data, 0)
        return data.numpy().tobytes()

    def check_same(self, what: str, value: Any) -> None:
        """Refuse to train where a rank has other plain data than the lead: another machine's files may differ."""
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        digest_of_lead = self.same(digest)
        if self.most(float(digest != digest_of_lead)):
            who = f"rank {self.rank}, which is one of them" if digest != digest_of_lead else "others"
            raise UserError(
                f"{what} differs between rank 0 and {who}: give every machine the same files and the same version"
            )

    def check_lanes(self, lanes: int) -> None:
        """Refuse fewer lanes than ranks."""
        if lanes < self.count:
            raise UserError(
                f"data.lanes={lanes} cannot be split over {self.count} processes: give each at least one with "
                f"--batch-size {self.count} or more, or start fewer"
            )


@contextlib.contextmanager
def _others_present() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # by gloo and NCCL: a connection that was closed, or waited for in vain
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise LostRank(
            f"another process of this run has gone, whose own message says why ({first}); the last checkpoint is "
            "intact, and `deeprnn resume` goes on"
        ) from error


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """All processes that the launcher started, connected: by gloo, and by NCCL between GPUs."""
    if launcher.count() == 1:
        yield Ranks()
        return
    yield Ranks(*connect(device))
    # After an error the process ends with its connections, which is how the others learn of it.
    disconnect()


def connect(device: torch.device) -> tuple[int, int]:
    """Meet the others that the launcher started: which of them this process is, and how many they are."""
    from torch import distributed

    if not distributed.is_available():
        raise UserError("this torch was built without torch.distributed: start one process, without torchrun")
    from torch.distributed.rendezvous import rendezvous

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _others_present():
        store, rank, count = next(rendezvous("env://"))
        # Without a --rdzv-backend torchrun keeps one store over all restarts, and in it the addresses of the dead.
        prefix = f"attempt-{launcher.restarts()}"
        store = distributed.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count)
    return rank, count


def disconnect() -> None:
    """Leave the others, when all have come to their end."""
    gc.collect()  # NCCL waits for every CUDA graph that holds a sum of its own, and trainers are cycles
    torch.distributed.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """The device of this process: each on a machine has a GPU of its own."""
    if device.type != "cuda" or launcher.count() == 1:
        return device
    gpus, local = torch.cuda.device_count(), launcher.local_count()
    if local > gpus:
        raise UserError(
            f"{local} processes on this machine need {local} GPUs, and it has {gpus}: start {gpus}"
        )
    device = torch.device("cuda", launcher.local_rank())
    torch.cuda.set_device(device)
    return device
